"""Weight gradient: two Triton kernels and their launches.

dw[k, c, r, s] = sum over n, p, q of
    g[n, k, p, q] x[n, c, p stride + r dilation - pad, q stride + s dilation - pad]

is a matrix product of filters by channels for each tap, reduced over all pixels and
therefore split over many programs, whose float32 partial results `split_k` adds in a
fixed order. Over a slice of the filters it needs nothing of the others.

Parameters of both kernels beside those of `implicit_gemm`:

    dw                      pointer to the result, (K, R, S, C) of all groups, contiguous
    SIZE_0, SIZE_1, SIZE_2  samples, rows and columns of g, in some order
    ROWS, COLS              places of rows and columns in that order
    K                       filters of a group, in units of K_UNIT
    stride_dz               stride from one split's partial results to the next's
    BLOCK_M, BLOCK_N        filters by channels of a program's accumulator
    MORE_M                  filters of a second accumulator, or 0; both share the channels
    BLOCK_K                 pixels that are reduced in one step
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import triton
import triton.language as tl

from hetconv.kernels.launch import (
    MIN_ELEMENTS_FOR_INT64,
    Descriptor,
    Launch,
    LaunchSequence,
    StridedLayout,
)
from hetconv.kernels.tiles import GemmShape, PixelRuns, Tile
from hetconv.sharding.conv_spec import ConvSpec

from .fprop import forward
from .gemm_launch import MAX_M_UNIT, ImplicitGemm, image_descriptor, x_descriptor
from .split_k import sum_launch


@triton.jit
def _store(dw, acc, k, c, group, tap, K, C: tl.constexpr, TAPS: tl.constexpr):
    """Stores filters k by channels c of one tap."""
    at = ((group * K + k[:, None]) * TAPS + tap) * C + c[None, :]
    stored = (k < K)[:, None] & (c < C)[None, :]
    tl.store(dw + at, acc.to(dw.dtype.element_ty), mask=stored)


@triton.jit
def wgrad_pointers(
    x, g, dw,
    SIZE_0, SIZE_1, SIZE_2, H, W, K,
    stride_xn, stride_xh, stride_xw,
    stride_gn, stride_gp, stride_gq,
    stride_dz,
    C: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
    STRIDE_H: tl.constexpr, OFFSET_H: tl.constexpr, DILATION_H: tl.constexpr,
    STRIDE_W: tl.constexpr, OFFSET_W: tl.constexpr, DILATION_W: tl.constexpr,
    X_UNIT: tl.constexpr, G_UNIT: tl.constexpr, K_UNIT: tl.constexpr,
    PACKED: tl.constexpr, INT64: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, MORE_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    """Computes a tile of dw for one tap and one part of the pixels, by pointers and masks.

    A step takes BLOCK_K pixels along the last dimension of the sizes, so that only one
    coordinate differs among them. Parameters are explained in the module's docstring.
    """
    K = K * K_UNIT
    TILES_C: tl.constexpr = (C + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)  # taps fastest: they read the same pixels of g
    z = tl.program_id(1)
    group = tl.program_id(2)
    tap = pid % (R * S)
    c = (pid // (R * S)) % TILES_C * BLOCK_N + tl.arange(0, BLOCK_N)
    k0 = pid // (R * S) // TILES_C * (BLOCK_M + MORE_M)
    k = k0 + tl.arange(0, BLOCK_M)
    h0 = OFFSET_H + tap // S * DILATION_H
    w0 = OFFSET_W + tap % S * DILATION_W
    line = tl.arange(0, BLOCK_K)
    runs = tl.cdiv(SIZE_2, BLOCK_K)
    steps = SIZE_0 * SIZE_1 * runs
    each = tl.cdiv(steps, SPLIT_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if MORE_M:
        more_k = k0 + BLOCK_M + tl.arange(0, MORE_M)
        more = tl.zeros((MORE_M, BLOCK_N), dtype=tl.float32)
    for it in range(z * each, min(z * each + each, steps)):
        step = tl.cast(it, tl.int64 if INT64 else tl.int32)
        at_2 = step % runs * BLOCK_K + line
        at_1 = step // runs % SIZE_1
        at_0 = step // runs // SIZE_1
        p = at_0 if ROWS == 0 else (at_1 if ROWS == 1 else at_2)
        q = at_1 if COLS == 1 else at_2
        n = at_2 if ROWS == 0 else at_0
        h = p * STRIDE_H + h0
        v = q * STRIDE_W + w0
        inside = at_2 < SIZE_2
        g_pixel = (n * stride_gn + p * stride_gp + q * stride_gq)[:, None]
        g_at = g_pixel * G_UNIT + group * K
        g_ok = inside[:, None]
        g_tile = tl.load(
            g + (g_at + k[None, :]), mask=g_ok & (k < K)[None, :], other=0.0
        )
        inside = inside & (h >= 0) & (h < H)
        if PACKED:
            at = (v + line * 0)[:, None] + c[None, :]
            x_at = (n * stride_xn + h * stride_xh + line * 0)[:, None] * X_UNIT + at
            x_ok = inside[:, None] & (at >= 0) & (at < W) & (c < C)[None, :]
        else:
            x_pixel = (n * stride_xn + h * stride_xh + v * stride_xw)[:, None]
            x_at = x_pixel * X_UNIT + group * C + c[None, :]
            x_ok = (inside & (v >= 0) & (v < W))[:, None] & (c < C)[None, :]
        x_tile = tl.load(x + x_at, mask=x_ok, other=0.0)
        acc = tl.dot(g_tile.T, x_tile, acc, input_precision=PRECISION)
        if MORE_M:
            more_ok = g_ok & (more_k < K)[None, :]
            g_more = tl.load(g + (g_at + more_k[None, :]), mask=more_ok, other=0.0)
            more = tl.dot(g_more.T, x_tile, more, input_precision=PRECISION)
    dw += tl.cast(z, tl.int64) * stride_dz
    _store(dw, acc, k, c, group, tap, K, C, R * S)
    if MORE_M:
        _store(dw, more, more_k, c, group, tap, K, C, R * S)


@triton.jit
def wgrad_tma(
    x, g, g_more, dw,
    SIZE_0, SIZE_1, SIZE_2, K,
    stride_dz,
    C: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    STRIDE: tl.constexpr,
    OFFSET_H: tl.constexpr, DILATION_H: tl.constexpr,
    OFFSET_W: tl.constexpr, DILATION_W: tl.constexpr,
    X_CHANNELS: tl.constexpr, K_UNIT: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
    BOX_0: tl.constexpr, BOX_1: tl.constexpr, BOX_2: tl.constexpr,
    BOXES: tl.constexpr, JOINED: tl.constexpr,
    BLOCK_M: tl.constexpr, MORE_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT_K: tl.constexpr,
):  # fmt: skip
    """Computes a tile of dw for one tap and one part of the pixels, by TMA descriptors.

    Hopper's copy engine fetches boxes of g and of x, the latter shifted by the tap; their
    samples, rows and columns are in the order of the sizes, BOX_0, BOX_1 and BOX_2 of
    them. A step takes BOXES of them. Where they are JOINED, g describes (pixels, K), and
    a box is a run of its pixels. Pixels of a box beyond g are zero and still multiplied:
    an infinite or NaN x there reaches taps that do not read it.

    g_more describes g with boxes of MORE_M filters. STRIDE and X_CHANNELS are those of
    `implicit_gemm_tma`; other parameters are explained in the module's docstring.
    """
    K = K * K_UNIT
    BLOCK_K: tl.constexpr = BOX_0 * BOX_1 * BOX_2
    TILES_C: tl.constexpr = (C + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    z = tl.program_id(1)
    group = tl.program_id(2)
    tap = pid % (R * S)
    c0 = (pid // (R * S)) % TILES_C * BLOCK_N
    k0 = pid // (R * S) // TILES_C * (BLOCK_M + MORE_M)
    g_k0 = group * K + k0
    h = OFFSET_H + tap // S * DILATION_H
    v = OFFSET_W + tap % S * DILATION_W
    if STRIDE == 1:
        row = h
        col = v
        channel = group * C + c0
    else:  # an arithmetic shift halves negative numbers downwards
        row = h >> 1
        col = v >> 1
        channel = (v & 1) * X_CHANNELS + group * C + c0
    shift_0 = row if ROWS == 0 else 0
    shift_1 = row if ROWS == 1 else (col if COLS == 1 else 0)
    shift_2 = row if ROWS == 2 else (col if COLS == 2 else 0)
    tiles_1 = tl.cdiv(SIZE_1, BOX_1)
    tiles_2 = tl.cdiv(SIZE_2, BOX_2)
    steps = tl.cdiv(tl.cdiv(SIZE_0, BOX_0) * tiles_1 * tiles_2, BOXES)
    each = tl.cdiv(steps, SPLIT_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if MORE_M:
        more = tl.zeros((MORE_M, BLOCK_N), dtype=tl.float32)
    for it in range(z * each, min(z * each + each, steps)):
        for u in tl.static_range(BOXES):
            box = it * BOXES + u
            at_2 = box % tiles_2 * BOX_2
            at_1 = box // tiles_2 % tiles_1 * BOX_1
            at_0 = box // tiles_2 // tiles_1 * BOX_0
            if STRIDE == 1:
                x_tile = x.load(
                    [at_0 + shift_0, at_1 + shift_1, at_2 + shift_2, channel]
                )
            else:
                x_tile = x.load(
                    [h & 1, at_0 + shift_0, at_1 + shift_1, at_2 + shift_2, channel]
                )
            x_tile = x_tile.reshape(BLOCK_K, BLOCK_N)
            if JOINED:
                g_tile = g.load([box * BLOCK_K, g_k0])
            else:
                g_tile = g.load([at_0, at_1, at_2, g_k0]).reshape(BLOCK_K, BLOCK_M)
            acc = tl.dot(g_tile.T, x_tile, acc, input_precision=PRECISION)
            if MORE_M:
                if JOINED:
                    g_tile_more = g_more.load([box * BLOCK_K, g_k0 + BLOCK_M])
                else:
                    g_tile_more = g_more.load([at_0, at_1, at_2, g_k0 + BLOCK_M])
                    g_tile_more = g_tile_more.reshape(BLOCK_K, MORE_M)
                more = tl.dot(g_tile_more.T, x_tile, more, input_precision=PRECISION)
    c = c0 + tl.arange(0, BLOCK_N)
    k = k0 + tl.arange(0, BLOCK_M)
    dw += tl.cast(z, tl.int64) * stride_dz
    _store(dw, acc, k, c, group, tap, K, C, R * S)
    if MORE_M:
        more_k = k0 + BLOCK_M + tl.arange(0, MORE_M)
        _store(dw, more, more_k, c, group, tap, K, C, R * S)


@dataclass(frozen=True)
class WeightGradient:
    """Weight gradient of a convolution.

    Attributes:
        forward: The forward pass, with g in the place of its result.
    """

    forward: ImplicitGemm

    @property
    def shape(self) -> GemmShape:
        """The matrix product that tiles are chosen for."""
        f = self.forward
        return GemmShape(
            f.M,
            f.C,
            1,
            1,
            f.rows.count * f.cols.count * f.groups,
            f.x.dtype,
            f.image,
            # TMA reads g as an image, and tf32 products cannot be reduced over rows.
            supports_tma=f.supports_tma(f.y) and f.x.dtype != "float32",
            reduces_pixels=True,
            packed=f.packed,
            ieee=f.ieee,
            joins_rows=f.y.pixel_stride is not None,
        )


def weight_gradient(
    spec: ConvSpec,
    x: StridedLayout,
    w: StridedLayout,
    g: StridedLayout,
    precision: str,
) -> WeightGradient:
    """Returns the weight gradient of a convolution.

    Args:
        spec: The convolution.
        x: Layout of the input.
        w: Layout of the filters.
        g: Layout of the gradient of the result.
        precision: "tf32" or "ieee", how float32 is multiplied.
    """
    return WeightGradient(forward(spec, x, w, g, precision))


def launches(gradient: WeightGradient, tile: Tile) -> LaunchSequence:
    """Returns the launches that compute tensor dw from tensors x and g.

    Args:
        gradient: What is computed; dw is (K, R, S, C), contiguous in memory.
        tile: Tile of the kernel.
    """
    f = gradient.forward
    size = f.M * f.groups * f.rows.count * f.cols.count * f.C
    main = _launch(f, gradient.shape.runs_of(tile.k, tile.kind), tile, size)
    if tile.split_k == 1:
        return LaunchSequence((main,))
    row = StridedLayout.packed((1, size, 1, 1), f.x.dtype)
    total = sum_launch(row, tile.split_k, name="dw")
    return LaunchSequence((main, total), tile.split_k * size)


def _launch(f: ImplicitGemm, runs: PixelRuns, tile: Tile, size: int) -> Launch:
    k_unit, taps = gcd(f.M, MAX_M_UNIT), f.rows.count * f.cols.count
    block_m, more_m = tile.row_blocks
    scalars: dict[str, int] = {"K": f.M // k_unit, "stride_dz": size}
    scalars |= {f"SIZE_{i}": f.image[dim] for i, dim in enumerate(runs.order)}
    constants: dict[str, Any] = {
        "C": f.C,
        "R": f.rows.count,
        "S": f.cols.count,
        "ROWS": runs.order.index(1),
        "COLS": runs.order.index(2),
        "OFFSET_H": f.rows.offset,
        "DILATION_H": f.rows.dilation,
        "OFFSET_W": f.cols.offset,
        "DILATION_W": f.cols.dilation,
        "K_UNIT": k_unit,
        "PRECISION": f.precision,
        "BLOCK_M": block_m,
        "MORE_M": more_m,
        "BLOCK_N": tile.n,
        "SPLIT_K": tile.split_k,
    }
    tensors = {"x": "x", "g": "g", "dw": "partial" if tile.split_k > 1 else "dw"}
    descriptors: dict[str, Descriptor] = {}
    if tile.kind == "tma":
        kernel, own_constants, descriptors = _tma_arguments(f, tile, runs)
        tensors["g_more"] = "g"
    else:
        kernel, own_constants = wgrad_pointers, _pointer_constants(f, tile)
        scalars |= {"H": f.x.shape[2], "W": f.x.shape[3]}
        scalars |= f.x.stride_arguments("x", "nhw", f.x_unit)
        scalars |= f.y.stride_arguments("g", "npq", f.y.unit)
    return Launch(
        kernel,
        (-(-f.M // tile.m) * -(-f.C // tile.n) * taps, tile.split_k, f.groups),
        tensors,
        scalars,
        constants | own_constants,
        tile.warps,
        tile.stages,
        descriptors,
    )


def _pointer_constants(f: ImplicitGemm, tile: Tile) -> dict[str, Any]:
    return {
        "STRIDE_H": f.rows.stride,
        "STRIDE_W": f.cols.stride,
        "X_UNIT": f.x_unit,
        "G_UNIT": f.y.unit,
        "PACKED": f.packed,
        "BLOCK_K": tile.k,
        "INT64": max(f.x.span, f.y.span) >= MIN_ELEMENTS_FOR_INT64,
    }


def _tma_arguments(
    f: ImplicitGemm, tile: Tile, runs: PixelRuns
) -> tuple[Any, dict[str, Any], dict[str, Descriptor]]:
    constants = {
        "STRIDE": f.rows.stride,
        "X_CHANNELS": f.x.shape[1],
        "BOXES": runs.per_step,
        "JOINED": runs.joined,
    }
    constants |= {f"BOX_{i}": pixels for i, pixels in enumerate(runs.sizes)}
    block_m, more_m = tile.row_blocks
    g = g_descriptor(f, runs, block_m)
    descriptors = {
        "x": x_descriptor(f, runs, tile.n),
        "g": g,
        "g_more": g_descriptor(f, runs, more_m) if more_m else g,
    }
    return wgrad_tma, constants, descriptors


def g_descriptor(f: ImplicitGemm, runs: PixelRuns, filters: int) -> Descriptor:
    """Returns the TMA descriptor of g.

    Args:
        f: The forward pass, with g in the place of its result.
        runs: Pixels of a step.
        filters: Filters of a box.
    """
    (_, K, _, _), (n, _, p, q) = f.y.shape, f.y.strides
    if runs.joined:
        stride = f.y.pixel_stride
        assert stride is not None
        return Descriptor((f.pixels, K), (stride, 1), (prod(runs.sizes), filters))
    return image_descriptor(f.image, (n, p, q), K, runs, filters)
