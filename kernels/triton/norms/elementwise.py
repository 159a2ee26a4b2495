"""Normalization with an epilogue, and its gradient, each in one pass over images.

y = activation((x - mean) / sqrt(var + EPS) * scale + shift + residual)

Parameters are explained in the docstring of the package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from hetconv.kernels.epilogue import EpilogueSpec
from hetconv.kernels.launch import Launch, StridedLayout
from hetconv.kernels.triton.device_functions import activate, load_float32

from .tiles import (
    BLOCK_ELEMENTS,
    WARPS,
    Tiling,
    activation_input,
    channels_of_program,
    gradient_of_input,
    image_offset,
    sample_and_block,
    strides_of,
)


@triton.jit
def normalize(
    x, y, residual, mean, var, scale, shift,
    blocks, channels, pixels, columns,
    x_strides, y_strides, residual_strides,
    mean_stride, scale_stride, shift_stride,
    EPS: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr, SLOPE: tl.constexpr,
    HAS_ROWS: tl.constexpr, INT64: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Computes a block of y, which may be x itself."""
    n, block = sample_and_block(blocks, INT64)
    c = channels_of_program(INT64, BLOCK_C)
    p = block * BLOCK_P + tl.arange(0, BLOCK_P)
    inside_c = c < channels
    inside = inside_c[:, None] & (p < pixels)[None, :]
    z = load_float32(x + image_offset(n, c, p, columns, x_strides, HAS_ROWS), inside)
    of_sample = n * mean_stride + c
    centre = load_float32(mean + of_sample, inside_c)
    invstd = tl.rsqrt(load_float32(var + of_sample, inside_c) + EPS)
    z = activation_input(
        (z - centre[:, None]) * invstd[:, None],
        residual, image_offset(n, c, p, columns, residual_strides, HAS_ROWS),
        scale, shift, n, c, inside_c, inside, scale_stride, shift_stride,
        HAS_SCALE, HAS_SHIFT, HAS_RESIDUAL,
    )  # fmt: skip
    z = activate(z, ACTIVATION, SLOPE)
    y += image_offset(n, c, p, columns, y_strides, HAS_ROWS)
    tl.store(y, z.to(y.dtype.element_ty), mask=inside)


@triton.jit
def combine(
    x, g, y, residual, dr, factor_x, factor_g, summand, mean, invstd, scale, shift,
    blocks, channels, pixels, columns,
    x_strides, g_strides, y_strides, residual_strides,
    factor_stride, mean_stride, scale_stride, shift_stride,
    HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr, SLOPE: tl.constexpr,
    HAS_ROWS: tl.constexpr, INT64: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Computes a block of y = x * factor_x + d * factor_g + summand.

    d is the gradient of the activation's input, g that of its result. If there is a
    residual, d is stored in ``dr``, which lies as y does.
    """
    n, block = sample_and_block(blocks, INT64)
    c = channels_of_program(INT64, BLOCK_C)
    p = block * BLOCK_P + tl.arange(0, BLOCK_P)
    inside_c = c < channels
    inside = inside_c[:, None] & (p < pixels)[None, :]
    z = load_float32(x + image_offset(n, c, p, columns, x_strides, HAS_ROWS), inside)
    d = load_float32(g + image_offset(n, c, p, columns, g_strides, HAS_ROWS), inside)
    y_at = image_offset(n, c, p, columns, y_strides, HAS_ROWS)
    if ACTIVATION != "":
        d = gradient_of_input(
            d, z, residual, image_offset(n, c, p, columns, residual_strides, HAS_ROWS),
            load_float32(mean + n * mean_stride + c, inside_c),
            load_float32(invstd + n * mean_stride + c, inside_c),
            scale, shift, n, c, inside_c, inside, scale_stride, shift_stride,
            HAS_SCALE, HAS_SHIFT, HAS_RESIDUAL, ACTIVATION, SLOPE,
        )  # fmt: skip
    if HAS_RESIDUAL:
        tl.store(dr + y_at, d.to(dr.dtype.element_ty), mask=inside)
    of_sample = n * factor_stride + c
    z *= load_float32(factor_x + of_sample, inside_c)[:, None]
    z += d * load_float32(factor_g + of_sample, inside_c)[:, None]
    z += load_float32(summand + of_sample, inside_c)[:, None]
    tl.store(y + y_at, z.to(y.dtype.element_ty), mask=inside)


def normalize_launch(
    x: StridedLayout,
    y: StridedLayout,
    strides: Mapping[str, int],
    epilogue: EpilogueSpec,
    eps: float,
) -> Launch:
    """Returns the launch that writes ``x``, normalized, to ``y``.

    Args:
        x: Layout of the image (N, C, H, W).
        y: Layout of the result.
        strides: Parameters mean_stride, scale_stride and shift_stride.
        epilogue: What is applied to the normalized image.
        eps: Added to the variance.
    """
    images = {"x": x, "y": y, "residual": epilogue.residual or y}
    tensors = {name: name for name in ("x", "y", "mean", "var")} | epilogue.tensors("y")
    return _launch(normalize, images, tensors, strides, epilogue, {"EPS": eps})


def combine_launch(
    x: StridedLayout,
    g: StridedLayout,
    y: StridedLayout,
    strides: Mapping[str, int],
    epilogue: EpilogueSpec,
) -> Launch:
    """Returns the launch that writes the combination of ``x`` and ``g`` to ``y``.

    Args:
        x: Layout of the image that was normalized (N, C, H, W).
        g: Layout of the gradient of the result.
        y: Layout of the gradient of x.
        strides: Parameters factor_stride, mean_stride, scale_stride and shift_stride.
        epilogue: What was applied to the normalized image.
    """
    images = {"x": x, "g": g, "y": y, "residual": epilogue.residual or y}
    names = ("x", "g", "y", "factor_x", "factor_g", "summand")
    tensors = {name: name for name in names} | epilogue.tensors("y")
    tensors["dr"] = "dr" if epilogue.residual else "y"
    read_again = ("mean", "invstd")
    tensors |= {name: name if epilogue.activation else "y" for name in read_again}
    return _launch(combine, images, tensors, strides, epilogue, {})


def _launch(
    kernel: Any,
    images: Mapping[str, StridedLayout],
    tensors: Mapping[str, str],
    strides: Mapping[str, int],
    epilogue: EpilogueSpec,
    constants: Mapping[str, float],
) -> Launch:
    tiling = Tiling.of(images, BLOCK_ELEMENTS)
    return Launch(
        kernel,
        (tiling.samples * tiling.blocks, tiling.channel_blocks, 1),
        tensors,
        {
            "blocks": tiling.blocks,
            "channels": tiling.channels,
            "pixels": tiling.pixels,
            "columns": tiling.columns,
            **strides_of(images),
            **strides,
        },
        {**constants, **epilogue.constants, **tiling.constants(images)},
        WARPS,
    )
