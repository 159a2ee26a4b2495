"""Multi-input convolution: implicit GEMM of an image whose channels lie in several tensors.

y[n, k, p, q] = activation(scale[k] sum + shift[k] + residual[n, k, p, q])
    sum over parts i, taps r, s, channels c < C_i of w[k, FIRST_i + c, r, s]
    x_i[n, c, p stride + r dilation - pad, q stride + s dilation - pad]

It is `implicit_gemm_pointers` with another reduction, which runs once for each part,
each time from its own tensor. Nothing is concatenated.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import accumulate

import triton
import triton.language as tl

from hetconv.errors import KernelError
from hetconv.kernels.chip import Chip
from hetconv.kernels.epilogue import NO_EPILOGUE, EpilogueSpec
from hetconv.kernels.launch import LaunchSequence, StridedLayout
from hetconv.kernels.tiles import (
    GemmShape,
    Tile,
    TileKind,
    fastest,
    largest_stages,
    tile_depths,
)
from hetconv.sharding.conv_spec import ConvSpec

from . import fprop, gemm_launch
from .device_functions import (
    activate,
    load_float32,
    mask_of_taps,
    pixel_position,
    scale_and_shift,
)
from .gemm_launch import ImplicitGemm


@triton.jit
def implicit_gemm_parts(
    x, w, y, scale, shift, residual,
    pixels, P, Q, H, W, M,
    stride_xn, stride_xh, stride_xw,
    stride_wk, stride_wr, stride_ws,
    stride_yn, stride_yp, stride_yq,
    stride_rn, stride_rp, stride_rq,
    FIRST: tl.constexpr, WIDTHS: tl.constexpr, C_BLOCKS: tl.constexpr,
    X_UNIT: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr,
    STRIDE_H: tl.constexpr, OFFSET_H: tl.constexpr, DILATION_H: tl.constexpr,
    STRIDE_W: tl.constexpr, OFFSET_W: tl.constexpr, DILATION_W: tl.constexpr,
    W_UNIT: tl.constexpr, Y_UNIT: tl.constexpr,
    RESIDUAL_UNIT: tl.constexpr, M_UNIT: tl.constexpr,
    INT64: tl.constexpr, PRECISION: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr, SLOPE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Computes a tile of y (BLOCK_N pixels by BLOCK_M channels) from several inputs.

    x, its strides and X_UNIT have an entry for each part, and so have FIRST, its first
    channel among those of the filters, WIDTHS, its channels, and C_BLOCKS, the blocks of
    BLOCK_K that they are read in. Other parameters are explained in `implicit_gemm`.
    """
    M = M * M_UNIT
    tiles_m = tl.cdiv(M, BLOCK_M)
    pid = tl.program_id(0)  # channels fastest: programs that share input run together
    block = (pid // tiles_m).to(tl.int64) if INT64 else pid // tiles_m
    pixel = block * BLOCK_N + tl.arange(0, BLOCK_N)
    m = (pid % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    n, p, q = pixel_position(pixel, P, Q)
    h = p * STRIDE_H + OFFSET_H
    v = q * STRIDE_W + OFFSET_W
    inside = pixel < pixels
    taps = mask_of_taps(
        h, v, inside, H, W, R, S, DILATION_H, DILATION_W, False, BLOCK_N
    )
    c = tl.arange(0, BLOCK_K)
    w_block = w + (m * stride_wk)[None, :] * W_UNIT + c[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for i in tl.static_range(len(WIDTHS)):
        x_pixel = (n * stride_xn[i] + h * stride_xh[i] + v * stride_xw[i])[:, None]
        x_block = x[i] + x_pixel * X_UNIT[i] + c[None, :]
        for it in range(R * S * C_BLOCKS[i]):
            tap = tl.cast(it // C_BLOCKS[i], tl.int64) if INT64 else it // C_BLOCKS[i]
            c0 = (it % C_BLOCKS[i]) * BLOCK_K
            r = tap // S
            s = tap % S
            x_ok = ((taps >> tap) & 1 != 0)[:, None]
            w_ok = (m < M)[None, :]
            if WIDTHS[i] % BLOCK_K:
                x_ok = x_ok & (c0 + c < WIDTHS[i])[None, :]
                w_ok = w_ok & (c0 + c < WIDTHS[i])[:, None]
            x_tap = r * DILATION_H * stride_xh[i] + s * DILATION_W * stride_xw[i]
            x_tile = tl.load(x_block + (x_tap * X_UNIT[i] + c0), mask=x_ok, other=0.0)
            w_step = (r * stride_wr + s * stride_ws) * W_UNIT + (FIRST[i] + c0)
            w_tile = tl.load(w_block + w_step, mask=w_ok, other=0.0)
            acc = tl.dot(x_tile, w_tile, acc, input_precision=PRECISION)
    acc = scale_and_shift(
        acc,
        scale,
        shift,
        m,
        mask=m < M,
        HAS_SCALE=HAS_SCALE,
        HAS_SHIFT=HAS_SHIFT,
        AXIS=0,
    )
    stored = inside[:, None] & (m < M)[None, :]
    if HAS_RESIDUAL:
        r_pixel = (n * stride_rn + p * stride_rp + q * stride_rq)[:, None]
        acc += load_float32(residual + r_pixel * RESIDUAL_UNIT + m[None, :], stored)
    acc = activate(acc, ACTIVATION, SLOPE)
    y_pixel = (n * stride_yn + p * stride_yp + q * stride_yq)[:, None]
    y_block = y + y_pixel * Y_UNIT + m[None, :]
    tl.store(y_block, acc.to(y.dtype.element_ty), mask=stored)


@dataclass(frozen=True)
class MultiInputShape(GemmShape):
    """Matrix product whose channels are those of several parts.

    Attributes:
        widths: Channels of each part, which takes whole steps.
    """

    widths: tuple[int, ...] = ()

    def steps_of(self, k: int, kind: TileKind = "pointer") -> int:
        """Returns the number of steps of a reduction, ``k`` numbers each."""
        return sum(-(-C // k) for C in self.widths) * self.taps


@dataclass(frozen=True)
class MultiInputGemm:
    """What the kernel computes.

    Attributes:
        parts: Layouts (N, C_i, H, W) of the inputs, none empty.
        whole: The same of one input, whose layout is that of the largest part.
    """

    parts: tuple[StridedLayout, ...]
    whole: ImplicitGemm

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of each part."""
        return tuple(p.shape[1] for p in self.parts)

    @property
    def shape(self) -> MultiInputShape:
        """The matrix product that tiles are chosen for."""
        whole = replace(self.whole.shape, supports_tma=False, k_divides_channels=False)
        known = {f.name: getattr(whole, f.name) for f in fields(whole)}
        return MultiInputShape(**known, widths=self.widths)


def forward(
    spec: ConvSpec,
    parts: tuple[StridedLayout, ...],
    w: StridedLayout,
    y: StridedLayout,
    precision: str,
    epilogue: EpilogueSpec = NO_EPILOGUE,
) -> MultiInputGemm:
    """Returns the forward pass of a convolution of parts.

    Args:
        spec: The convolution of all parts together.
        parts: Layouts (N, C_i, H, W) of the inputs.
        w: Layout of the filters.
        y: Layout of the result.
        precision: "tf32" or "ieee", how float32 is multiplied.
        epilogue: What is applied to the result.
    """
    largest = max(parts, key=lambda p: p.span)
    whole = fprop.direct(spec, largest, w, y, precision, epilogue)
    return MultiInputGemm(tuple(p for p in parts if p.shape[1]), whole)


def launches(gemm: MultiInputGemm, tile: Tile) -> LaunchSequence:
    """Returns the launch that computes y from w and tensors ``x0``, ``x1``, ...

    Args:
        gemm: What is computed.
        tile: Tile of pointers without split-k, with one accumulator.

    Raises:
        KernelError: The tile is another one.
    """
    if tile.kind != "pointer" or tile.split_k > 1 or tile.row_blocks[1]:
        raise KernelError(
            f"tile {tile} cannot read several inputs; give a tile of pointers without "
            "split-k whose m is a power of two, or none"
        )
    (single,) = gemm_launch.launches(gemm.whole, tile).launches
    units = tuple(p.unit for p in gemm.parts)
    strides = [p.stride_arguments("x", "nhw", p.unit) for p in gemm.parts]
    scalars = {name: tuple(s[name] for s in strides) for name in strides[0]}
    constants = {
        "FIRST": tuple(accumulate(gemm.widths[:-1], initial=0)),
        "WIDTHS": gemm.widths,
        "X_UNIT": units,
        "C_BLOCKS": tuple(-(-C // tile.k) for C in gemm.widths),
    }
    names = set(implicit_gemm_parts.arg_names)
    launch = replace(
        single,
        kernel=implicit_gemm_parts,
        tensors={**single.tensors, "x": tuple(f"x{i}" for i in range(len(units)))},
        scalars={k: v for k, v in single.scalars.items() if k in names} | scalars,
        constants={k: v for k, v in single.constants.items() if k in names} | constants,
    )
    return LaunchSequence((launch,))


# Without tensor cores, at a depth of 16, others spill registers.
IEEE_SHAPES = ((128, 128), (64, 32), (32, 64))


@lru_cache(4096)
def default_tile(shape: MultiInputShape, chip: Chip) -> Tile:
    """Returns the tile without split-k of the fewest estimated seconds."""
    depths = [16] if shape.ieee else tile_depths(shape, "pointer")
    found = [
        tile
        for tile in largest_stages(shape, chip, "pointer", depths)
        if not shape.ieee or (tile.m, tile.n) in IEEE_SHAPES
    ]
    return fastest(found, shape, chip)
