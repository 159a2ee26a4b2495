"""Operators that follow their inputs: their rules say how the result lies, given how the inputs lie. Pure.

A family of operators has a module of the same name here, for its rules, in `calls`, for how torch's calls are read, and
in `ops`, for how it runs on parts.
"""

from .base import on_parts
from .norms import BatchNorm
from .pointwise import ACTIVATIONS, Pointwise
from .pools import GlobalAveragePool, Pool
from .shapes import Cat, Flatten, PixelShuffle

__all__ = [
    "ACTIVATIONS", "BatchNorm", "Cat", "Flatten", "GlobalAveragePool", "PixelShuffle", "Pointwise", "Pool", "on_parts",
]  # fmt: skip
