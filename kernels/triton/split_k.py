"""Sum of the partial results of a split reduction, in a fixed order, with an epilogue.

y[n, p, q, m] = activation(scale[m] sum over z of partial[z, n, p, q, m] + shift[m]
                           + residual[n, p, q, m])

There are no atomics, so that results have the same bits every time.
"""

import triton
import triton.language as tl

from hetconv.kernels.epilogue import NO_EPILOGUE, EpilogueSpec
from hetconv.kernels.launch import (
    MIN_ELEMENTS_FOR_INT64,
    Launch,
    Slices,
    StridedLayout,
)

from .device_functions import activate, load_float32, pixel_position, scale_and_shift

LOAD_ELEMENTS = 4096  # of a program at a time: 128 bytes of partial results a thread
MAX_BLOCK_SPLITS = 16  # of them of one result
MIN_BLOCK = 128  # results of a program
PROGRAMS = 264  # that occupy the largest GPU: blocks are smaller where there were fewer
WARPS = 4


@triton.jit
def sum_partials(
    partial, y, scale, shift, residual,
    pixels, P, Q, M,
    stride_yn, stride_yp, stride_yq,
    stride_rn, stride_rp, stride_rq,
    HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr, SLOPE: tl.constexpr, INT64: tl.constexpr,
    SPLIT_K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """Computes BLOCK elements of y from the partial sums of SPLIT_K programs.

    ``partial`` points to a contiguous float32 tensor (SPLIT_K, pixels, M), of which
    BLOCK_SPLITS sums of each result are loaded at a time, in whole lines; here M and
    strides count elements. Other parameters are explained in `implicit_gemm`.
    """
    pid = tl.program_id(0).to(tl.int64) if INT64 else tl.program_id(0)
    e = pid * BLOCK + tl.arange(0, BLOCK)
    inside = e < pixels * M
    split = tl.arange(0, BLOCK_SPLITS)
    total = tl.zeros((BLOCK,), tl.float32)
    for z in range(0, SPLIT_K, BLOCK_SPLITS):
        row = (z + split).to(tl.int64) if INT64 else z + split
        at = row[:, None] * (pixels * M) + e[None, :]
        there = (z + split < SPLIT_K)[:, None] & inside[None, :]
        total += tl.sum(tl.load(partial + at, mask=there, other=0.0), axis=0)
    m = e % M
    pixel = e // M
    total = scale_and_shift(total, scale, shift, m, inside, HAS_SCALE, HAS_SHIFT)
    n, p, q = pixel_position(pixel, P, Q)
    if HAS_RESIDUAL:
        r_block = residual + n * stride_rn + p * stride_rp + q * stride_rq + m
        total += load_float32(r_block, inside)
    total = activate(total, ACTIVATION, SLOPE)
    y_block = y + n * stride_yn + p * stride_yp + q * stride_yq + m
    tl.store(y_block, total.to(y.dtype.element_ty), mask=inside)


def sum_launch(
    y: StridedLayout,
    split_k: int,
    epilogue: EpilogueSpec = NO_EPILOGUE,
    slices: Slices | None = None,
    name: str = "y",
) -> Launch:
    """Returns the launch that adds ``partial`` (split_k, N, P, Q, M) into y.

    Args:
        y: Layout of the result (N, M, P, Q), whose channels lie side by side.
        split_k: Number of partial sums.
        epilogue: What is applied to the sum.
        slices: Part of the tensor that receives the result, if not all.
        name: Name of the tensor that receives the result.
    """
    N, M, P, Q = y.shape
    residual = epilogue.residual or y
    scalars = {"pixels": N * P * Q, "P": P, "Q": Q, "M": M}
    scalars |= y.stride_arguments("y", "npq") | residual.stride_arguments("r", "npq")
    results = N * P * Q * M
    span = max(y.span, residual.span, split_k * results)
    block_splits = splits_at_a_time(split_k)
    block = LOAD_ELEMENTS // block_splits
    while block > MIN_BLOCK and results < PROGRAMS * block:
        block //= 2
    constants = epilogue.constants | {
        "INT64": span >= MIN_ELEMENTS_FOR_INT64,
        "SPLIT_K": split_k,
        "BLOCK": block,
        "BLOCK_SPLITS": block_splits,
    }
    return Launch(
        sum_partials,
        (-(-results // block), 1, 1),
        {"partial": "partial", "y": name} | epilogue.tensors(name),
        scalars,
        constants,
        WARPS,
        slices={"y": slices} if slices else {},
    )


def splits_at_a_time(split_k: int) -> int:
    """Returns the partial sums of a result that are loaded at a time, a power of two.

    It is the largest of whose places at most a quarter stay empty.

    Args:
        split_k: Number of partial sums.
    """
    sizes = [1 << i for i in range(MAX_BLOCK_SPLITS.bit_length())]
    places = {size: -(-split_k // size) * size for size in sizes}
    return max(size for size in sizes if 3 * places[size] <= 4 * split_k)
