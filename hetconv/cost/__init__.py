"""Predicted seconds, bytes and memory of a plan. No ranks, no tensors."""
