"""Passes over images that norms on shards consist of.

Each handles every channel of every sample on its own: `moments` measures, `normalized`
normalizes, and `sums` and `combination` make the gradient.
`moments_of_channels` and `sums_of_channels` take all samples together, as batch norm does.
Triton computes them on CUDA, in float32 and half precision, and ATen elsewhere.
"""

from .aten import as_images, memory_format
from .passes import (
    Activation,
    combination,
    in_format_of,
    moments,
    moments_of_channels,
    normalize_to,
    normalized,
    runs_on_triton,
    sums,
    sums_of_channels,
)

__all__ = [
    "Activation",
    "as_images",
    "combination",
    "in_format_of",
    "memory_format",
    "moments",
    "moments_of_channels",
    "normalize_to",
    "normalized",
    "runs_on_triton",
    "sums",
    "sums_of_channels",
]
