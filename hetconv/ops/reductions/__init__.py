"""Reductions that combine results of shards."""
