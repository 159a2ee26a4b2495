"""Boxes, layouts, splits and sharding rules: integers only, no tensors and no ranks."""
