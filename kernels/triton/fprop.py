"""Forward pass as an implicit GEMM.

y[n, k, p, q] = bias[k] + sum over r, s, c of
    w[k, c, r, s] x[n, c, p stride + r dilation - pad, q stride + s dilation - pad]
"""

from __future__ import annotations

from dataclasses import replace

from hetconv.kernels.epilogue import NO_EPILOGUE, EpilogueSpec
from hetconv.kernels.launch import StridedLayout
from hetconv.sharding.conv_spec import ConvSpec

from .gemm_launch import ImplicitGemm, Taps

MAX_PACKED_CHANNELS = 64


def forward(
    spec: ConvSpec,
    x: StridedLayout,
    w: StridedLayout,
    y: StridedLayout,
    precision: str,
    epilogue: EpilogueSpec = NO_EPILOGUE,
) -> ImplicitGemm:
    """Returns the forward pass of a convolution, in its simplest form.

    Args:
        spec: The convolution.
        x: Layout of the input.
        w: Layout of the filters.
        y: Layout of the result.
        precision: "tf32" or "ieee", how float32 is multiplied.
        epilogue: What is applied to the result.
    """
    return pack_channels(simplify(direct(spec, x, w, y, precision, epilogue)))


def direct(
    spec: ConvSpec,
    x: StridedLayout,
    w: StridedLayout,
    y: StridedLayout,
    precision: str,
    epilogue: EpilogueSpec,
) -> ImplicitGemm:
    """Returns the forward pass of a convolution, as its definition is.

    Args:
        spec: See `forward`, as are the other arguments.
    """
    rows, cols = (
        Taps(v.kernel, stride=v.stride, offset=-v.pad_lo, dilation=v.dilation)
        for v in spec.windows
    )
    groups = spec.groups
    return ImplicitGemm(
        spec.K // groups,
        spec.C // groups,
        groups,
        rows,
        cols,
        x,
        w,
        y,
        precision,
        epilogue=epilogue,
    )


def simplify(gemm: ImplicitGemm) -> ImplicitGemm:
    """Returns the same sums over a simpler image, for filters of one tap.

    One tap reads a strided view of the input, and pixels at one stride are one row.
    """
    (N, C, H, W), (_, _, P, Q) = gemm.x.shape, gemm.y.shape
    rows, cols, epilogue = gemm.rows, gemm.cols, gemm.epilogue
    is_one_tap = (rows.count, cols.count, rows.offset, cols.offset) == (1, 1, 0, 0)
    if not is_one_tap or (P - 1) * rows.stride >= H or (Q - 1) * cols.stride >= W:
        return gemm
    n, c, h, w = gemm.x.strides
    strides = (n, c, h * rows.stride, w * cols.stride)
    x, y = gemm.x._replace(shape=(N, C, P, Q), strides=strides), gemm.y
    images = [x, y] + ([epilogue.residual] if epilogue.residual is not None else [])
    if all(image.is_one_row for image in images):
        x, y, *residual = (image.as_one_row() for image in images)
        epilogue = epilogue._replace(residual=residual[0] if residual else None)
    return replace(
        gemm,
        x=x,
        y=y,
        epilogue=epilogue,
        rows=replace(rows, stride=1),
        cols=replace(cols, stride=1),
    )


def pack_channels(gemm: ImplicitGemm) -> ImplicitGemm:
    """Returns the same sums with a filter row as one tap, where channels are few.

    The S * C numbers under a filter row lie side by side in the image and in the filter,
    so that of an image's 3 channels 7 taps of 21 numbers replace 49 of 3.
    """
    (N, C, H, W), (n, _, h, w), cols = gemm.x.shape, gemm.x.strides, gemm.cols
    adjoin = w == C and gemm.w.strides[3] == C and cols.dilation == 1
    are_few = C % 8 != 0 and C * cols.count <= MAX_PACKED_CHANNELS
    if not adjoin or not are_few or cols.count == 1 or gemm.groups > 1:
        return gemm
    return replace(
        gemm,
        C=C * cols.count,
        cols=Taps(1, stride=cols.stride * C, offset=cols.offset * C),
        x=gemm.x._replace(shape=(N, 1, H, W * C), strides=(n, 1, h, 1)),
        packed=True,
    )
