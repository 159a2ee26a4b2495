"""Implicit GEMM as data, and the launches of its kernels by pointers or TMA."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from hetconv.kernels.epilogue import NO_EPILOGUE, EpilogueSpec
from hetconv.kernels.launch import (
    MIN_ELEMENTS_FOR_INT64,
    VECTOR_BYTES,
    Descriptor,
    Launch,
    LaunchSequence,
    Slices,
    StridedLayout,
)
from hetconv.kernels.tiles import (
    Box,
    GemmShape,
    Image,
    PixelRuns,
    Tile,
    pixel_box,
)
from hetconv.sharding.conv_spec import ITEMSIZE

from .implicit_gemm import implicit_gemm_pointers, implicit_gemm_tma
from .split_k import sum_launch

MAX_M_UNIT = 16


@dataclass(frozen=True)
class Taps:
    """Taps of one dimension: the filter rows that they are, the input rows they read.

    Attributes:
        count: Number of taps.
        first: Filter row of the first tap.
        step: Filter rows from tap to tap.
        stride: Input rows from output to output.
        offset: Input row that output 0 reads through the first tap.
        dilation: Input rows from tap to tap.
    """

    count: int
    first: int = 0
    step: int = 1
    stride: int = 1
    offset: int = 0
    dilation: int = 1


@dataclass(frozen=True)
class ImplicitGemm:
    """What the kernels of `implicit_gemm` compute, on tensors of known layouts.

    Attributes:
        M: Output channels of a group.
        C: Input channels of a group, which are reduced.
        groups: Number of groups; x, y and the residual hold the channels of all.
        rows: Taps along rows.
        cols: Taps along columns.
        x: Layout of the input.
        w: Layout of the filters, (K, C / groups, R, S).
        y: Layout of the result.
        precision: "tf32" or "ieee", how float32 is multiplied.
        w_transposed: Whether the filters' first dimension is reduced.
        packed: Whether columns of x count numbers, see `fprop.pack_channels`.
        epilogue: What is applied to the result.
    """

    M: int
    C: int
    groups: int
    rows: Taps
    cols: Taps
    x: StridedLayout
    w: StridedLayout
    y: StridedLayout
    precision: str
    w_transposed: bool = False
    packed: bool = False
    epilogue: EpilogueSpec = NO_EPILOGUE

    @property
    def image(self) -> Image:
        """Samples, rows and columns of the result."""
        N, _, P, Q = self.y.shape
        return N, P, Q

    @property
    def pixels(self) -> int:
        """Pixels of the result, of all samples."""
        N, P, Q = self.image
        return N * P * Q

    @property
    def shape(self) -> GemmShape:
        """The matrix product that tiles are chosen for."""
        return GemmShape(
            self.M,
            self.pixels,
            self.C,
            self.rows.count * self.cols.count,
            self.groups,
            self.x.dtype,
            self.image,
            supports_tma=self.supports_tma(self.w),
            k_divides_channels=self.groups > 1 or self.rows.stride == 2,
            packed=self.packed,
            ieee=self.ieee,
        )

    @property
    def ieee(self) -> bool:
        """Whether float32 is multiplied exactly, without tensor cores."""
        return self.x.dtype == "float32" and self.precision == "ieee"

    @property
    def x_unit(self) -> int:
        """Common divisor of the strides of x that a kernel multiplies with."""
        if not self.packed:
            return self.x.unit
        n, _, h, _ = self.x.strides
        return gcd(VECTOR_BYTES // ITEMSIZE[self.x.dtype], n, h)

    def supports_tma(self, other: StridedLayout) -> bool:
        """Returns whether TMA can read x and the other operand.

        They must be aligned, x at stride 1, or at stride 2 of an even and packed image.
        """
        strides, (_, C, H, W) = (self.rows.stride, self.cols.stride), self.x.shape
        are_aligned = self.x.supports_tma and other.supports_tma
        if not are_aligned or self.ieee or self.packed:
            return False
        if strides == (2, 2):
            is_even = H % 2 == 0 and W % 2 == 0
            return is_even and self.x.strides[3] == C and self.C % 16 == 0
        return strides == (1, 1) and (self.groups == 1 or self.C % 16 == 0)


def launches(
    gemm: ImplicitGemm, tile: Tile, slices: Slices | None = None
) -> LaunchSequence:
    """Returns the launches that compute tensor y from tensors x and w.

    Args:
        gemm: What is computed.
        tile: Tile of the kernel.
        slices: Part of y that receives the result, if not all.
    """
    build = _tma_launch if tile.kind == "tma" else _pointer_launch
    if tile.split_k == 1:
        return LaunchSequence((build(gemm, tile, "y", slices),))
    partial = StridedLayout.packed(gemm.y.shape, "float32")
    main = replace(gemm, y=partial, epilogue=NO_EPILOGUE)
    total = sum_launch(gemm.y, tile.split_k, gemm.epilogue, slices)
    return LaunchSequence(
        (build(main, tile, "partial", None), total),
        tile.split_k * gemm.pixels * gemm.y.shape[1],
    )


def _tma_launch(
    gemm: ImplicitGemm, tile: Tile, y: str, slices: Slices | None
) -> Launch:
    box = pixel_box(gemm.image, tile.n)
    block_m, more_m = tile.row_blocks
    w = w_descriptor(gemm, block_m, tile.k)
    tensors, scalars, constants = _arguments(gemm, tile, y)
    constants |= {"STRIDE": gemm.rows.stride, "X_CHANNELS": gemm.x.shape[1]}
    constants |= zip(("BOX_N", "BOX_P", "BOX_Q"), box.sizes, strict=True)
    return Launch(
        implicit_gemm_tma,
        (-(-gemm.M // tile.m) * box.copies, tile.split_k, gemm.groups),
        tensors | {"w_more": "w"},
        scalars | {"N": gemm.image[0]},
        constants,
        tile.warps,
        tile.stages,
        {
            "x": x_descriptor(gemm, box, tile.k),
            "w": w,
            "w_more": w_descriptor(gemm, more_m, tile.k) if more_m else w,
        },
        {"y": slices} if slices else {},
    )


def _pointer_launch(
    gemm: ImplicitGemm, tile: Tile, y: str, slices: Slices | None
) -> Launch:
    _, _, H, W = gemm.x.shape
    w_unit = gemm.w.unit
    group_stride = (gemm.C if gemm.w_transposed else gemm.M) * gemm.w.strides[0]
    tensors, scalars, constants = _arguments(gemm, tile, y)
    scalars |= {"pixels": gemm.pixels, "H": H, "W": W}
    scalars |= gemm.x.stride_arguments("x", "nhw", gemm.x_unit)
    scalars |= gemm.w.stride_arguments("w", "krs", w_unit)
    scalars["stride_wg"] = group_stride // w_unit
    constants |= {
        "STRIDE_H": gemm.rows.stride,
        "STRIDE_W": gemm.cols.stride,
        "X_UNIT": gemm.x_unit,
        "W_UNIT": w_unit,
        "PACKED": gemm.packed,
        "BLOCK_N": tile.n,
    }
    tiles = -(-gemm.M // tile.m) * -(-gemm.pixels // tile.n)
    return Launch(
        implicit_gemm_pointers,
        (tiles, tile.split_k, gemm.groups),
        tensors,
        scalars,
        constants,
        tile.warps,
        tile.stages,
        slices={"y": slices} if slices else {},
    )


def _arguments(
    gemm: ImplicitGemm, tile: Tile, y: str
) -> tuple[dict[str, str], dict[str, int], dict[str, Any]]:
    """Tensors, scalars and constants that both kernels take."""
    _, P, Q = gemm.image
    rows, cols, m_unit = gemm.rows, gemm.cols, gcd(gemm.M, MAX_M_UNIT)
    block_m, more_m = tile.row_blocks
    residual = gemm.epilogue.residual or gemm.y
    tensors = {"x": "x", "w": "w", "y": y} | gemm.epilogue.tensors(y)
    scalars = {"P": P, "Q": Q, "M": gemm.M // m_unit}
    scalars["stride_yz"] = gemm.pixels * gemm.y.shape[1]
    scalars |= gemm.y.stride_arguments("y", "npq", gemm.y.unit)
    scalars |= residual.stride_arguments("r", "npq", residual.unit)
    span = max(gemm.x.span, gemm.y.span, residual.span)
    constants = gemm.epilogue.constants | {
        "C": gemm.C,
        "R": rows.count,
        "R_FIRST": rows.first,
        "R_STEP": rows.step,
        "S": cols.count,
        "S_FIRST": cols.first,
        "S_STEP": cols.step,
        "OFFSET_H": rows.offset,
        "DILATION_H": rows.dilation,
        "OFFSET_W": cols.offset,
        "DILATION_W": cols.dilation,
        "Y_UNIT": gemm.y.unit,
        "RESIDUAL_UNIT": residual.unit,
        "M_UNIT": m_unit,
        "W_TRANSPOSED": gemm.w_transposed,
        "INT64": span >= MIN_ELEMENTS_FOR_INT64,
        "PRECISION": gemm.precision,
        "BLOCK_M": block_m,
        "MORE_M": more_m,
        "BLOCK_K": tile.k,
        "SPLIT_K": tile.split_k,
    }
    return tensors, scalars, constants


def w_descriptor(gemm: ImplicitGemm, filters: int, channels: int) -> Descriptor:
    """Returns the TMA descriptor of the filters.

    Args:
        gemm: What is computed.
        filters: Output channels of a box.
        channels: Reduced channels of a box.
    """
    (K, C, R, S), (k, _, r, s) = gemm.w.shape, gemm.w.strides
    box = (channels, filters) if gemm.w_transposed else (filters, channels)
    return Descriptor((R, S, K, C), (r, s, k, 1), (1, 1, *box))


def x_descriptor(gemm: ImplicitGemm, box: Box | PixelRuns, channels: int) -> Descriptor:
    """Returns the TMA descriptor of x.

    At stride 2 rows and columns are pairs, of which a box takes one parity.

    Args:
        gemm: What is computed.
        box: Pixels of a box.
        channels: Channels of a box.
    """
    (N, C, H, W), (n, _, h, w) = gemm.x.shape, gemm.x.strides
    if gemm.rows.stride == 1:
        return image_descriptor((N, H, W), (n, h, w), C, box, channels)
    halves, steps = (N, H // 2, W // 2), (n, 2 * h, 2 * w)
    pairs = image_descriptor(halves, steps, 2 * C, box, channels)
    return Descriptor((2, *pairs.shape), (h, *pairs.strides), (1, *pairs.block))


def image_descriptor(
    sizes: Image, strides: Image, C: int, box: Box | PixelRuns, channels: int
) -> Descriptor:
    """Returns the TMA descriptor of an image, its dimensions in the box's order.

    Args:
        sizes: Samples, rows and columns.
        strides: Their strides, in elements.
        C: Channels, which come last.
        box: Pixels of a box.
        channels: Channels of a box.
    """
    return Descriptor(
        (*(sizes[dim] for dim in box.order), C),
        (*(strides[dim] for dim in box.order), 1),
        (*box.sizes, channels),
    )
