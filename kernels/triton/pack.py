"""Copy of several boxes of images in one launch, each to its place or added to it.

target[n, c, h, w] = source[n, c, h, w], or target + source, for pairs of boxes of any
shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import gcd, prod
from typing import NamedTuple

import triton
import triton.language as tl

from hetconv.kernels.launch import (
    MIN_ELEMENTS_FOR_INT64,
    VECTOR_BYTES,
    Launch,
    StridedLayout,
)
from hetconv.sharding.conv_spec import ITEMSIZE

# Of `concat` and `split` too. On an H100, flat concatenations with an epilogue reached 83
# to 86 % of a copy's bandwidth with 256 or 512 units and 4 warps.
BLOCK_UNITS = 512  # of at most 16 bytes, per program: 64 bytes of each side per thread
WARPS = 4
MIN_BLOCKS_OF_LONG_RUN = 4  # then at most one in five programs of a run is not full


@triton.jit
def _move_block(
    source, target, block, number,
    C, W, H,
    stride_sw, stride_sh, stride_sn,
    stride_tw, stride_th, stride_tn,
    UNIT: tl.constexpr, LONG: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Moves BLOCK units of a pair of boxes; parameters are those of `move`, of one pair."""
    u = tl.arange(0, UNIT)[None, :]
    if LONG:  # all of one run
        blocks = tl.cdiv(C, BLOCK)
        run = block // blocks
        c = ((block % blocks) * BLOCK + tl.arange(0, BLOCK))[:, None]
        inside = c < C
    else:
        e = (block * BLOCK + tl.arange(0, BLOCK))[:, None]
        c, run = e % C, e // C
        inside = e < number
    w, row = run % W, run // W
    h, n = row % H, row // H
    # Only arithmetic turns a NaN into another or flushes what is denormal: a number
    # that is moved keeps its bits.
    s_at = (c + w * stride_sw + h * stride_sh + n * stride_sn) * UNIT + u
    x = tl.load(source + s_at, mask=inside)
    at = target + (c + w * stride_tw + h * stride_th + n * stride_tn) * UNIT + u
    if ADD:
        total = tl.load(at, mask=inside).to(tl.float32) + x.to(tl.float32)
        x = total.to(target.dtype.element_ty)
    tl.store(at, x, mask=inside)


@triton.jit
def move(
    sources, targets, firsts, number,
    C, W, H,
    stride_sw, stride_sh, stride_sn,
    stride_tw, stride_th, stride_tn,
    UNITS: tl.constexpr, LONG: tl.constexpr,
    ADD: tl.constexpr, INT64: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Moves BLOCK units of one of several pairs of boxes.

    Every run-time parameter has an entry for each pair.

    Args:
        sources: Pointers to the boxes that are read.
        targets: Pointers to the boxes that are written.
        firsts: First program of each pair, then the number of programs.
        number: Units of a box.
        C: Units of a run, which lie side by side in both boxes.
        W: Runs in a row.
        H: Rows in a sample.
        stride_sw: Stride of source (s) from run to run, in units; stride_sh from row to
            row, stride_sn from sample to sample, and likewise of target (t).
        UNITS: Elements of a unit, for each pair.
        LONG: Whether a program takes units of one run only, for each pair.
        ADD: Whether numbers are added, in float32.
        INT64: Whether addresses take 64 bits.
        BLOCK: Units of a program.
    """
    program = tl.program_id(0)
    for i in tl.static_range(len(UNITS)):
        if (program >= firsts[i]) & (program < firsts[i + 1]):
            block = program - firsts[i]
            _move_block(
                sources[i], targets[i],
                block.to(tl.int64) if INT64 else block, number[i],
                C[i], W[i], H[i],
                stride_sw[i], stride_sh[i], stride_sn[i],
                stride_tw[i], stride_th[i], stride_tn[i],
                UNITS[i], LONG[i], BLOCK, ADD,
            )  # fmt: skip


class Dim(NamedTuple):
    """Dimension of a pair of boxes: its size and both strides, in elements."""

    size: int
    source: int
    target: int


def move_launch(
    pairs: Sequence[tuple[StridedLayout, StridedLayout]], add: bool
) -> Launch:
    """Returns the launch that moves ``source0`` to ``target0``, ``source1`` to ``target1``, ...

    Args:
        pairs: Layouts of source and target, of one shape that is not empty.
        add: Whether sources are added to targets.
    """
    boxes = [merged_dims(source, target) for source, target in pairs]
    units = tuple(
        vector_unit(dims, target.dtype)
        for dims, (_, target) in zip(boxes, pairs, strict=True)
    )
    pairs_in_units = list(zip(boxes, units, strict=True))
    arguments = [_arguments(*of_pair) for of_pair in pairs_in_units]
    blocks = (_programs(*of_pair) for of_pair in pairs_in_units)
    firsts = tuple(accumulate(blocks, initial=0))
    names = ("sources", "targets")
    spans = (layout.span for pair in pairs for layout in pair)
    return Launch(
        move,
        (firsts[-1], 1, 1),
        {s: tuple(f"{s[:-1]}{i}" for i in range(len(pairs))) for s in names},
        {"firsts": firsts}
        | {name: tuple(a[name] for a in arguments) for name in arguments[0]},
        {
            "UNITS": units,
            "LONG": tuple(has_long_runs(*of_pair) for of_pair in pairs_in_units),
            "ADD": add,
            "INT64": max(spans) >= MIN_ELEMENTS_FOR_INT64,
            "BLOCK": BLOCK_UNITS,
        },
        WARPS,
    )


def merged_dims(
    source: StridedLayout, target: StridedLayout
) -> tuple[Dim, Dim, Dim, Dim]:
    """Returns runs of channels, columns, rows and samples of a pair of boxes.

    Dimensions that follow on each other on both sides count as one, the inner one, so
    that a box of whole rows is one run per sample, and whole images are one run.
    """
    found = [Dim(source.shape[1], 1, 1)]
    for i in (3, 2, 0):
        dim = Dim(source.shape[i], source.strides[i], target.strides[i])
        size, *strides = found[-1]
        if [dim.source, dim.target] == [size * stride for stride in strides]:
            found[-1] = found[-1]._replace(size=size * dim.size)
        elif dim.size > 1:
            found.append(dim)
    run, row, rows, samples = (*found, *[Dim(1, 0, 0)] * (4 - len(found)))
    return run, row, rows, samples


def vector_unit(dims: Sequence[Dim], dtype: str) -> int:
    """Returns how many numbers, at most 16 bytes, lie side by side wherever one lies.

    Args:
        dims: Dimensions of a pair of boxes, as `merged_dims` returns them.
        dtype: PyTorch's name of the data type.
    """
    run, *outer = dims
    strides = (stride for dim in outer for stride in (dim.source, dim.target))
    return gcd(VECTOR_BYTES // ITEMSIZE[dtype], run.size, *strides)


def has_long_runs(dims: Sequence[Dim], unit: int) -> bool:
    """Returns whether programs take units of one run only, without a division for each.

    Args:
        dims: Dimensions of a pair of boxes, as `merged_dims` returns them.
        unit: Elements of a unit.
    """
    run, *outer = dims
    is_single = all(dim.size == 1 for dim in outer)
    return is_single or run.size >= MIN_BLOCKS_OF_LONG_RUN * BLOCK_UNITS * unit


def _programs(dims: Sequence[Dim], unit: int) -> int:
    """Programs of a pair of boxes."""
    run, *outer = dims
    runs, units_of_run = prod(dim.size for dim in outer), run.size // unit
    if has_long_runs(dims, unit):
        return runs * -(-units_of_run // BLOCK_UNITS)
    return -(-runs * units_of_run // BLOCK_UNITS)


def _arguments(dims: Sequence[Dim], unit: int) -> dict[str, int]:
    """The run-time parameters of `move` for one pair."""
    run, *outer = dims
    found = {"number": prod(dim.size for dim in dims) // unit, "C": run.size // unit}
    for letter, dim in zip("wh", outer, strict=False):
        found[letter.upper()] = dim.size
    for letter, dim in zip("whn", outer, strict=True):
        found[f"stride_s{letter}"] = dim.source // unit
        found[f"stride_t{letter}"] = dim.target // unit
    return found
