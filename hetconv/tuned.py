"""What tuning found for single convolutions: tiles, in words, for no kernel is known here; and chunks of the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .spec import Conv2dSpec, ConvSpec

STRICT = {"extra": "forbid"}


@dataclass(frozen=True)
class TunedTile:
    """``choice`` is a tile of `hetconv.kernels`, as it prints, or "aten"; it was measured with these versions.

    ``seconds`` are its own, ``heuristic_s`` those of the tile that is taken where nothing was tuned, if that one ran.
    """

    device: str
    torch: str
    triton: str
    what: Literal["forward", "input gradient", "weight gradient"]
    spec: Conv2dSpec
    precision: Literal["ieee", "tf32"]
    choice: str
    seconds: float
    heuristic_s: float | None = None
    __pydantic_config__ = STRICT


@dataclass(frozen=True)
class TunedChunks:
    """A convolution cut by filter in these ``sizes`` and gathered: into how many chunks of the batch, for inference.

    ``seconds`` are those of the whole, the gathering included, beside ``unchunked_s``. One, if no more were faster.
    """

    spec: ConvSpec
    sizes: tuple[int, ...]
    chunks: int
    seconds: float
    unchunked_s: float
    __pydantic_config__ = STRICT
