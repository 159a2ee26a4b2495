"""Concatenation of channels with an epilogue, in one pass, and its gradient.

y[n, k, p, q] = activation(scale[k] part[n, k, p, q] + shift[k] + residual[n, k, p, q])

where the parts are side by side along k. What is moved at a time is a unit: UNIT channels
of a pixel, at most 16 bytes, that lie side by side in one part. A program takes BLOCK
units of the result that follow on each other, from as many parts as they have: a program
of one part would fill a piece of a line of memory, and others the rest of it much later.
Parameters of both kernels beside those of `implicit_gemm`; strides are counted in units:

    parts             pointer to each part that has channels
    part_strides      stride from pixel to pixel of each part
    y_strides         strides of samples, rows and columns; likewise of other images
    STARTS            first unit of a pixel of each part in the result, then their number
    WIDTHS            units of a pixel of each part, which are the gradients' strides
"""

from __future__ import annotations

from collections.abc import Sequence
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
from hetconv.sharding.conv_spec import ITEMSIZE, Ints

from .device_functions import (
    activate,
    activation_gradient,
    load_float32,
    pixel_position,
)
from .pack import BLOCK_UNITS, WARPS


@triton.jit
def _units_of_program(STARTS: tl.constexpr, INT64: tl.constexpr, BLOCK: tl.constexpr):
    """Pixels of a program's units, their positions in a pixel of the result, their part.

    Units beyond the last have pixels beyond the last.
    """
    block = tl.program_id(0).to(tl.int64) if INT64 else tl.program_id(0)
    e = block * BLOCK + tl.arange(0, BLOCK)
    pixel, unit = e // STARTS[len(STARTS) - 1], e % STARTS[len(STARTS) - 1]
    part = tl.zeros((BLOCK,), tl.int32)
    for i in tl.static_range(1, len(STARTS) - 1):
        part += (unit >= STARTS[i]).to(tl.int32)
    return pixel, unit, part


@triton.jit
def _addresses(
    tensors, strides, pixel, unit, part, STARTS: tl.constexpr, UNIT: tl.constexpr
):
    """Addresses of the numbers of units, each in the tensor of its part."""
    tensor = tensors[0]
    stride = strides[0]
    start = 0
    for i in tl.static_range(1, len(STARTS) - 1):
        tensor = tl.where(part == i, tensors[i], tensor)
        stride = tl.where(part == i, strides[i], stride)
        start = tl.where(part == i, STARTS[i], start)
    first = tensor + (pixel * stride + unit - start) * UNIT
    return first[:, None] + tl.arange(0, UNIT)[None, :]


@triton.jit
def _offsets(pixel, unit, P, Q, strides, UNIT: tl.constexpr):
    """Offsets of the numbers of units in an image (N, K, P, Q) of any strides."""
    n, p, q = pixel_position(pixel, P, Q)
    first = n * strides[0] + p * strides[1] + q * strides[2] + unit
    return first[:, None] * UNIT + tl.arange(0, UNIT)[None, :]


@triton.jit
def _load_per_channel(vector, unit, inside, UNIT: tl.constexpr):
    """Scale or shift of the channels of units, in float32."""
    k = unit[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
    return load_float32(vector + k, inside)


@triton.jit
def _before_activation(
    x, factor, shift, residual, pixel, unit, inside, P, Q, residual_strides,
    UNIT: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Sum factor * x + shift + residual in float32, of what is given."""
    z = x.to(tl.float32)
    if HAS_SCALE:
        z *= factor
    if HAS_SHIFT:
        z += _load_per_channel(shift, unit, inside, UNIT)
    if HAS_RESIDUAL:
        at = _offsets(pixel, unit, P, Q, residual_strides, UNIT)
        z += load_float32(residual + at, inside)
    return z


@triton.jit
def concat(
    parts, y, scale, shift, residual,
    pixels, P, Q,
    part_strides, y_strides, residual_strides,
    STARTS: tl.constexpr, UNIT: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr, SLOPE: tl.constexpr,
    INT64: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes BLOCK units of y; parameters are explained in the module's docstring."""
    pixel, unit, part = _units_of_program(STARTS, INT64, BLOCK)
    inside = (pixel < pixels)[:, None]
    source = _addresses(parts, part_strides, pixel, unit, part, STARTS, UNIT)
    x = tl.load(source, mask=inside)
    # Only arithmetic turns a NaN into another or flushes what is denormal: a number
    # that is moved keeps its bits.
    if HAS_SCALE or HAS_SHIFT or HAS_RESIDUAL or ACTIVATION != "":
        factor = _load_per_channel(scale, unit, inside, UNIT) if HAS_SCALE else 1.0
        z = _before_activation(
            x, factor, shift, residual, pixel, unit, inside, P, Q, residual_strides,
            UNIT, HAS_SCALE, HAS_SHIFT, HAS_RESIDUAL,
        )  # fmt: skip
        x = activate(z, ACTIVATION, SLOPE).to(y.dtype.element_ty)
    tl.store(y + _offsets(pixel, unit, P, Q, y_strides, UNIT), x, mask=inside)


@triton.jit
def split(
    parts, gradients, g, dr, scale, shift, residual,
    pixels, P, Q,
    part_strides, g_strides, residual_strides,
    STARTS: tl.constexpr, WIDTHS: tl.constexpr, UNIT: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr, SLOPE: tl.constexpr,
    INT64: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes BLOCK units of the gradients of `concat`'s parts and residual from g.

    ``gradients`` (of the parts) and ``dr`` (of the residual) point to packed tensors.
    Under an activation its input is computed again from the parts. Other parameters are
    explained in the module's docstring.
    """
    pixel, unit, part = _units_of_program(STARTS, INT64, BLOCK)
    inside = (pixel < pixels)[:, None]
    d = tl.load(g + _offsets(pixel, unit, P, Q, g_strides, UNIT), mask=inside)
    factor = _load_per_channel(scale, unit, inside, UNIT) if HAS_SCALE else 1.0
    if ACTIVATION != "":
        source = _addresses(parts, part_strides, pixel, unit, part, STARTS, UNIT)
        z = _before_activation(
            tl.load(source, mask=inside),
            factor, shift, residual, pixel, unit, inside, P, Q, residual_strides,
            UNIT, HAS_SCALE, HAS_SHIFT, HAS_RESIDUAL,
        )  # fmt: skip
        d = activation_gradient(d.to(tl.float32), z, ACTIVATION, SLOPE)
    if HAS_RESIDUAL:
        packed = (STARTS[len(STARTS) - 1], 0, 0)
        at = _offsets(pixel, unit, 1, 1, packed, UNIT)
        tl.store(dr + at, d.to(dr.dtype.element_ty), mask=inside)
    if HAS_SCALE:
        d = d.to(tl.float32) * factor
    target = _addresses(gradients, WIDTHS, pixel, unit, part, STARTS, UNIT)
    tl.store(target, d.to(g.dtype.element_ty), mask=inside)


def concat_launch(
    parts: Sequence[StridedLayout], y: StridedLayout, epilogue: EpilogueSpec
) -> Launch:
    """Returns the launch that joins tensors ``part0``, ``part1``, ... into y (N, K, P, Q).

    Args:
        parts: Layouts, each with its pixels at one stride. Those without channels are
            not read.
        y: Layout of the result, which is not empty.
        epilogue: What is applied to the parts.
    """
    tensors = {"parts": _names("part", parts), "y": "y"} | epilogue.tensors("y")
    return _launch(concat, tensors, "y_strides", parts, y, epilogue)


def split_launch(
    parts: Sequence[StridedLayout], g: StridedLayout, epilogue: EpilogueSpec
) -> Launch:
    """Returns the launch that computes packed gradients of what `concat_launch` reads.

    They are tensors ``gradient0``, ``gradient1``, ..., and ``dr`` if there is a residual.

    Args:
        parts: Layouts of the parts. Gradients of those without channels are not written.
        g: Layout of the gradient of the result (N, K, P, Q), which is not empty.
        epilogue: What was applied to the parts.
    """
    tensors = {
        "parts": _names("part", parts),
        "gradients": _names("gradient", parts),
        "g": "g",
        "dr": "dr" if epilogue.residual else "g",
    }
    tensors |= epilogue.tensors("g")
    return _launch(split, tensors, "g_strides", parts, g, epilogue)


def _launch(
    kernel: Any,
    tensors: dict[str, Any],
    y_name: str,
    parts: Sequence[StridedLayout],
    y: StridedLayout,
    epilogue: EpilogueSpec,
) -> Launch:
    """Returns the launch of a kernel; y is the result or its gradient, y_name its strides."""
    (N, K, P, Q), residual = y.shape, epilogue.residual or y
    parts = [p for p in parts if p.shape[1]]
    unit = _unit(parts, y, residual)
    widths = tuple(p.shape[1] // unit for p in parts)
    starts = tuple(accumulate(widths, initial=0))
    pixels = N * P * Q
    programs = -(-pixels * starts[-1] // BLOCK_UNITS)
    scalars = {
        "pixels": pixels,
        "part_strides": tuple((p.pixel_stride or 0) // unit for p in parts),
        **_image_scalars(y_name, y, residual, unit),
    }
    span = max(pixels * K, *(layout.span for layout in (*parts, y, residual)))
    constants = epilogue.constants | {
        "STARTS": starts,
        "UNIT": unit,
        "INT64": span >= MIN_ELEMENTS_FOR_INT64,
        "BLOCK": BLOCK_UNITS,
    }
    if kernel is split:
        constants["WIDTHS"] = widths
    return Launch(kernel, (programs, 1, 1), tensors, scalars, constants, WARPS)


def _image_scalars(
    y_name: str, y: StridedLayout, residual: StridedLayout, unit: int
) -> dict[str, int | Ints]:
    """Rows, columns and strides of y and the residual, whose pixels are numbered through.

    Where both have their pixels at one stride, each pixel counts as an image of its own,
    so that the compiled kernel divides by neither rows nor columns.
    """
    images = y, residual
    steps = [t.pixel_stride for t in images]
    if None in steps:
        _, _, P, Q = y.shape
        strides = [tuple(t.strides[dim] // unit for dim in (0, 2, 3)) for t in images]
    else:
        P = Q = 1
        strides = [((step or 0) // unit, 0, 0) for step in steps]
    return {"P": P, "Q": Q, y_name: strides[0], "residual_strides": strides[1]}


def _unit(
    parts: Sequence[StridedLayout], y: StridedLayout, residual: StridedLayout
) -> int:
    """Channels that lie side by side in one part, at most 16 bytes, from an aligned address on."""
    sizes = [n for p in parts for n in (p.shape[1], p.pixel_stride or 0)]
    return gcd(VECTOR_BYTES // ITEMSIZE[y.dtype], y.unit, residual.unit, *sizes)


def _names(name: str, parts: Sequence[StridedLayout]) -> tuple[str, ...]:
    return tuple(f"{name}{i}" for i, p in enumerate(parts) if p.shape[1])
