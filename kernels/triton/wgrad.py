"""Weight gradient: dw[k, c, r, s] = sum over n, p, q of g[n, k, p, q] x[n, c, p st + r
dil - pad, q st + s dil - pad].

A product of filters by channels for each tap, reduced over all pixels and therefore
split over many programs, whose float32 partial results are added in order. Local to a
slice of the filters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import triton
import triton.language as tl

from hetconv.kernels.launch import HUGE, Memory, Program, Recipe
from hetconv.kernels.tiles import Extents, Tile, pixel_line
from hetconv.sharding.conv_spec import Conv2dSpec

from .fprop import Correlation, forward, image_box, x_box, x_unit
from .split_k import sum_recipe

Grid = tuple[int, int, int]
TENSORS = {"x": "x", "g": "g"}


@triton.jit
def wgrad_by_pointers(
    x,
    g,
    dw,
    SIZE_0,
    SIZE_1,
    SIZE_2,
    H,
    W,
    K,
    xn,
    xh,
    xw,
    gn,
    gp,
    gq,
    dz,
    C: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    HS: tl.constexpr,
    H0: tl.constexpr,
    HD: tl.constexpr,
    WS: tl.constexpr,
    W0: tl.constexpr,
    WD: tl.constexpr,
    XU: tl.constexpr,
    GU: tl.constexpr,
    KU: tl.constexpr,
    NUMBERS: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """dw[z, k, tap, c] over the z-th part of the pixels; see `correlate.by_pointers`
    for units and NUMBERS.

    A step takes BLOCK_K pixels along the last dimension of the sizes (samples, rows,
    columns in some order, of which ROWS and COLS say the places), so that only one
    coordinate differs among them.
    """
    K = K * KU
    TILES_C: tl.constexpr = (C + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)  # taps fastest: they read the same pixels of g
    z = tl.program_id(1)
    group = tl.program_id(2)
    tap = pid % (R * S)
    c = (pid // (R * S)) % TILES_C * BLOCK_N + tl.arange(0, BLOCK_N)
    k = pid // (R * S) // TILES_C * BLOCK_M + tl.arange(0, BLOCK_M)
    h0 = H0 + tap // S * HD
    w0 = W0 + tap % S * WD
    line = tl.arange(0, BLOCK_K)
    runs = tl.cdiv(SIZE_2, BLOCK_K)
    steps = SIZE_0 * SIZE_1 * runs
    each = tl.cdiv(steps, SPLITS)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for it in range(z * each, min(z * each + each, steps)):
        wide = tl.cast(it, tl.int64 if WIDE else tl.int32)
        at_2 = wide % runs * BLOCK_K + line
        at_1 = wide // runs % SIZE_1
        at_0 = wide // runs // SIZE_1
        p = at_0 if ROWS == 0 else (at_1 if ROWS == 1 else at_2)
        q = at_1 if COLS == 1 else at_2
        n = at_2 if ROWS == 0 else at_0
        h = p * HS + h0
        v = q * WS + w0
        inside = at_2 < SIZE_2
        g_at = (n * gn + p * gp + q * gq)[:, None] * GU + group * K + k[None, :]
        g_tile = tl.load(g + g_at, mask=inside[:, None] & (k < K)[None, :], other=0.0)
        inside = inside & (h >= 0) & (h < H)
        if NUMBERS:
            at = (v + line * 0)[:, None] + c[None, :]
            x_at = (n * xn + h * xh + line * 0)[:, None] * XU + at
            x_ok = inside[:, None] & (at >= 0) & (at < W) & (c < C)[None, :]
        else:
            x_at = (n * xn + h * xh + v * xw)[:, None] * XU + group * C + c[None, :]
            x_ok = (inside & (v >= 0) & (v < W))[:, None] & (c < C)[None, :]
        x_tile = tl.load(x + x_at, mask=x_ok, other=0.0)
        acc = tl.dot(g_tile.T, x_tile, acc, input_precision=PRECISION)
    at = ((group * K + k[:, None]) * (R * S) + tap) * C + c[None, :]
    tl.store(
        dw + tl.cast(z, tl.int64) * dz + at,
        acc.to(dw.dtype.element_ty),
        mask=(k < K)[:, None] & (c < C)[None, :],
    )


@triton.jit
def wgrad_by_boxes(
    x,
    g,
    dw,
    SIZE_0,
    SIZE_1,
    SIZE_2,
    K,
    dz,
    C: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    STRIDE: tl.constexpr,
    H0: tl.constexpr,
    HD: tl.constexpr,
    W0: tl.constexpr,
    WD: tl.constexpr,
    XC: tl.constexpr,
    KU: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BOX_0: tl.constexpr,
    BOX_1: tl.constexpr,
    BOX_2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """The same on Hopper: boxes of g and x, shifted by the tap, come by the copy engine.

    Their samples, rows and columns are in any order; ROWS and COLS say at which place.
    Pixels of a box beyond g are zero and still multiplied: an infinite or NaN x there
    reaches taps that do not read it.
    """
    K = K * KU
    BLOCK_K: tl.constexpr = BOX_0 * BOX_1 * BOX_2
    TILES_C: tl.constexpr = (C + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    z = tl.program_id(1)
    group = tl.program_id(2)
    tap = pid % (R * S)
    c0 = (pid // (R * S)) % TILES_C * BLOCK_N
    k0 = pid // (R * S) // TILES_C * BLOCK_M
    h = H0 + tap // S * HD
    v = W0 + tap % S * WD
    if STRIDE == 1:
        row = h
        col = v
    else:  # an arithmetic shift halves negative numbers downwards
        row = h >> 1
        col = v >> 1
    shift_0 = row if ROWS == 0 else 0
    shift_1 = row if ROWS == 1 else (col if COLS == 1 else 0)
    shift_2 = row if ROWS == 2 else (col if COLS == 2 else 0)
    tiles_1 = tl.cdiv(SIZE_1, BOX_1)
    tiles_2 = tl.cdiv(SIZE_2, BOX_2)
    steps = tl.cdiv(SIZE_0, BOX_0) * tiles_1 * tiles_2
    each = tl.cdiv(steps, SPLITS)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for it in range(z * each, min(z * each + each, steps)):
        at_2 = it % tiles_2 * BOX_2
        at_1 = it // tiles_2 % tiles_1 * BOX_1
        at_0 = it // tiles_2 // tiles_1 * BOX_0
        g_tile = g.load([at_0, at_1, at_2, group * K + k0]).reshape(BLOCK_K, BLOCK_M)
        if STRIDE == 1:
            x_tile = x.load(
                [at_0 + shift_0, at_1 + shift_1, at_2 + shift_2, group * C + c0]
            )
        else:
            channel = (v & 1) * XC + group * C + c0
            x_tile = x.load(
                [h & 1, at_0 + shift_0, at_1 + shift_1, at_2 + shift_2, channel]
            )
        acc = tl.dot(
            g_tile.T, x_tile.reshape(BLOCK_K, BLOCK_N), acc, input_precision=PRECISION
        )
    k = k0 + tl.arange(0, BLOCK_M)
    c = c0 + tl.arange(0, BLOCK_N)
    at = ((group * K + k[:, None]) * (R * S) + tap) * C + c[None, :]
    tl.store(
        dw + tl.cast(z, tl.int64) * dz + at,
        acc.to(dw.dtype.element_ty),
        mask=(k < K)[:, None] & (c < C)[None, :],
    )


@dataclass(frozen=True)
class WeightGradient:
    """The forward pass whose filters' gradient is meant, with g in the place of its output."""

    forward: Correlation

    @property
    def extents(self) -> Extents:
        f = self.forward
        N, _, P, Q = f.y.shape
        repeats = f.rows.count * f.cols.count * f.groups
        work = Extents(
            f.M,
            f.C,
            1,
            1,
            repeats,
            f.x.dtype,
            (N, P, Q),
            self.takes_boxes,
            over_pixels=True,
        )
        return replace(work, numbers=f.numbers, ieee=f.ieee)

    @property
    def takes_boxes(self) -> bool:
        """As for a correlation; g lies as an image, not as filters, and tf32 products
        cannot be reduced over rows.
        """
        f = self.forward
        return f.takes_boxes(f.y) and f.x.dtype != "float32"


def weight_gradient(
    spec: Conv2dSpec, x: Memory, w: Memory, g: Memory, precision: str
) -> WeightGradient:
    return WeightGradient(forward(spec, x, w, g, precision))


def program(d: WeightGradient, tile: Tile) -> Program:
    """The launches that compute dw (K, R, S, C), contiguous in memory, from tensors x and g."""
    f = d.forward
    K, taps = f.M * f.groups, f.rows.count * f.cols.count
    size, ku = K * taps * f.C, gcd(f.M, 16)
    scalars = {"K": f.M // ku, "dz": size}
    constants: dict[str, Any] = {
        "C": f.C,
        "R": f.rows.count,
        "S": f.cols.count,
        "H0": f.rows.offset,
        "HD": f.rows.reach,
        "W0": f.cols.offset,
        "WD": f.cols.reach,
        "KU": ku,
        "PRECISION": f.precision,
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "SPLITS": tile.splits,
    }
    build = _by_boxes if tile.path == "boxes" else _by_pointers
    grid = (-(-f.M // tile.m) * -(-f.C // tile.n) * taps, tile.splits, f.groups)
    main = build(f, tile, grid, scalars, constants)
    if tile.splits == 1:
        return Program((main,))
    row = Memory((1, size, 1, 1), (size, 1, size, size), f.x.dtype)
    return Program((main, sum_recipe(row, tile.splits, name="dw")), tile.splits * size)


def _by_boxes(
    f: Correlation,
    tile: Tile,
    grid: Grid,
    scalars: dict[str, int],
    constants: dict[str, Any],
) -> Recipe:
    (N, K, P, Q), (gn, _, gp, gq) = f.y.shape, f.y.strides
    box = pixel_line((N, P, Q), tile.k)
    constants |= {"STRIDE": f.rows.stride, "XC": f.x.shape[1]}
    constants["BOX_0"], constants["BOX_1"], constants["BOX_2"] = box.sizes
    constants |= {"ROWS": box.order.index(1), "COLS": box.order.index(2)}
    scalars["SIZE_0"], scalars["SIZE_1"], scalars["SIZE_2"] = (
        (N, P, Q)[i] for i in box.order
    )
    descriptors = {
        "x": x_box(f, box, tile.n),
        "g": image_box((N, P, Q), (gn, gp, gq), K, box, tile.m),
    }
    return Recipe(
        wgrad_by_boxes,
        grid,
        TENSORS | {"dw": "partial" if tile.splits > 1 else "dw"},
        scalars,
        constants,
        tile.warps,
        tile.stages,
        descriptors,
    )


def _by_pointers(
    f: Correlation,
    tile: Tile,
    grid: Grid,
    scalars: dict[str, int],
    constants: dict[str, Any],
) -> Recipe:
    (N, _, P, Q), (gn, _, gp, gq), (xn, _, xh, xw) = f.y.shape, f.y.strides, f.x.strides
    xu, gu, line = x_unit(f), f.y.unit, pixel_line((N, P, Q), tile.k)
    scalars["SIZE_0"], scalars["SIZE_1"], scalars["SIZE_2"] = (
        (N, P, Q)[i] for i in line.order
    )
    scalars |= {"H": f.x.shape[2], "W": f.x.shape[3]}
    constants |= {"ROWS": line.order.index(1), "COLS": line.order.index(2)}
    scalars |= {
        "xn": xn // xu,
        "xh": xh // xu,
        "xw": xw // xu,
        "gn": gn // gu,
        "gp": gp // gu,
        "gq": gq // gu,
    }
    constants |= {
        "HS": f.rows.stride,
        "WS": f.cols.stride,
        "XU": xu,
        "GU": gu,
        "NUMBERS": f.numbers,
        "BLOCK_K": tile.k,
    }
    constants |= {"WIDE": max(f.x.spans, f.y.spans) >= HUGE}
    return Recipe(
        wgrad_by_pointers,
        grid,
        TENSORS | {"dw": "partial" if tile.splits > 1 else "dw"},
        scalars,
        constants,
        tile.warps,
        tile.stages,
    )
