"""Launches that concatenate channels, and split them, for `bench compile`, as data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, get_args

from hetconv.kernels.epilogue import EpilogueSpec
from hetconv.kernels.launch import Launch, StridedLayout
from hetconv.kernels.triton.concat import concat_launch, split_launch

ConcatPass = Literal["concatenation", "split"]
PASSES: tuple[ConcatPass, ...] = get_args(ConcatPass)
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
EPILOGUES = {
    "plain": EpilogueSpec(),
    "scaled, relu": EpilogueSpec(has_scale=True, has_shift=True, activation="relu"),
    "scaled, residual, gelu": EpilogueSpec(True, True, activation="gelu"),
}
"""Epilogues by name, without the layout of a residual."""


@dataclass(frozen=True)
class Case:
    """Parts of one image.

    Attributes:
        sizes: Channels of each part.
        samples: Samples of the image.
        row_margin: Rows of the result's memory, in each sample, beside its own; with
            some its pixels have several strides.
    """

    sizes: tuple[int, ...]
    samples: int = 32
    row_margin: int = 0


SIDE = 56
CASES = {
    "wide parts": Case((96, 160)),
    "narrow parts": Case((8, 16, 24, 32, 32, 40, 48, 56)),
    "16 wide parts": Case((128,) * 16),
    "16 narrow parts": Case((24,) * 16),
    "odd parts": Case((131, 0, 77)),
    "rows of a taller image": Case((96, 160), row_margin=4),
    "2**31 numbers": Case((96, 160), samples=2688),
}


@dataclass(frozen=True, order=True)
class ConcatItem:
    """One launch to compile."""

    arch: int
    what: ConcatPass
    dtype: str
    case: str
    epilogue: str

    def __str__(self) -> str:
        return f"sm_{self.arch} {self.what} {self.dtype} {self.case}, {self.epilogue}"


def concat_items(archs: Sequence[int], quick: bool = False) -> Iterator[ConcatItem]:
    """Yields what is compiled: both passes of every case with every epilogue."""
    dtypes = ("bf16",) if quick else DTYPES
    for found in product(archs, PASSES, dtypes, CASES, EPILOGUES):
        yield ConcatItem(*found)


def concat_item_launch(item: ConcatItem) -> Launch:
    """Returns the launch of an item."""
    case, dtype = CASES[item.case], DTYPES[item.dtype]
    parts = [
        StridedLayout.packed((case.samples, k, SIDE, SIDE), dtype) for k in case.sizes
    ]
    shape = (case.samples, sum(case.sizes), SIDE, SIDE)
    taller = (*shape[:2], SIDE + case.row_margin, SIDE)
    strides = StridedLayout.packed(taller, dtype).strides
    y = StridedLayout.packed(shape, dtype)._replace(strides=strides)
    epilogue = EPILOGUES[item.epilogue]
    if "residual" in item.epilogue:
        epilogue = epilogue._replace(residual=y)
    make = concat_launch if item.what == "concatenation" else split_launch
    return make(parts, y, epilogue)
