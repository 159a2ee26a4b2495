"""Interpolation and padding on shards."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hetconv.operators.resampling import (
    TAPS,
    CircularPad,
    Interpolate,
    Pad,
    PixelUnshuffle,
)
from hetconv.runtime.het_tensor import HetTensor
from hetconv.runtime.inputs import cropped
from hetconv.sharding.conv_spec import Span
from hetconv.sharding.layout import Box

from .as_called import Runner, ShardedCall
from .pooling import empty_shard, local_outputs

MODES = {
    ("linear", 1): "linear",
    ("linear", 2): "bilinear",
    ("linear", 3): "trilinear",
    ("cubic", 2): "bicubic",
}


def interpolate(c: ShardedCall) -> HetTensor:
    """Interpolates the local shard.

    If a spatial dimension is sharded, the local outputs are computed from the slab of
    the input that they read.
    """
    op = c.call.op
    assert isinstance(op, Interpolate)

    def resize(x: Tensor, dim: int, box: Box) -> Tensor:
        sizes, out = tuple(c.call.inputs[0].shape), (box.lo[dim], box.hi[dim])
        return _slab(op, x, dim, sizes, out, op.reads(dim, sizes[dim], out)[0])

    return local_outputs(c, resize)


def _slab(
    op: Interpolate, x: Tensor, dim: int, sizes: tuple[int, ...], out: Span, first: int
) -> Tensor:
    """Computes the output span ``out`` from the slab ``x``, which begins at ``first``."""
    k = op.factor(dim, sizes[dim])
    if not k and op.filter in ("nearest", "nearest-exact"):
        centre = 0.5 if op.filter == "nearest-exact" else 0
        at = torch.arange(*out, dtype=torch.float64, device=x.device) + centre
        source = (at * op.ratio(dim, sizes[dim])).long().clamp(max=sizes[dim] - 1)
        return _by_torch(op, x.index_select(dim, source - first), dim, 1)
    if not k:
        return _weighted(op, x, dim, sizes[dim], out, first)
    y = _by_torch(op, x, dim, k)
    return cropped(y, dim, (out[0] - k * first, out[1] - k * first))


def _by_torch(op: Interpolate, x: Tensor, dim: int, factor: int) -> Tensor:
    """Interpolates ``x`` to ``factor`` times its size along ``dim``, by torch.

    The other dimensions are interpolated as in the call.
    """
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
    """Interpolates linearly or cubically by a factor that is not an integer.

    Torch interpolates the other dimensions; then each output along ``dim`` is a
    weighted sum of its taps.
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
        # A tap beyond the slab is the repeated edge, or has a weight from rounding alone.
        index = (below.long() + tap).clamp(first, last) - first
        terms.append(rows.index_select(dim, index) * weight.view(along))
    return sum(terms[1:], terms[0]).to(rows.dtype)


def _cubic(t: Tensor) -> tuple[Tensor, ...]:
    """Returns the weights of four taps at a distance ``t`` beyond the second one.

    See Keys (1981), "Cubic convolution interpolation", with a = -0.75.
    """
    a = -0.75

    def near(s: Tensor) -> Tensor:
        return ((a + 2) * s - (a + 3)) * s * s + 1

    def far(s: Tensor) -> Tensor:
        return ((a * s - 5 * a) * s + 8 * a) * s - 4 * a

    return far(t + 1), near(t), near(1 - t), far(2 - t)


def pad(c: ShardedCall) -> HetTensor:
    """Pads the local shard; a side of the sharded dimension on the rank that holds it."""
    op, layout, read = c.call.op, c.output, c.sharding.input_layouts[0]
    assert isinstance(op, Pad)
    assert layout.inner_dim is not None
    x = c.local_input()
    dim, pads = layout.inner_dim, list(op.pads)
    if pads[dim] != (0, 0):
        if isinstance(op, CircularPad):
            before, after = c.local_inputs(start=1)
            x, pads[dim] = torch.cat([before, x, after], dim), (0, 0)
        else:
            first, last = op.sources(layout)[c.group.rank]
            held = read.boxes[c.group.rank]
            pads[dim] = held.lo[dim] - first, last - held.hi[dim]
    if not c.box.numel:
        return c.wrap(empty_shard(x, c))
    given = len(c.args[1] if len(c.args) > 1 else c.kwargs["pad"]) // 2
    flat = [n for side in reversed(pads[len(pads) - given :]) for n in side]
    rest = {k: v for k, v in c.kwargs.items() if k not in ("input", "pad")}
    return c.wrap(c.func(x, flat, *c.args[2:], **rest))


def pixel_unshuffle(c: ShardedCall) -> HetTensor:
    """Runs `torch.nn.functional.pixel_unshuffle` on the local shard."""
    x = c.local_input()
    return c.wrap(c.on(x) if x.numel() else empty_shard(x, c))


RUN: dict[type[Any], Runner] = {
    CircularPad: pad,
    Interpolate: interpolate,
    Pad: pad,
    PixelUnshuffle: pixel_unshuffle,
}
