"""Interpolation and padding on shards."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hetconv.comm.rank_group import RankGroup
from hetconv.operators.base import Call
from hetconv.operators.resampling import (
    TAPS,
    CircularPad,
    Interpolate,
    Pad,
    PixelUnshuffle,
)
from hetconv.runtime.het_tensor import HetTensor
from hetconv.runtime.inputs import (
    Args,
    Func,
    Kwargs,
    Runner,
    as_called,
    cropped,
    to_layout,
)
from hetconv.sharding.conv_spec import Span
from hetconv.sharding.layout import Box
from hetconv.sharding.rule import OpSharding

from .pooling import empty_part, own_outputs

MODES = {
    ("linear", 1): "linear",
    ("linear", 2): "bilinear",
    ("linear", 3): "trilinear",
    ("cubic", 2): "bicubic",
}


def interpolate(
    call: Call,
    sharding: OpSharding,
    group: RankGroup,
    func: Func,
    args: Args,
    kwargs: Kwargs,
) -> HetTensor:
    """Runs interpolation.

    Where samples or channels are sharded, it runs as called; where space is, each rank
    computes its outputs from the rows that they read.
    """
    op = call.op
    assert isinstance(op, Interpolate)

    def resized(x: Tensor, dim: int, box: Box) -> Tensor:
        sizes, out = tuple(call.inputs[0].shape), (box.lo[dim], box.hi[dim])
        return _slab(op, x, dim, sizes, out, op.reads(dim, sizes[dim], out)[0])

    return own_outputs(call, sharding, group, func, args, kwargs, resized)


def _slab(
    op: Interpolate, x: Tensor, dim: int, sizes: tuple[int, ...], out: Span, first: int
) -> Tensor:
    """Computes a span of outputs from the rows that they read.

    Args:
        op: the interpolation.
        x: rows of the input.
        dim: the sharded dimension.
        sizes: of the whole input.
        out: span of outputs.
        first: index of the first row of ``x``.
    """
    k = op.factor(dim, sizes[dim])
    if not k and op.filter in ("nearest", "nearest-exact"):
        at = torch.arange(*out, dtype=torch.float64, device=x.device) + (
            0.5 if op.filter == "nearest-exact" else 0
        )
        index = (at * op.ratio(dim, sizes[dim])).long().clamp(
            max=sizes[dim] - 1
        ) - first
        return _by_torch(op, x.index_select(dim, index), dim, 1)
    if not k:
        return _weighted(op, x, dim, sizes[dim], out, first)
    y = _by_torch(op, x, dim, k)
    return cropped(y, dim, (out[0] - k * first, out[1] - k * first))


def _by_torch(op: Interpolate, x: Tensor, dim: int, factor: int) -> Tensor:
    """Returns ``x`` interpolated by torch to ``factor`` times its size along ``dim``."""
    mode: str = MODES.get((op.filter or "", x.dim() - 2), op.filter or "")
    align = op.align_corners if op.filter in ("linear", "cubic") else None
    if op.scales[0] is None:
        size = [*op.shape[2:]]
        size[dim - 2] = factor * x.shape[dim]
        return F.interpolate(x, size, mode=mode, align_corners=align)
    scales = [s or 1.0 for s in op.scales]
    scales[dim - 2] = float(factor)
    return F.interpolate(x, scale_factor=scales, mode=mode, align_corners=align)


def _weighted(
    op: Interpolate, x: Tensor, dim: int, n: int, out: Span, first: int
) -> Tensor:
    """Interpolates linearly or cubically along one dimension, by a sum of weighted taps.

    torch interpolates the other dimensions.
    """
    assert op.filter is not None
    exact = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = _by_torch(op, x, dim, 1)
    at = torch.arange(*out, dtype=exact, device=x.device)
    ratio = op.ratio(dim, n)
    source = at * ratio if op.align_corners else (at + 0.5) * ratio - 0.5
    if op.filter == "linear":
        source = source.clamp(min=0)
    below = source.floor().clamp(max=n - 1)
    t = (source - below).clamp(0, 1)
    weights = (1 - t, t) if op.filter == "linear" else _cubic(t)
    along = [-1 if d == dim else 1 for d in range(x.dim())]
    last = first + x.shape[dim] - 1
    terms = []
    for tap, weight in zip(range(*TAPS[op.filter]), weights, strict=True):
        # Beyond the slab there is the edge, which repeats, or what rounding alone gives a weight.
        index = (below.long() + tap).clamp(first, last) - first
        terms.append(rows.index_select(dim, index) * weight.view(along))
    return sum(terms[1:], terms[0]).to(rows.dtype)


def _cubic(t: Tensor) -> tuple[Tensor, ...]:
    """Returns the weights of four taps at a distance ``t`` beyond the second.

    See Keys, 1981, with a = -0.75.
    """
    a = -0.75

    def near(s: Tensor) -> Tensor:
        return ((a + 2) * s - (a + 3)) * s * s + 1

    def far(s: Tensor) -> Tensor:
        return ((a * s - 5 * a) * s + 8 * a) * s - 4 * a

    return far(t + 1), near(t), near(1 - t), far(2 - t)


def pad(
    call: Call,
    sharding: OpSharding,
    group: RankGroup,
    func: Func,
    args: Args,
    kwargs: Kwargs,
) -> HetTensor:
    """Pads or crops; a side of the sharded dimension by the rank that has it."""
    op, layout = call.op, sharding.output
    assert isinstance(op, Pad)
    assert layout.inner_dim is not None
    x, box, dim = (
        to_layout(call.inputs[0], sharding.input_layouts[0], group),
        layout.boxes[group.rank],
        layout.inner_dim,
    )
    pads, (a, b), held = (
        list(op.pads),
        op.sources(layout)[group.rank],
        sharding.input_layouts[0].boxes[group.rank],
    )
    if pads[dim] != (0, 0) and isinstance(op, CircularPad):
        before, after = (
            to_layout(y, read, group)
            for y, read in zip(call.inputs[1:], sharding.input_layouts[1:], strict=True)
        )
        x, pads[dim] = torch.cat([before, x, after], dim), (0, 0)
    elif pads[dim] != (0, 0):
        pads[dim] = held.lo[dim] - a, b - held.hi[dim]
    if not box.numel:
        return HetTensor.wrap(
            empty_part(x, call, box.shape, func, args, kwargs), layout, group
        )
    given = len(args[1] if len(args) > 1 else kwargs["pad"]) // 2
    flat = [n for side in reversed(pads[len(pads) - given :]) for n in side]
    rest = {k: v for k, v in kwargs.items() if k not in ("input", "pad")}
    return HetTensor.wrap(func(x, flat, *args[2:], **rest), layout, group)


def pixel_unshuffle(
    call: Call,
    sharding: OpSharding,
    group: RankGroup,
    func: Func,
    args: Args,
    kwargs: Kwargs,
) -> HetTensor:
    """Moves blocks of pixels into channels."""
    x = to_layout(call.inputs[0], sharding.input_layouts[0], group)
    shape = sharding.output.boxes[group.rank].shape
    y = (
        as_called(func, args, kwargs)(x)
        if x.numel()
        else empty_part(x, call, shape, func, args, kwargs)
    )
    return HetTensor.wrap(y, sharding.output, group)


RUN: dict[type[Any], Runner] = {
    CircularPad: pad,
    Interpolate: interpolate,
    Pad: pad,
    PixelUnshuffle: pixel_unshuffle,
}
