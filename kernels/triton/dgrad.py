"""Input gradient as implicit GEMMs, one for each phase of the stride.

dx[n, c, h, w] = sum over k, r, s of w[k, c, r, s] g[n, k, p, q]
    where h = p stride + r dilation - pad, and w likewise of q and s

Input rows a, a + stride, a + 2 stride, ... are one phase: the filter rows that reach
them are evenly spaced, and so are the output rows that they come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import gcd

from hetconv.kernels.launch import Slices, StridedLayout
from hetconv.sharding.conv_spec import ITEMSIZE, ConvSpec, Window

from .fprop import simplify
from .gemm_launch import ImplicitGemm, Taps


@dataclass(frozen=True)
class Phase:
    """Every stride-th row and column of dx, as an implicit GEMM of g.

    Attributes:
        slices: Part of dx.
        gemm: What computes it; None where no filter tap reads the rows.
    """

    slices: Slices
    gemm: ImplicitGemm | None


def phases(
    spec: ConvSpec,
    g: StridedLayout,
    w: StridedLayout,
    dx: StridedLayout,
    precision: str,
) -> list[Phase]:
    """Returns the phases of an input gradient, which cover dx.

    Args:
        spec: The convolution.
        g: Layout of the gradient of the result, (N, K, P, Q).
        w: Layout of the filters, (K, C / groups, R, S).
        dx: Layout of the input gradient, (N, C, H, W).
        precision: "tf32" or "ieee", how float32 is multiplied.
    """
    _, _, H, W = dx.shape
    stride_h, stride_w = spec.stride
    found = []
    for a, b in product(range(min(stride_h, H)), range(min(stride_w, W))):
        slices = (
            slice(None),
            slice(None),
            slice(a, None, stride_h),
            slice(b, None, stride_w),
        )
        rows, cols = (
            taps_of_phase(window, first)
            for window, first in zip(spec.windows, (a, b), strict=True)
        )
        gemm = None
        if rows.count and cols.count:
            part = _every(dx, (a, b), (stride_h, stride_w))
            gemm = ImplicitGemm(
                spec.C // spec.groups,
                spec.K // spec.groups,
                spec.groups,
                rows,
                cols,
                g,
                w,
                part,
                precision,
                w_transposed=True,
            )
        found.append(Phase(slices, simplify(gemm) if gemm is not None else None))
    return found


def _every(
    dx: StridedLayout, first: tuple[int, int], stride: tuple[int, int]
) -> StridedLayout:
    """Layout of dx[:, :, a::stride_h, b::stride_w]."""
    (N, C, H, W), (n, c, h, w) = dx.shape, dx.strides
    a, b = first
    offset = (a * h + b * w) * ITEMSIZE[dx.dtype]
    return StridedLayout(
        (N, C, -(-(H - a) // stride[0]), -(-(W - b) // stride[1])),
        (n, c, h * stride[0], w * stride[1]),
        dx.dtype,
        gcd(dx.alignment, offset),
    )


def taps_of_phase(window: Window, a: int) -> Taps:
    """Returns the filter rows that reach input rows a, a + stride, a + 2 stride, ...

    As taps they read the output rows that these come from.

    Args:
        window: Kernel, stride, dilation and padding of one dimension.
        a: First input row of the phase, less than the stride.
    """
    stride, dilation = window.stride, window.dilation
    distances = [a + window.pad_lo - r * dilation for r in range(window.kernel)]
    hits = [r for r, distance in enumerate(distances) if distance % stride == 0]
    if not hits:
        return Taps(0)
    step = stride // gcd(stride, dilation)
    return Taps(
        len(hits),
        first=hits[0],
        step=step,
        offset=distances[hits[0]] // stride,
        dilation=-(step * dilation // stride),
    )
