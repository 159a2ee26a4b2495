"""Operators that follow their inputs: their rules say how the result lies, given how the inputs lie. Pure.

A family of operators has a module of the same name here, for its rules, in `calls`, for how torch's calls are read, and
in `ops`, for how it runs on parts.
"""

from .base import on_parts
from .conv_transpose import ConvTranspose, TransposedWindow
from .einsum import Contraction
from .elementwise import ACTIVATIONS, Pointwise, PRelu
from .norms import BatchNorm, GroupNorm, OwnNorm
from .pooling import AdaptivePool, GlobalAveragePool, Pool
from .random import Drawn, Like, NoiseLike
from .reductions import Along, Reduction
from .resampling import CircularPad, Interpolate, Pad, PixelUnshuffle
from .shapes import Cat, PixelShuffle, Reshape, Stack
from .views import Pieces, View

VIEWS = (Pieces, Reshape, View)
"""Operators whose results share memory with their input, a `Reshape`'s where the memory order allows it."""

__all__ = [
    "ACTIVATIONS",
    "VIEWS",
    "AdaptivePool",
    "Along",
    "BatchNorm",
    "Cat",
    "CircularPad",
    "Contraction",
    "ConvTranspose",
    "Drawn",
    "GlobalAveragePool",
    "GroupNorm",
    "Interpolate",
    "Like",
    "NoiseLike",
    "OwnNorm",
    "PRelu",
    "Pad",
    "Pieces",
    "PixelShuffle",
    "PixelUnshuffle",
    "Pointwise",
    "Pool",
    "Reduction",
    "Reshape",
    "Stack",
    "TransposedWindow",
    "View",
    "on_parts",
]
