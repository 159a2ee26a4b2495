"""Forward: y[n, k, p, q] = bias[k] + sum over r, s, c of w[k, c, r, s] x[n, c, p st + r
dil - pad, q st + s dil - pad].

Also the recipe of any `Correlation`, of which forward is one and each phase of the
input gradient another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import gcd
from typing import Any

from hetconv.kernels.epilogue import PLAIN, Finish
from hetconv.kernels.launch import HUGE, Descriptor, Memory, Program, Recipe
from hetconv.kernels.tiles import Box, Extents, Image, Tile, pixel_box
from hetconv.sharding.conv_spec import ITEMSIZE, Conv2dSpec, Window

from .implicit_gemm import by_boxes, by_pointers
from .split_k import sum_recipe

Slot = tuple[slice, ...]


@dataclass(frozen=True)
class Taps:
    """The taps of one dimension: which rows of the filter they are, and which input
    rows they read.
    """

    count: int
    first: int = 0  # filter row of the first tap
    step: int = 1  # filter rows from tap to tap
    stride: int = 1  # input rows from output to output
    offset: int = 0  # input row that output 0 reads through the first tap
    reach: int = 1  # input rows from tap to tap


@dataclass(frozen=True)
class Correlation:
    """What the kernels of `correlate` compute: ``M`` channels from ``C`` in each group,
    of x, w and y as they lie.

    x, y and a residual hold all groups. ``transposed``: the first dimension of w is the
    one that is summed over. ``numbers``: the image's columns count numbers, see
    `packed`.
    """

    M: int
    C: int
    groups: int
    rows: Taps
    cols: Taps
    x: Memory
    w: Memory
    y: Memory
    precision: str
    transposed: bool = False
    numbers: bool = False
    residual: Memory | None = None

    @property
    def extents(self) -> Extents:
        N, _, P, Q = self.y.shape
        taps, whole = (
            self.rows.count * self.cols.count,
            self.groups > 1 or self.rows.stride == 2,
        )
        boxes = self.takes_boxes(self.w)
        work = Extents(
            self.M,
            N * P * Q,
            self.C,
            taps,
            self.groups,
            self.x.dtype,
            (N, P, Q),
            boxes,
            whole,
        )
        return replace(work, numbers=self.numbers, ieee=self.ieee)

    @property
    def ieee(self) -> bool:
        return self.x.dtype == "float32" and self.precision == "ieee"

    def takes_boxes(self, other: Memory) -> bool:
        """Whether the copy engine can fetch x and the other operand.

        They must be aligned, x at stride 1, or at stride 2 of an even and packed image.
        """
        strides, (_, C, H, W) = (self.rows.stride, self.cols.stride), self.x.shape
        if not (self.x.tma and other.tma) or self.ieee or self.numbers:
            return False
        if strides == (2, 2):
            return (
                H % 2 == 0
                and W % 2 == 0
                and self.x.strides[3] == C
                and self.C % 16 == 0
            )
        return strides == (1, 1) and (self.groups == 1 or self.C % 16 == 0)


def forward(
    spec: Conv2dSpec,
    x: Memory,
    w: Memory,
    y: Memory,
    precision: str,
    residual: Memory | None = None,
) -> Correlation:
    rows, cols = (
        Taps(k, stride=s, offset=-pad[0], reach=d)
        for k, s, pad, d in zip(
            (spec.R, spec.S), spec.stride, spec.padding, spec.dilation, strict=True
        )
    )
    g = spec.groups
    plain = Correlation(
        spec.K // g, spec.C // g, g, rows, cols, x, w, y, precision, residual=residual
    )
    return packed(simplified(plain))


def simplified(c: Correlation) -> Correlation:
    """The same sums over a simpler image: one tap reads a strided view, and pixels at
    one stride are one row.
    """
    (N, C, H, W), (_, _, P, Q) = c.x.shape, c.y.shape
    (n, ch, h, w), rows, cols = c.x.strides, c.rows, c.cols
    inside = (P - 1) * rows.stride < H and (Q - 1) * cols.stride < W
    if (rows.count, cols.count, rows.offset, cols.offset) != (1, 1, 0, 0) or not inside:
        return c
    x = Memory(
        (N, C, P, Q), (n, ch, h * rows.stride, w * cols.stride), c.x.dtype, c.x.align
    )
    y, residual = c.y, c.residual
    if x.is_one_row and y.is_one_row and (residual is None or residual.is_one_row):
        x, y, residual = (
            x.as_one_row(),
            y.as_one_row(),
            residual.as_one_row() if residual is not None else None,
        )
    return replace(
        c,
        x=x,
        y=y,
        residual=residual,
        rows=replace(rows, stride=1),
        cols=replace(cols, stride=1),
    )


def packed(c: Correlation) -> Correlation:
    """Few channels (an image's 3): the numbers under a filter row, S * C, as the
    channels of one tap.

    They lie side by side in the image and in the filter, so that 7 taps of 21 numbers
    replace 49 of 3.
    """
    (N, C, H, W), (n, _, h, w), cols = c.x.shape, c.x.strides, c.cols
    side_by_side = w == C and c.w.strides[3] == C and cols.reach == 1
    if (
        not side_by_side
        or c.groups > 1
        or C % 8 == 0
        or cols.count == 1
        or C * cols.count > 64
    ):
        return c
    x = Memory((N, 1, H, W * C), (n, 1, h, 1), c.x.dtype, c.x.align)
    return replace(
        c,
        C=C * cols.count,
        cols=Taps(1, stride=cols.stride * C, offset=cols.offset * C),
        x=x,
        numbers=True,
    )


def program(
    c: Correlation, tile: Tile, finish: Finish = PLAIN, slot: Slot | None = None
) -> Program:
    """The launches that compute a correlation of tensors x and w, finished, into y, or
    into the ``slot`` of y.
    """
    build = _by_boxes if tile.path == "boxes" else _by_pointers
    if tile.splits == 1:
        return Program((build(c, tile, finish, "y", slot),))
    N, M, P, Q = c.y.shape
    partial = Memory(c.y.shape, (P * Q * M, 1, Q * M, M), "float32")
    main = build(replace(c, y=partial, residual=None), tile, PLAIN, "partial", None)
    return Program(
        (main, sum_recipe(c.y, tile.splits, finish, c.residual, slot)),
        tile.splits * N * P * Q * M,
    )


def _by_boxes(
    c: Correlation, tile: Tile, finish: Finish, y: str, slot: Slot | None
) -> Recipe:
    (K, C, R, S), (wk, _, wr, ws), (N, _, P, Q) = c.w.shape, c.w.strides, c.y.shape
    box = pixel_box((N, P, Q), tile.n)
    w = Descriptor(
        (R, S, K, C),
        (wr, ws, wk, 1),
        (1, 1, *((tile.k, tile.m) if c.transposed else (tile.m, tile.k))),
    )
    scalars, constants = _common(c, tile, finish)
    constants |= {"STRIDE": c.rows.stride, "XC": c.x.shape[1]}
    constants["BOX_N"], constants["BOX_P"], constants["BOX_Q"] = box.sizes
    return Recipe(
        by_boxes,
        (-(-c.M // tile.m) * box.copies, tile.splits, c.groups),
        {"x": "x", "w": "w", "y": y} | finish.tensors(c.residual, y),
        {"N": N} | scalars,
        constants,
        tile.warps,
        tile.stages,
        {"x": x_box(c, box, tile.k), "w": w},
        {"y": slot} if slot else {},
    )


def _by_pointers(
    c: Correlation, tile: Tile, finish: Finish, y: str, slot: Slot | None
) -> Recipe:
    (_, _, H, W), (xn, _, xh, xw), (wk, _, wr, ws) = c.x.shape, c.x.strides, c.w.strides
    N, _, P, Q = c.y.shape
    xu, wu = x_unit(c), c.w.unit
    scalars, constants = _common(c, tile, finish)
    scalars |= {
        "pixels": N * P * Q,
        "H": H,
        "W": W,
        "xn": xn // xu,
        "xh": xh // xu,
        "xw": xw // xu,
    }
    scalars |= {
        "wg": (c.C if c.transposed else c.M) * wk // wu,
        "wo": wk // wu,
        "wr": wr // wu,
        "ws": ws // wu,
    }
    constants |= {
        "HS": c.rows.stride,
        "WS": c.cols.stride,
        "XU": xu,
        "WU": wu,
        "BLOCK_N": tile.n,
    }
    constants |= {"NUMBERS": c.numbers}
    tiles = -(-c.M // tile.m) * -(-N * P * Q // tile.n)
    return Recipe(
        by_pointers,
        (tiles, tile.splits, c.groups),
        {"x": "x", "w": "w", "y": y} | finish.tensors(c.residual, y),
        scalars,
        constants,
        tile.warps,
        tile.stages,
        slots={"y": slot} if slot else {},
    )


def x_box(c: Correlation, box: Box, channels: int) -> Descriptor:
    """x as the copy engine sees it; at stride 2 rows and columns are pairs, of which a
    box takes one parity.
    """
    (N, C, H, W), (n, _, h, w) = c.x.shape, c.x.strides
    if c.rows.stride == 1:
        return image_box((N, H, W), (n, h, w), C, box, channels)
    pairs = image_box((N, H // 2, W // 2), (n, 2 * h, 2 * w), 2 * C, box, channels)
    return Descriptor((2, *pairs.shape), (h, *pairs.strides), (1, *pairs.block))


def image_box(
    sizes: Image, strides: Image, C: int, box: Box, channels: int
) -> Descriptor:
    """An image's samples, rows and columns, in the box's order, then channels."""
    a, b, c = box.order
    return Descriptor(
        (sizes[a], sizes[b], sizes[c], C),
        (strides[a], strides[b], strides[c], 1),
        (*box.sizes, channels),
    )


def x_unit(c: Correlation) -> int:
    """What the strides of x that a kernel multiplies with are a multiple of."""
    (n, _, h, _) = c.x.strides
    return gcd(16 // ITEMSIZE[c.x.dtype], n, h) if c.numbers else c.x.unit


def _common(
    c: Correlation, tile: Tile, finish: Finish
) -> tuple[dict[str, int], dict[str, Any]]:
    (N, M, P, Q), (yn, _, yp, yq), yu, mu = (
        c.y.shape,
        c.y.strides,
        c.y.unit,
        gcd(c.M, 16),
    )
    added = c.residual or c.y
    scalars = {
        "P": P,
        "Q": Q,
        "M": c.M // mu,
        "yz": N * P * Q * M,
        "yn": yn // yu,
        "yp": yp // yu,
        "yq": yq // yu,
    }
    (rn, _, rp, rq), ru = added.strides, added.unit
    scalars |= {"rn": rn // ru, "rp": rp // ru, "rq": rq // ru}
    constants = {
        "C": c.C,
        "R": c.rows.count,
        "R0": c.rows.first,
        "RD": c.rows.step,
        "S": c.cols.count,
        "S0": c.cols.first,
        "SD": c.cols.step,
        "H0": c.rows.offset,
        "HD": c.rows.reach,
        "W0": c.cols.offset,
        "WD": c.cols.reach,
        "YU": yu,
        "RU": ru,
        "MU": mu,
        "TRANSPOSED": c.transposed,
        "WIDE": max(c.x.spans, c.y.spans, added.spans) >= HUGE,
        "PRECISION": c.precision,
        "BLOCK_M": tile.m,
        "BLOCK_K": tile.k,
        "SPLITS": tile.splits,
    }
    return scalars, constants | finish.constants(c.residual)


@dataclass(frozen=True)
class Phase:
    """Every stride-th row and column of dx, as a correlation of g; None where no filter
    tap reads them.
    """

    slot: Slot
    correlation: Correlation | None


def phases(
    spec: Conv2dSpec, g: Memory, w: Memory, dx: Memory, precision: str
) -> list[Phase]:
    """The parts of dx, which cover it, from g (N, K, P, Q), w (K, C / groups, R, S) and
    dx (N, C, H, W) as they lie.
    """
    (N, C, H, W), (n, c, h, v) = dx.shape, dx.strides
    (sh, sw), groups, found = spec.stride, spec.groups, []
    for a, b in product(range(min(sh, H)), range(min(sw, W))):
        rows, cols = (
            taps(window, i) for window, i in zip(spec.windows, (a, b), strict=True)
        )
        slot = (slice(None), slice(None), slice(a, None, sh), slice(b, None, sw))
        align = gcd(dx.align, (a * h + b * v) * ITEMSIZE[dx.dtype])
        part = Memory(
            (N, C, -(-(H - a) // sh), -(-(W - b) // sw)),
            (n, c, h * sh, v * sw),
            dx.dtype,
            align,
        )
        whole = Correlation(
            spec.C // groups,
            spec.K // groups,
            groups,
            rows,
            cols,
            g,
            w,
            part,
            precision,
            True,
        )
        found.append(
            Phase(slot, simplified(whole) if rows.count and cols.count else None)
        )
    return found


def taps(window: Window, a: int) -> Taps:
    """The filter rows that reach the input rows a, a + stride, ..., and the output rows
    that they come from.
    """
    st, dl = window.stride, window.dilation
    hits = [r for r in range(window.kernel) if (a + window.pad_lo - r * dl) % st == 0]
    if not hits:
        return Taps(0)
    step = st // gcd(st, dl)
    return Taps(
        len(hits),
        hits[0],
        step,
        1,
        (a + window.pad_lo - hits[0] * dl) // st,
        -(step * dl // st),
    )
