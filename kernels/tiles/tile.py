"""A tile: the share of one program in a convolution, and how it is launched."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from hetconv.errors import KernelError

TileKind = Literal["tma", "pointer"]
MIN_SIDE, MAX_SIDE = 16, 256  # of a product's operand, that tensor cores take
Pass = Literal["forward", "input gradient", "weight gradient"]


@dataclass(frozen=True)
class Tile:
    """Share of one program in the matrix product that a convolution is, and its launch.

    ===============  ==============  =============  ===============================
    pass             ``m`` counts    ``n`` counts   ``k``, reduced in one step
    ===============  ==============  =============  ===============================
    forward          filters         output pixels  input channels of one tap
    input gradient   input channels  input pixels   filters of one tap
    weight gradient  filters         channels       output pixels
    ===============  ==============  =============  ===============================

    An input gradient's pixels are those of one phase of the stride, a weight gradient's
    channels those of one tap. A tile prints as ``kind:MxNxK:WwSsZz``, for instance
    ``tma:128x128x64:8w4s1z``. ``m`` may be the sum of two powers of two: 192 rows are
    two accumulators, of 128 and 64 rows, that share the other operand.

    Attributes:
        kind: "tma" reads operands by Hopper's copy engine, "pointer" runs anywhere.
        m: Rows of results.
        n: Columns of results.
        k: Depth of one step of the reduction.
        warps: Warps per program.
        stages: Stages of software pipelining.
        split_k: Programs that share one reduction.

    Raises:
        KernelError: The numbers cannot be run.
    """

    kind: TileKind
    m: int
    n: int
    k: int
    warps: int
    stages: int
    split_k: int = 1

    def __str__(self) -> str:
        size = f"{self.m}x{self.n}x{self.k}"
        return f"{self.kind}:{size}:{self.warps}w{self.stages}s{self.split_k}z"

    @staticmethod
    def parse(text: str) -> Tile:
        """Returns the tile that prints as ``text``.

        Raises:
            KernelError: No tile prints so.
        """
        pattern = r"(tma|pointer):(\d+)x(\d+)x(\d+):(\d+)w(\d+)s(\d+)z"
        found = re.fullmatch(pattern, text)
        if found is None:
            raise KernelError(
                f"tile {text!r} is not understood; write it as tma:128x128x64:8w4s1z"
            )
        kind, *numbers = found.groups()
        return Tile(kind, *map(int, numbers))  # type: ignore[arg-type]

    @property
    def row_blocks(self) -> tuple[int, int]:
        """Rows of the first and of the second accumulator, 0 if there is one alone."""
        first = 1 << self.m.bit_length() >> 1
        return first, self.m - first

    def __post_init__(self) -> None:
        first, second = self.row_blocks
        sides = (first, self.n, self.k, *([second] if second else []))
        are_powers_of_2 = all(map(_is_side, sides))
        is_launched = (
            self.warps in (1, 2, 4, 8, 16) and min(self.stages, self.split_k) > 0
        )
        if not are_powers_of_2 or not is_launched:
            raise KernelError(
                f"tile {self} cannot be run: n and k must be powers of two from 16 to 256, m "
                "one or the sum of two of them, warps 1, 2, 4, 8 or 16, stages and split-k at "
                "least 1"
            )


def _is_side(pixels: int) -> bool:
    return MIN_SIDE <= pixels <= MAX_SIDE and pixels & (pixels - 1) == 0
