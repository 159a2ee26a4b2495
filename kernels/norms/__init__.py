"""Passes over images that norms on shards consist of.

Each handles every channel of every sample on its own: `moments` measures, `affine`
normalizes, and `sums` and `combination` make the gradient.
`moments_of_channels` and `sums_of_channels` take all samples together, as batch norm does.
"""

from .aten import (
    affine,
    combination,
    moments,
    moments_of_channels,
    sums,
    sums_of_channels,
)

__all__ = [
    "affine",
    "combination",
    "moments",
    "moments_of_channels",
    "sums",
    "sums_of_channels",
]
