"""Where the programs of a norm's kernels find their channels and pixels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import triton
import triton.language as tl

from hetconv.kernels.launch import MIN_ELEMENTS_FOR_INT64, StridedLayout
from hetconv.kernels.triton.device_functions import (
    activation_gradient,
    load_float32,
    scale_and_shift,
)

BLOCK_ELEMENTS = 4096  # of a program that makes an image
REDUCED_ELEMENTS = 2048  # of one that reduces an image, at a time: it has sums of each
WARPS = 8
MAX_BLOCK_C = 64  # channels that lie side by side: 128 bytes in float16
MAX_BLOCK_P = 1024
MIN_PROGRAMS = 512  # that a reduction of large images is split into, on any GPU alike


@triton.jit
def sample_and_block(blocks, INT64: tl.constexpr):
    """Returns the sample of a program, and its block of that sample's pixels."""
    program = tl.program_id(0).to(tl.int64) if INT64 else tl.program_id(0)
    return program // blocks, program % blocks


@triton.jit
def channels_of_program(INT64: tl.constexpr, BLOCK_C: tl.constexpr):
    """Returns the channels (BLOCK_C) of a program."""
    block = tl.program_id(1).to(tl.int64) if INT64 else tl.program_id(1)
    return block * BLOCK_C + tl.arange(0, BLOCK_C)


@triton.jit
def image_offset(n, c, p, columns, strides, HAS_ROWS: tl.constexpr):
    """Returns the offsets (BLOCK_C, BLOCK_P) of channels c and pixels p of sample n."""
    if HAS_ROWS:
        pixel = (p // columns) * strides[2] + (p % columns) * strides[3]
    else:
        pixel = p * strides[3]
    return n * strides[0] + c[:, None] * strides[1] + pixel[None, :]


@triton.jit
def activation_input(
    z, residual, at, scale, shift, n, c, inside_c, inside, scale_stride, shift_stride,
    HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Returns z * scale + shift + residual, each where it is given.

    Args:
        z: Float32 block (BLOCK_C, BLOCK_P), the normalized image.
        residual: Pointer to the residual.
        at: Block of offsets into it.
        scale: Pointer to a number per channel, or per sample and channel.
        shift: Likewise.
        n: The sample.
        c: The channels (BLOCK_C).
        inside_c: Block (BLOCK_C), True where a channel exists.
        inside: Block (BLOCK_C, BLOCK_P), True where a pixel of it exists.
        scale_stride: Stride of scale from sample to sample.
        shift_stride: Stride of shift from sample to sample.
        HAS_SCALE: Whether scale is read.
        HAS_SHIFT: Whether shift is read.
        HAS_RESIDUAL: Whether the residual is read.
    """
    scale += n * scale_stride
    shift += n * shift_stride
    z = scale_and_shift(z, scale, shift, c, inside_c, HAS_SCALE, HAS_SHIFT, 1)
    if HAS_RESIDUAL:
        z += load_float32(residual + at, inside)
    return z


@triton.jit
def gradient_of_input(
    d, x, residual, at, mean, invstd, scale, shift,
    n, c, inside_c, inside, scale_stride, shift_stride,
    HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr, SLOPE: tl.constexpr,
):  # fmt: skip
    """Returns the gradient of an activation's input, which is computed again from x.

    Args:
        d: Float32 block, gradient of the activation's result.
        x: Float32 block of the image that was normalized.
        residual: As `activation_input` takes it, like the other arguments.
        at: Likewise.
        mean: Block (BLOCK_C).
        invstd: Block (BLOCK_C).
        scale: Likewise.
        shift: Likewise.
        n: Likewise.
        c: Likewise.
        inside_c: Likewise.
        inside: Likewise.
        scale_stride: Likewise.
        shift_stride: Likewise.
        HAS_SCALE: Likewise.
        HAS_SHIFT: Likewise.
        HAS_RESIDUAL: Likewise.
        ACTIVATION: Name of the activation; "" returns d itself.
        SLOPE: Slope of leaky_relu below zero.
    """
    if ACTIVATION != "":
        z = activation_input(
            (x - mean[:, None]) * invstd[:, None],
            residual, at, scale, shift, n, c, inside_c, inside, scale_stride, shift_stride,
            HAS_SCALE, HAS_SHIFT, HAS_RESIDUAL,
        )  # fmt: skip
        d = activation_gradient(d, z, ACTIVATION, SLOPE)
    return d


class Tiling(NamedTuple):
    """Division of images of one shape among programs.

    Attributes:
        samples: N.
        channels: C.
        pixels: Pixels of an image.
        columns: Pixels of a row.
        block_c: Channels of a program.
        block_p: Pixels that a program takes at a time.
    """

    samples: int
    channels: int
    pixels: int
    columns: int
    block_c: int
    block_p: int

    @staticmethod
    def of(layouts: Mapping[str, StridedLayout], elements: int) -> Tiling:
        """Returns the tiling of images.

        Args:
            layouts: Layouts of the images (N, C, H, W), by name.
            elements: Elements that a program takes at a time, at most.
        """
        N, C, H, W = next(iter(layouts.values())).shape
        channels_apart = all(t.strides[1] != 1 for t in layouts.values())
        block_c, block_p = _block(channels_apart, C, H * W, elements)
        return Tiling(N, C, H * W, W, block_c, block_p)

    @property
    def blocks(self) -> int:
        """Blocks of pixels of a sample."""
        return -(-self.pixels // self.block_p)

    @property
    def channel_blocks(self) -> int:
        """Blocks of channels of a sample."""
        return -(-self.channels // self.block_c)

    @property
    def blocks_of_split(self) -> int:
        """Blocks of pixels that one program of a reduction takes, one after the other."""
        splits = -(-MIN_PROGRAMS // max(self.samples * self.channel_blocks, 1))
        return -(-self.blocks // min(splits, self.blocks))

    @property
    def pixels_of_split(self) -> int:
        """Pixels that one program of a reduction takes."""
        return self.blocks_of_split * self.block_p

    @property
    def splits(self) -> int:
        """Programs that share the pixels of a sample in a reduction."""
        return -(-self.blocks // self.blocks_of_split)

    def constants(self, layouts: Mapping[str, StridedLayout]) -> dict[str, int | bool]:
        """Returns the constexpr parameters that all kernels have."""
        partial = 2 * self.samples * self.splits * self.channels
        span = max(partial, *(t.span for t in layouts.values()))
        return {
            "HAS_ROWS": self.columns < self.pixels,
            "INT64": span >= MIN_ELEMENTS_FOR_INT64,
            "BLOCK_C": self.block_c,
            "BLOCK_P": self.block_p,
        }


def strides_of(layouts: Mapping[str, StridedLayout]) -> dict[str, tuple[int, ...]]:
    """Returns the strides of images as kernels take them, by name."""
    return {f"{name}_strides": t.strides for name, t in layouts.items()}


def _block(channels_apart: bool, C: int, pixels: int, elements: int) -> tuple[int, int]:
    """Returns channels and pixels that a program takes at a time.

    Long runs of what lies side by side, both of channels and of pixels where images of
    both memory formats meet.
    """
    if channels_apart:
        block_p = min(triton.next_power_of_2(pixels), MAX_BLOCK_P)
        block_c = min(triton.next_power_of_2(C), elements // block_p)
    else:
        block_c = min(triton.next_power_of_2(C), MAX_BLOCK_C)
        block_p = min(triton.next_power_of_2(pixels), elements // block_c)
    return block_c, block_p
