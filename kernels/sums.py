"""Partial results of a split reduction, added in a fixed order: the same bits every time, without atomics."""

import triton
import triton.language as tl

from .launch import Recipe
from .memory import Memory

BLOCK, SLABS = 256, 16


@triton.jit
def ordered_sum(
    partial, y, bias, pixels, P, Q, M, yn, yp, yq,
    BIAS: tl.constexpr, WIDE: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, SLABS: tl.constexpr,
):  # fmt: skip
    """y[n, p, q, m] = sum over z of partial[z, n p q, m], plus a bias per m."""
    pid = tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)
    e = pid * BLOCK + tl.arange(0, BLOCK)
    inside = e < pixels * M
    slab = tl.arange(0, SLABS)
    total = tl.zeros((BLOCK,), tl.float32)
    for z in range(0, SPLITS, SLABS):
        at = (z + slab)[:, None].to(tl.int64) * (pixels * M) + e[None, :]
        total += tl.sum(tl.load(partial + at, mask=(z + slab < SPLITS)[:, None] & inside[None, :], other=0.0), axis=0)
    m = e % M
    pixel = e // M
    if BIAS:
        total += tl.load(bias + m, mask=inside, other=0.0).to(tl.float32)
    q = pixel % Q
    p = pixel // Q % P
    n = pixel // Q // P
    tl.store(y + n * yn + p * yp + q * yq + m, total.to(y.dtype.element_ty), mask=inside)


def sum_recipe(y: Memory, splits: int, bias: bool, slot: tuple[slice, ...] | None = None, name: str = "y") -> Recipe:
    """Adds ``partial`` (splits, N, P, Q, M) into y (N, M, P, Q), whose channels lie beside each other."""
    N, M, P, Q = y.shape
    n, _, p, q = y.strides
    return Recipe(
        ordered_sum,
        (-(-N * P * Q * M // BLOCK), 1, 1),
        {"partial": "partial", "y": name, "bias": "bias" if bias else name},
        {"pixels": N * P * Q, "P": P, "Q": Q, "M": M, "yn": n, "yp": p, "yq": q},
        {"BIAS": bias, "WIDE": y.spans >= 2**30, "SPLITS": splits, "BLOCK": BLOCK, "SLABS": SLABS},
        4,
        1,
        slots={"y": slot} if slot else {},
    )
