"""Moments of images, and the sums that gradients of norms need, in a fixed order.

Each program reduces a part of the pixels of a sample to one result per channel; a
second launch puts these together where a sample has several parts, or where a result is
of several channels or samples. There are no atomics, so that results have the same bits
every time. Parameters are explained in the docstring of the package, but for

    partial         pointer to the parts' results, contiguous (2, samples, parts, channels)
    splits          parts of a sample
    split_pixels    pixels of a part, but for the last one
    second          numbers from the first of both results to the second
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import triton
import triton.language as tl

from hetconv.kernels.epilogue import EpilogueSpec
from hetconv.kernels.launch import Launch, LaunchSequence, StridedLayout
from hetconv.kernels.triton.device_functions import load_float32

from .tiles import (
    REDUCED_ELEMENTS,
    WARPS,
    Tiling,
    channels_of_program,
    gradient_of_input,
    image_offset,
    sample_and_block,
    strides_of,
)

FINISH_ELEMENTS = 1024  # partial results that a program puts together at a time
FINISHED_CHANNELS = 16  # channels of which it does so, where each is a result
FINISH_WARPS = 4


@triton.jit
def combined_moments(count, mean, squares):
    """Returns mean and sum of squared deviations of rows, from those of their parts.

    Chan, Golub and LeVeque (1979), "Updating formulae and a pairwise algorithm for
    computing sample variances".

    Args:
        count: Block (rows, parts), how many numbers a part has; 0 of a part without any.
        mean: Block (rows, parts).
        squares: Block (rows, parts), sums of squared deviations from the mean.
    """
    total = tl.maximum(tl.sum(count, 1), 1.0)
    whole = tl.sum(mean * (count / total[:, None]), 1)
    apart = mean - whole[:, None]
    return whole, tl.sum(squares + count * apart * apart, 1)


@triton.jit
def partial_moments(
    x, partial,
    second, splits, split_pixels, channels, pixels, columns,
    x_strides,
    IS_VARIANCE: tl.constexpr,
    HAS_ROWS: tl.constexpr, INT64: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Computes (sum of squared deviations, mean) of a part of BLOCK_C channels.

    Welford (1962), "Note on a method for calculating corrected sums of squares and
    products", for each of BLOCK_P columns of numbers. With ``IS_VARIANCE`` the sum is
    divided by the number of pixels.
    """
    n, split = sample_and_block(splits, INT64)
    c = channels_of_program(INT64, BLOCK_C)
    inside_c = c < channels
    first = split * split_pixels
    end = tl.minimum(first + split_pixels, pixels)
    mean = tl.zeros((BLOCK_C, BLOCK_P), tl.float32)
    squares = tl.zeros((BLOCK_C, BLOCK_P), tl.float32)
    count = 0.0
    for start in range(first, end, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        inside = inside_c[:, None] & (p < end)[None, :]
        at = image_offset(n, c, p, columns, x_strides, HAS_ROWS)
        z = load_float32(x + at, inside)
        count += 1.0
        apart = tl.where(inside, z - mean, 0.0)
        mean += apart * (1.0 / count)
        squares += apart * tl.where(inside, z - mean, 0.0)
    lane = first + tl.arange(0, BLOCK_P)
    counts = tl.maximum(end - lane + BLOCK_P - 1, 0) // BLOCK_P
    counts = counts.to(tl.float32)[None, :] + tl.zeros((BLOCK_C, BLOCK_P), tl.float32)
    whole, total = combined_moments(counts, mean, squares)
    if IS_VARIANCE:
        total /= (end - first).to(tl.float32)
    at = partial + (n * splits + split) * channels + c
    tl.store(at, total, mask=inside_c)
    tl.store(at + second, whole, mask=inside_c)


@triton.jit
def finish_moments(
    partial, moments,
    second, parts, splits, split_pixels, pixels, rows, groups, group_channels,
    INT64: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes (variance, mean) of BLOCK_G groups of channels from those of their parts.

    Args:
        partial: What `partial_moments` writes, as (2, rows, parts, channels).
        moments: Contiguous (2, rows, groups).
        second: As in `partial_moments`, like splits, split_pixels and pixels.
        parts: Parts of a row: of one sample, or of all.
        splits: Likewise.
        split_pixels: Likewise.
        pixels: Likewise.
        rows: Rows of results: samples, or one of all samples.
        groups: Groups of a row.
        group_channels: Channels of a group.
        INT64: Whether addresses take 64 bits.
        BLOCK_G: Groups of a program.
        BLOCK: Partial results of a group that are loaded at a time.
    """
    row = tl.program_id(0).to(tl.int64) if INT64 else tl.program_id(0)
    g = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    inside_g = g < groups
    channels = groups * group_channels
    count = tl.zeros((BLOCK_G, BLOCK), tl.float32)
    mean = tl.zeros((BLOCK_G, BLOCK), tl.float32)
    squares = tl.zeros((BLOCK_G, BLOCK), tl.float32)
    for start in range(0, parts * group_channels, BLOCK):
        e = start + tl.arange(0, BLOCK)
        inside = inside_g[:, None] & (e < parts * group_channels)[None, :]
        part, c = e // group_channels, e % group_channels
        at = ((row * parts + part) * channels + c)[None, :] + g[
            :, None
        ] * group_channels
        held = tl.minimum(pixels - part % splits * split_pixels, split_pixels)
        new = tl.where(inside, held.to(tl.float32)[None, :], 0.0)
        apart = load_float32(partial + second + at, inside) - mean
        share = new / tl.maximum(count + new, 1.0)
        squares += load_float32(partial + at, inside) + apart * apart * count * share
        mean += apart * share
        count += new
    whole, total = combined_moments(count, mean, squares)
    var = total / tl.maximum(tl.sum(count, 1), 1.0)
    at = moments + row * groups + g
    tl.store(at, var, mask=inside_g)
    tl.store(at + rows * groups, whole, mask=inside_g)


@triton.jit
def partial_sums(
    g, x, residual, partial, mean, invstd, scale, shift,
    second, splits, split_pixels, channels, pixels, columns,
    g_strides, x_strides, residual_strides,
    mean_stride, scale_stride, shift_stride,
    HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr, SLOPE: tl.constexpr,
    HAS_ROWS: tl.constexpr, INT64: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Sums d times the normalized x, and d, over a part of BLOCK_C channels.

    d is the gradient of the activation's input, g that of its result.
    """
    n, split = sample_and_block(splits, INT64)
    c = channels_of_program(INT64, BLOCK_C)
    inside_c = c < channels
    centre = load_float32(mean + n * mean_stride + c, inside_c)
    scaling = load_float32(invstd + n * mean_stride + c, inside_c)
    first = split * split_pixels
    end = tl.minimum(first + split_pixels, pixels)
    along = tl.zeros((BLOCK_C, BLOCK_P), tl.float32)
    total = tl.zeros((BLOCK_C, BLOCK_P), tl.float32)
    for start in range(first, end, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        inside = inside_c[:, None] & (p < end)[None, :]
        at = image_offset(n, c, p, columns, x_strides, HAS_ROWS)
        z = load_float32(x + at, inside)
        at = image_offset(n, c, p, columns, g_strides, HAS_ROWS)
        d = load_float32(g + at, inside)
        d = gradient_of_input(
            d, z, residual, image_offset(n, c, p, columns, residual_strides, HAS_ROWS),
            centre, scaling, scale, shift,
            n, c, inside_c, inside, scale_stride, shift_stride,
            HAS_SCALE, HAS_SHIFT, HAS_RESIDUAL, ACTIVATION, SLOPE,
        )  # fmt: skip
        along += d * (z - centre[:, None])
        total += d
    at = partial + (n * splits + split) * channels + c
    tl.store(at, tl.sum(along, 1) * scaling, mask=inside_c)
    tl.store(at + second, tl.sum(total, 1), mask=inside_c)


@triton.jit
def finish_sums(
    partial, sums,
    parts, channels,
    INT64: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds up BLOCK_C channels of one row of both results.

    Args:
        partial: What `partial_sums` writes, as (2 rows, parts, channels).
        sums: Contiguous (2 rows, channels).
        parts: Parts of a row: of one sample, or of all.
        channels: Channels of an image.
        INT64: Whether addresses take 64 bits.
        BLOCK_C: Channels of a program.
        BLOCK: Partial results of a channel that are loaded at a time.
    """
    row = tl.program_id(0).to(tl.int64) if INT64 else tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros((BLOCK_C, BLOCK), tl.float32)
    for start in range(0, parts, BLOCK):
        part = start + tl.arange(0, BLOCK)
        inside = (c < channels)[:, None] & (part < parts)[None, :]
        at = ((row * parts + part) * channels)[None, :] + c[:, None]
        total += load_float32(partial + at, inside)
    tl.store(sums + row * channels + c, tl.sum(total, 1), mask=c < channels)


@dataclass(frozen=True)
class Reduction:
    """Reduction of images to rows of results: of each sample, or of all together.

    Attributes:
        images: Layouts of the images that are read (N, C, H, W), by name.
        of_all_samples: Whether all samples make one row.
    """

    images: Mapping[str, StridedLayout]
    of_all_samples: bool

    @cached_property
    def tiling(self) -> Tiling:
        """Division of the images among programs."""
        return Tiling.of(self.images, REDUCED_ELEMENTS)

    @property
    def rows(self) -> int:
        """Rows of results."""
        return 1 if self.of_all_samples else self.tiling.samples

    @property
    def parts(self) -> int:
        """Parts of a row, each reduced by one program."""
        return self.tiling.splits * self.tiling.samples // self.rows

    @property
    def partial_results(self) -> int:
        """Numbers of one kind that the first launch writes."""
        return self.rows * self.parts * self.tiling.channels

    def first_launch(
        self,
        kernel: Any,
        tensors: Mapping[str, str],
        scalars: Mapping[str, int],
        constants: Mapping[str, Any],
    ) -> Launch:
        """Returns the launch that reduces each part."""
        tiling = self.tiling
        return Launch(
            kernel,
            (tiling.samples * tiling.splits, tiling.channel_blocks, 1),
            tensors,
            {
                "second": self.partial_results,
                "splits": tiling.splits,
                "split_pixels": tiling.pixels_of_split,
                "channels": tiling.channels,
                "pixels": tiling.pixels,
                "columns": tiling.columns,
                **strides_of(self.images),
                **scalars,
            },
            {**constants, **tiling.constants(self.images)},
            WARPS,
        )


def moments_launches(
    x: StridedLayout, groups: int, of_all_samples: bool
) -> LaunchSequence:
    """Returns the launches that measure ``x`` into ``moments``, contiguous (2, rows, groups).

    Args:
        x: Layout of the image (N, C, H, W), not empty.
        groups: Groups of channels, which divide C.
        of_all_samples: Whether all samples are measured together, as one row.
    """
    reduction = Reduction({"x": x}, of_all_samples)
    tiling, rows, parts = reduction.tiling, reduction.rows, reduction.parts
    of_channels = groups == tiling.channels
    is_done = of_channels and parts == 1
    tensors = {"x": "x", "partial": "moments" if is_done else "partial"}
    constants = {"IS_VARIANCE": is_done}
    measure = reduction.first_launch(partial_moments, tensors, {}, constants)
    if is_done:
        return LaunchSequence((measure,))
    block_g = FINISHED_CHANNELS if of_channels else 1
    group_channels = tiling.channels // groups
    results_of_group = triton.next_power_of_2(parts * group_channels)
    finish = Launch(
        finish_moments,
        (rows, -(-groups // block_g), 1),
        {"partial": "partial", "moments": "moments"},
        {
            "second": reduction.partial_results,
            "parts": parts,
            "splits": tiling.splits,
            "split_pixels": tiling.pixels_of_split,
            "pixels": tiling.pixels,
            "rows": rows,
            "groups": groups,
            "group_channels": group_channels,
        },
        {
            "INT64": measure.constants["INT64"],
            "BLOCK_G": block_g,
            "BLOCK": min(FINISH_ELEMENTS // block_g, results_of_group),
        },
        FINISH_WARPS,
    )
    return LaunchSequence((measure, finish), 2 * reduction.partial_results)


def sums_launches(
    g: StridedLayout,
    x: StridedLayout,
    strides: Mapping[str, int],
    of_all_samples: bool,
    epilogue: EpilogueSpec,
) -> LaunchSequence:
    """Returns the launches that sum into ``sums``, contiguous (2, rows, C).

    Args:
        g: Layout of the gradient of the result (N, C, H, W), not empty.
        x: Layout of the image that was normalized.
        strides: Parameters mean_stride, scale_stride and shift_stride.
        of_all_samples: Whether sums are over all samples, as one row.
        epilogue: What was applied to the normalized image.
    """
    images = {"g": g, "x": x, "residual": epilogue.residual or x}
    reduction = Reduction(images, of_all_samples)
    channels, rows, parts = reduction.tiling.channels, reduction.rows, reduction.parts
    tensors = {name: name for name in ("g", "x", "mean", "invstd")}
    tensors |= epilogue.tensors("x")
    tensors["partial"] = "sums" if parts == 1 else "partial"
    add = reduction.first_launch(partial_sums, tensors, strides, epilogue.constants)
    if parts == 1:
        return LaunchSequence((add,))
    finish = Launch(
        finish_sums,
        (2 * rows, -(-channels // FINISHED_CHANNELS), 1),
        {"partial": "partial", "sums": "sums"},
        {"parts": parts, "channels": channels},
        {
            "INT64": add.constants["INT64"],
            "BLOCK_C": FINISHED_CHANNELS,
            "BLOCK": min(
                FINISH_ELEMENTS // FINISHED_CHANNELS, triton.next_power_of_2(parts)
            ),
        },
        FINISH_WARPS,
    )
    return LaunchSequence((add, finish), 2 * reduction.partial_results)
