"""Passes over images that norms on shards consist of.

Each handles every channel of every sample on its own: `moments` measures, `normalized`
normalizes, and `sums` and `combination` make the gradient.
`moments_of_channels` and `sums_of_channels` take all samples together, as batch norm does.
"""

from .aten import (
    as_images,
    combination,
    in_format_of,
    memory_format,
    moments,
    moments_of_channels,
    normalize_to,
    normalized,
    sums,
    sums_of_channels,
)

__all__ = [
    "as_images",
    "combination",
    "in_format_of",
    "memory_format",
    "moments",
    "moments_of_channels",
    "normalize_to",
    "normalized",
    "sums",
    "sums_of_channels",
]
