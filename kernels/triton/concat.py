"""Slices of channels that came from several devices, as one image: concatenated and
finished in one pass, and back.

y[n, k, p, q] = activation(scale[k] part[n, k, p, q] + shift[k] + residual[n, k, p, q]),
the parts side by side along k.
"""

from __future__ import annotations

from itertools import accumulate
from math import gcd
from typing import Any

import triton
import triton.language as tl

from hetconv.kernels.epilogue import Finish
from hetconv.kernels.launch import HUGE, Memory, Recipe
from hetconv.sharding.conv_spec import ITEMSIZE

from .activations import activated, activated_adjoint

Names = dict[str, str | tuple[str, ...]]
ELEMENTS, WARPS = (
    8192,
    8,
)  # of a program: 64 bytes of each operand per thread in half precision


@triton.jit
def _loaded(
    parts,
    pixel,
    j,
    u,
    inside,
    widths,
    STARTS: tl.constexpr,
    UNIT: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """The parts' numbers in float32: j counts blocks of UNIT channels, each of which
    lies within one part.
    """
    z = tl.zeros(SHAPE, tl.float32)
    for i in tl.static_range(len(STARTS) - 1):
        here = inside & (j >= STARTS[i]) & (j < STARTS[i + 1])
        x = tl.load(
            parts[i] + (pixel * widths[i] + j - STARTS[i]) * UNIT + u,
            mask=here,
            other=0.0,
        )
        z = tl.where(here, x.to(tl.float32), z)  # a sum would make 0 of -0
    return z


@triton.jit
def concat(
    parts,
    y,
    scale,
    shift,
    residual,
    pixels,
    P,
    Q,
    widths,
    yn,
    yp,
    yq,
    rn,
    rp,
    rq,
    STARTS: tl.constexpr,
    UNIT: tl.constexpr,
    YU: tl.constexpr,
    RU: tl.constexpr,
    SCALED: tl.constexpr,
    ADDED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SLOPE: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """BLOCK_N pixels by BLOCK_M blocks of UNIT channels. ``STARTS`` and ``widths`` (of
    a pixel) count in UNIT.
    """
    block = tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)
    pixel = (block * BLOCK_N + tl.arange(0, BLOCK_N))[:, None, None]
    j = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M))[None, :, None]
    u = tl.arange(0, UNIT)[None, None, :]
    inside = (pixel < pixels) & (j < STARTS[len(STARTS) - 1])
    z = _loaded(
        parts, pixel, j, u, inside, widths, STARTS, UNIT, (BLOCK_N, BLOCK_M, UNIT)
    )
    q = pixel % Q
    p = pixel // Q % P
    n = pixel // Q // P
    k = j * UNIT + u
    if SCALED:
        z = z * tl.load(scale + k, mask=inside, other=0.0) + tl.load(
            shift + k, mask=inside, other=0.0
        )
    if ADDED:
        z += tl.load(
            residual + (n * rn + p * rp + q * rq) * RU + k, mask=inside, other=0.0
        ).to(tl.float32)
    z = activated(z, ACTIVATION, SLOPE)
    tl.store(
        y + (n * yn + p * yp + q * yq) * YU + k, z.to(y.dtype.element_ty), mask=inside
    )


@triton.jit
def split(
    parts,
    gradients,
    g,
    dr,
    scale,
    shift,
    residual,
    pixels,
    P,
    Q,
    widths,
    gn,
    gp,
    gq,
    rn,
    rp,
    rq,
    STARTS: tl.constexpr,
    UNIT: tl.constexpr,
    GU: tl.constexpr,
    RU: tl.constexpr,
    SCALED: tl.constexpr,
    ADDED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SLOPE: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """The adjoint: of g, the gradients of every part, packed, and dr, packed, of the
    residual. z is computed again.
    """
    block = tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)
    pixel = (block * BLOCK_N + tl.arange(0, BLOCK_N))[:, None, None]
    j = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M))[None, :, None]
    u = tl.arange(0, UNIT)[None, None, :]
    inside = (pixel < pixels) & (j < STARTS[len(STARTS) - 1])
    q = pixel % Q
    p = pixel // Q % P
    n = pixel // Q // P
    k = j * UNIT + u
    d = tl.load(g + (n * gn + p * gp + q * gq) * GU + k, mask=inside, other=0.0).to(
        tl.float32
    )
    if ACTIVATION != "":
        z = _loaded(
            parts, pixel, j, u, inside, widths, STARTS, UNIT, (BLOCK_N, BLOCK_M, UNIT)
        )
        if SCALED:
            z = z * tl.load(scale + k, mask=inside, other=0.0) + tl.load(
                shift + k, mask=inside, other=0.0
            )
        if ADDED:
            z += tl.load(
                residual + (n * rn + p * rp + q * rq) * RU + k, mask=inside, other=0.0
            ).to(tl.float32)
        d = activated_adjoint(d, z, ACTIVATION, SLOPE)
    if ADDED:
        tl.store(
            dr + pixel * STARTS[len(STARTS) - 1] * UNIT + k,
            d.to(dr.dtype.element_ty),
            mask=inside,
        )
    if SCALED:
        d *= tl.load(scale + k, mask=inside, other=0.0)
    for i in tl.static_range(len(STARTS) - 1):
        here = inside & (j >= STARTS[i]) & (j < STARTS[i + 1])
        at = (pixel * (STARTS[i + 1] - STARTS[i]) + j - STARTS[i]) * UNIT + u
        tl.store(gradients[i] + at, d.to(g.dtype.element_ty), mask=here)


def concat_recipe(
    parts: tuple[Memory, ...], y: Memory, residual: Memory | None, finish: Finish
) -> Recipe:
    """Tensors ``part0``, ``part1``, ..., each with its pixels at one stride, into y (N,
    K, P, Q).
    """
    unit = _unit(parts, y, residual)
    n, _, p, q = y.strides
    common = _common(parts, y, residual, finish, unit)
    names: Names = {"parts": _names("part", parts), "y": "y"}
    return Recipe(
        concat,
        _grid(common[1], y),
        names | finish.tensors(residual, "y"),
        {"yn": n // y.unit, "yp": p // y.unit, "yq": q // y.unit} | common[0],
        {"YU": y.unit} | common[1],
        WARPS,
        1,
    )


def split_recipe(
    parts: tuple[Memory, ...], g: Memory, residual: Memory | None, finish: Finish
) -> Recipe:
    """g (N, K, P, Q) into packed tensors ``gradient0``, ``gradient1``, ..., and ``dr``
    where there is a residual.
    """
    unit = _unit(parts, g, residual)
    n, _, p, q = g.strides
    common = _common(parts, g, residual, finish, unit)
    names: Names = {
        "parts": _names("part", parts),
        "gradients": _names("gradient", parts),
        "g": "g",
    }
    return Recipe(
        split,
        _grid(common[1], g),
        names | {"dr": "dr" if residual else "g"} | finish.tensors(residual, "g"),
        {"gn": n // g.unit, "gp": p // g.unit, "gq": q // g.unit} | common[0],
        {"GU": g.unit} | common[1],
        WARPS,
        1,
    )


def _common(
    parts: tuple[Memory, ...],
    y: Memory,
    residual: Memory | None,
    finish: Finish,
    unit: int,
) -> tuple[dict[str, Any], dict[str, Any]]:
    (N, K, P, Q), added = y.shape, residual or y
    n, _, p, q = added.strides
    starts = tuple(
        a // unit for a in accumulate((m.shape[1] for m in parts), initial=0)
    )
    blocks = min(triton.next_power_of_2(K // unit), 32)
    scalars = {
        "pixels": N * P * Q,
        "P": P,
        "Q": Q,
        "widths": tuple((m.step or 0) // unit for m in parts),
        "rn": n // added.unit,
        "rp": p // added.unit,
        "rq": q // added.unit,
    }
    constants = {
        "STARTS": starts,
        "UNIT": unit,
        "RU": added.unit,
        "SCALED": finish.scaled,
        "ADDED": residual is not None,
        "ACTIVATION": finish.activation,
        "SLOPE": finish.slope,
        "BLOCK_N": ELEMENTS // (blocks * unit),
        "BLOCK_M": blocks,
        "WIDE": max(N * K * P * Q, *(m.spans for m in (*parts, y, added))) >= HUGE,
    }
    return scalars, constants


def _unit(parts: tuple[Memory, ...], y: Memory, residual: Memory | None) -> int:
    """Channels that lie side by side in one part, at most 16 bytes, from an aligned address on."""
    sizes = [v for m in parts if m.shape[1] for v in (m.shape[1], m.step or 0)]
    return gcd(
        16 // ITEMSIZE[y.dtype], y.unit, *sizes, *([residual.unit] if residual else [])
    )


def _grid(constants: dict[str, Any], y: Memory) -> tuple[int, int, int]:
    N, _, P, Q = y.shape
    return (
        -(-N * P * Q // constants["BLOCK_N"]),
        -(-constants["STARTS"][-1] // constants["BLOCK_M"]),
        1,
    )


def _names(name: str, parts: tuple[Memory, ...]) -> tuple[str, ...]:
    return tuple(f"{name}{i}" for i in range(len(parts)))
