"""Boxes of images moved in one launch: each from where it lies to where it belongs, or
added to what is there.

target[n, c, h, w] = source[n, c, h, w], or target + source, for several pairs of boxes
of any shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import gcd, prod
from typing import NamedTuple

import triton
import triton.language as tl

from hetconv.kernels.launch import HUGE, Memory, Recipe
from hetconv.sharding.conv_spec import ITEMSIZE

BLOCK, WARPS = (
    512,
    4,
)  # units of a program, of at most 16 bytes: 64 bytes of each side per thread


@triton.jit
def _move_block(
    source,
    target,
    block,
    number,
    C,
    W,
    H,
    sw,
    sh,
    sn,
    tw,
    th,
    tn,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    """BLOCK units of a pair of boxes whose ``number`` units form runs of C, W runs in a
    row, H rows in a sample.
    """
    e = (block * BLOCK + tl.arange(0, BLOCK))[:, None]
    u = tl.arange(0, UNIT)[None, :]
    inside = e < number
    c, run = e % C, e // C
    w, row = run % W, run // W
    h, n = row % H, row // H
    # Only arithmetic turns a NaN into another or flushes what is denormal: a number
    # that is moved keeps its bits.
    x = tl.load(source + (c + w * sw + h * sh + n * sn) * UNIT + u, mask=inside)
    at = target + (c + w * tw + h * th + n * tn) * UNIT + u
    if ADD:
        x = (tl.load(at, mask=inside).to(tl.float32) + x.to(tl.float32)).to(
            target.dtype.element_ty
        )
    tl.store(at, x, mask=inside)


@triton.jit
def move(
    sources,
    targets,
    firsts,
    numbers,
    C,
    W,
    H,
    sw,
    sh,
    sn,
    tw,
    th,
    tn,
    UNITS: tl.constexpr,
    ADD: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Programs from ``firsts[i]`` on move pair i, whose sizes and strides count in
    units of UNITS[i] numbers.
    """
    program = tl.program_id(0)
    for i in tl.static_range(len(UNITS)):
        if (program >= firsts[i]) & (program < firsts[i + 1]):
            block = program - firsts[i]
            _move_block(
                sources[i],
                targets[i],
                block.to(tl.int64) if WIDE else block,
                numbers[i],
                C[i],
                W[i],
                H[i],
                sw[i],
                sh[i],
                sn[i],
                tw[i],
                th[i],
                tn[i],
                UNITS[i],
                BLOCK,
                ADD,
            )


class Dim(NamedTuple):
    """How often something is repeated, and at which strides, in elements."""

    size: int
    source: int
    target: int


class Pair(NamedTuple):
    """What `move` is told of a pair of boxes, in units: how many there are, sizes,
    strides of source and target.
    """

    numbers: int
    C: int
    W: int
    H: int
    sw: int
    sh: int
    sn: int
    tw: int
    th: int
    tn: int


def move_recipe(
    sources: tuple[Memory, ...], targets: tuple[Memory, ...], add: bool
) -> Recipe:
    """Tensors ``source0``, ``source1``, ... to ``target0``, ``target1``, ..., each of
    its pair's shape, none empty.
    """
    boxes = [(dims(s, t), t.dtype) for s, t in zip(sources, targets, strict=True)]
    units = tuple(unit(of, dtype) for of, dtype in boxes)
    pairs = [_pair(of, u) for (of, _), u in zip(boxes, units, strict=True)]
    firsts = tuple(accumulate((-(-p.numbers // BLOCK) for p in pairs), initial=0))
    return Recipe(
        move,
        (firsts[-1], 1, 1),
        {
            "sources": tuple(f"source{i}" for i in range(len(pairs))),
            "targets": tuple(f"target{i}" for i in range(len(pairs))),
        },
        {
            "firsts": firsts,
            **dict(zip(Pair._fields, zip(*pairs, strict=True), strict=True)),
        },
        {
            "UNITS": units,
            "ADD": add,
            "WIDE": max(m.spans for m in (*sources, *targets)) >= HUGE,
            "BLOCK": BLOCK,
        },
        WARPS,
        1,
    )


def dims(source: Memory, target: Memory) -> tuple[Dim, Dim, Dim, Dim]:
    """Channels, columns, rows, samples; where some follow on each other on both sides,
    they count as the ones within.

    So a slab of whole rows is one run per sample, and whole images are one run.
    """
    found = [Dim(source.shape[1], 1, 1)]
    for i in (3, 2, 0):
        d, within = (
            Dim(source.shape[i], source.strides[i], target.strides[i]),
            found[-1],
        )
        if (d.source, d.target) == (
            within.size * within.source,
            within.size * within.target,
        ):
            found[-1] = within._replace(size=within.size * d.size)
        elif d.size > 1:
            found.append(d)
    run, row, rows, samples = (*found, *[Dim(1, 0, 0)] * (4 - len(found)))
    return run, row, rows, samples


def unit(of: Sequence[Dim], dtype: str) -> int:
    """Numbers that lie side by side on both sides wherever one lies, at most 16 bytes."""
    run, *others = of
    return gcd(
        16 // ITEMSIZE[dtype],
        run.size,
        *(s for d in others for s in (d.source, d.target)),
    )


def _pair(of: tuple[Dim, Dim, Dim, Dim], u: int) -> Pair:
    run, w, h, n = of
    numbers = prod(d.size for d in of) // u
    sides = ((d.source // u for d in (w, h, n)), (d.target // u for d in (w, h, n)))
    return Pair(numbers, run.size // u, w.size, h.size, *sides[0], *sides[1])
