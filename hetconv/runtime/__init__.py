"""Tensors on shards, and what ranks synchronize during a step."""
