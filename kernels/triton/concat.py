"""Concatenation of channels with an epilogue, in one pass, and its gradient.

y[n, k, p, q] = activation(scale[k] part[n, k, p, q] + shift[k] + residual[n, k, p, q])

where the parts are side by side along k. Each program takes BLOCK_N pixels by BLOCK_M
blocks of UNIT channels. Parameters of both kernels beside those of `implicit_gemm`:

    parts       pointer to each part, whose pixels lie at one stride
    widths      stride from pixel to pixel of each part, in units of UNIT elements
    STARTS      first channel of each part, then their sum, in units of UNIT
    UNIT        channels that lie side by side in one part, at most 16 bytes
"""

from __future__ import annotations

from itertools import accumulate
from math import gcd
from typing import Any

import triton
import triton.language as tl

from hetconv.kernels.epilogue import EpilogueSpec
from hetconv.kernels.launch import (
    MIN_ELEMENTS_FOR_INT64,
    VECTOR_BYTES,
    Launch,
    StridedLayout,
)
from hetconv.sharding.conv_spec import ITEMSIZE

from .device_functions import (
    activate,
    activation_gradient,
    load_float32,
    pixel_position,
    scale_and_shift,
)

BLOCK_ELEMENTS = 8192  # of a program: 64 bytes of each operand per thread in float16
MAX_BLOCK_M = 32
WARPS = 8


@triton.jit
def _block_position(
    pixels, STARTS: tl.constexpr, UNIT: tl.constexpr, INT64: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Pixels, blocks of channels and channels within a block of a program; their mask."""
    block = tl.program_id(0).to(tl.int64) if INT64 else tl.program_id(0)
    pixel = (block * BLOCK_N + tl.arange(0, BLOCK_N))[:, None, None]
    j = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M))[None, :, None]
    u = tl.arange(0, UNIT)[None, None, :]
    inside = (pixel < pixels) & (j < STARTS[len(STARTS) - 1])
    return pixel, j, u, inside


@triton.jit
def _load_parts(
    parts, pixel, j, u, inside, widths,
    STARTS: tl.constexpr, UNIT: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """The parts' numbers in float32, each block of UNIT channels from its part."""
    z = tl.zeros(SHAPE, tl.float32)
    for i in tl.static_range(len(STARTS) - 1):
        here = inside & (j >= STARTS[i]) & (j < STARTS[i + 1])
        at = (pixel * widths[i] + j - STARTS[i]) * UNIT + u
        x = load_float32(parts[i] + at, here)
        z = tl.where(here, x, z)  # a sum would make 0 of -0
    return z


@triton.jit
def concat(
    parts, y, scale, shift, residual,
    pixels, P, Q,
    widths,
    stride_yn, stride_yp, stride_yq,
    stride_rn, stride_rp, stride_rq,
    STARTS: tl.constexpr, UNIT: tl.constexpr,
    Y_UNIT: tl.constexpr, RESIDUAL_UNIT: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr, SLOPE: tl.constexpr, INT64: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Computes a block of y; parameters are explained in the module's docstring."""
    pixel, j, u, inside = _block_position(pixels, STARTS, UNIT, INT64, BLOCK_N, BLOCK_M)
    SHAPE: tl.constexpr = (BLOCK_N, BLOCK_M, UNIT)
    z = _load_parts(parts, pixel, j, u, inside, widths, STARTS, UNIT, SHAPE)
    n, p, q = pixel_position(pixel, P, Q)
    k = j * UNIT + u
    z = scale_and_shift(z, scale, shift, k, inside, HAS_SCALE, HAS_SHIFT)
    if HAS_RESIDUAL:
        r_pixel = n * stride_rn + p * stride_rp + q * stride_rq
        z += load_float32(residual + r_pixel * RESIDUAL_UNIT + k, inside)
    z = activate(z, ACTIVATION, SLOPE)
    y_pixel = n * stride_yn + p * stride_yp + q * stride_yq
    tl.store(y + y_pixel * Y_UNIT + k, z.to(y.dtype.element_ty), mask=inside)


@triton.jit
def split(
    parts, gradients, g, dr, scale, shift, residual,
    pixels, P, Q,
    widths,
    stride_gn, stride_gp, stride_gq,
    stride_rn, stride_rp, stride_rq,
    STARTS: tl.constexpr, UNIT: tl.constexpr,
    G_UNIT: tl.constexpr, RESIDUAL_UNIT: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr, SLOPE: tl.constexpr, INT64: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Computes a block of the gradients of `concat`'s parts and residual from g.

    ``gradients`` (of the parts) and ``dr`` (of the residual) point to packed tensors.
    Under an activation its input is computed again from the parts. Other parameters are
    explained in the module's docstring.
    """
    pixel, j, u, inside = _block_position(pixels, STARTS, UNIT, INT64, BLOCK_N, BLOCK_M)
    n, p, q = pixel_position(pixel, P, Q)
    k = j * UNIT + u
    g_pixel = n * stride_gn + p * stride_gp + q * stride_gq
    d = load_float32(g + g_pixel * G_UNIT + k, inside)
    if ACTIVATION != "":
        SHAPE: tl.constexpr = (BLOCK_N, BLOCK_M, UNIT)
        z = _load_parts(parts, pixel, j, u, inside, widths, STARTS, UNIT, SHAPE)
        z = scale_and_shift(z, scale, shift, k, inside, HAS_SCALE, HAS_SHIFT)
        if HAS_RESIDUAL:
            r_pixel = n * stride_rn + p * stride_rp + q * stride_rq
            z += load_float32(residual + r_pixel * RESIDUAL_UNIT + k, inside)
        d = activation_gradient(d, z, ACTIVATION, SLOPE)
    if HAS_RESIDUAL:
        dr_block = dr + pixel * STARTS[len(STARTS) - 1] * UNIT + k
        tl.store(dr_block, d.to(dr.dtype.element_ty), mask=inside)
    if HAS_SCALE:
        d *= load_float32(scale + k, inside)
    for i in tl.static_range(len(STARTS) - 1):
        here = inside & (j >= STARTS[i]) & (j < STARTS[i + 1])
        at = (pixel * (STARTS[i + 1] - STARTS[i]) + j - STARTS[i]) * UNIT + u
        tl.store(gradients[i] + at, d.to(g.dtype.element_ty), mask=here)


def concat_launch(
    parts: tuple[StridedLayout, ...], y: StridedLayout, epilogue: EpilogueSpec
) -> Launch:
    """Returns the launch that joins tensors ``part0``, ``part1``, ... into y (N, K, P, Q).

    Args:
        parts: Layouts, each with its pixels at one stride.
        y: Layout of the result.
        epilogue: What is applied to the parts.
    """
    tensors = {"parts": _numbered("part", parts), "y": "y"} | epilogue.tensors("y")
    return _launch(concat, tensors, "y", parts, y, epilogue)


def split_launch(
    parts: tuple[StridedLayout, ...], g: StridedLayout, epilogue: EpilogueSpec
) -> Launch:
    """Returns the launch that computes packed gradients of what `concat_launch` reads.

    They are tensors ``gradient0``, ``gradient1``, ..., and ``dr`` if there is a residual.

    Args:
        parts: Layouts of the parts.
        g: Layout of the gradient of the result (N, K, P, Q).
        epilogue: What was applied to the parts.
    """
    tensors = {
        "parts": _numbered("part", parts),
        "gradients": _numbered("gradient", parts),
        "g": "g",
        "dr": "dr" if epilogue.residual else "g",
    }
    return _launch(split, tensors | epilogue.tensors("g"), "g", parts, g, epilogue)


def _launch(
    kernel: Any,
    tensors: dict[str, Any],
    name: str,
    parts: tuple[StridedLayout, ...],
    y: StridedLayout,
    epilogue: EpilogueSpec,
) -> Launch:
    (N, K, P, Q), residual = y.shape, epilogue.residual or y
    sizes = [p.shape[1] for p in parts]
    unit = _unit(parts, y, residual)
    starts = tuple(start // unit for start in accumulate(sizes, initial=0))
    block_m = min(triton.next_power_of_2(K // unit), MAX_BLOCK_M)
    block_n = BLOCK_ELEMENTS // (block_m * unit)
    pixels = N * P * Q
    scalars: dict[str, Any] = {
        "pixels": pixels,
        "P": P,
        "Q": Q,
        "widths": tuple((p.pixel_stride or 0) // unit for p in parts),
    }
    scalars |= y.stride_arguments(name, "npq", y.unit)
    scalars |= residual.stride_arguments("r", "npq", residual.unit)
    span = max(pixels * K, *(layout.span for layout in (*parts, y, residual)))
    constants = epilogue.constants | {
        "STARTS": starts,
        "UNIT": unit,
        f"{name.upper()}_UNIT": y.unit,
        "RESIDUAL_UNIT": residual.unit,
        "INT64": span >= MIN_ELEMENTS_FOR_INT64,
        "BLOCK_N": block_n,
        "BLOCK_M": block_m,
    }
    grid = (-(-pixels // block_n), -(-starts[-1] // block_m), 1)
    return Launch(kernel, grid, tensors, scalars, constants, WARPS)


def _unit(
    parts: tuple[StridedLayout, ...], y: StridedLayout, residual: StridedLayout
) -> int:
    """Channels that lie side by side in one part, at most 16 bytes, from an aligned address on."""
    sizes = [n for p in parts if p.shape[1] for n in (p.shape[1], p.pixel_stride or 0)]
    return gcd(VECTOR_BYTES // ITEMSIZE[y.dtype], y.unit, residual.unit, *sizes)


def _numbered(name: str, parts: tuple[StridedLayout, ...]) -> tuple[str, ...]:
    return tuple(f"{name}{i}" for i in range(len(parts)))
