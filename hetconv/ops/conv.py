"""Convolutions, transposed convolutions and linear layers on shards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hetconv import kernels
from hetconv.comm.rank_group import RankGroup
from hetconv.kernels import call_layer
from hetconv.kernels.aten import overruns
from hetconv.kernels.epilogue import per_channel
from hetconv.operators.base import Call, WeightedCall
from hetconv.operators.conv_transpose import ConvTranspose
from hetconv.runtime.gradient_sync import synced_grad
from hetconv.runtime.het_tensor import HetTensor, gather
from hetconv.runtime.inputs import (
    Args,
    Func,
    Kwargs,
    Runner,
    autocast,
    cached_sharding,
    cropped,
    empty_output,
    layout_of,
    to_layout,
    uncounted,
)
from hetconv.sharding.conv_geometry import (
    Geometry,
    group_geometry,
    slab_geometry,
    spatial_geometry,
)
from hetconv.sharding.conv_spec import Span
from hetconv.sharding.layer_rules import Conv, Linear, exchanges_halos
from hetconv.sharding.layout import Box, Layout
from hetconv.sharding.param_shards import ParamShards
from hetconv.sharding.rule import OpSharding
from hetconv.sharding.split import Split

from .deferred import DeferredConv, may_defer, version
from .halo_exchange import LocalConv, computed


class TorchCall(NamedTuple):
    """A call of one of torch's own convolutions.

    Attributes:
        conv: the function.
        args: its arguments after input, weight and bias.
    """

    conv: Callable[..., Tensor]
    args: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class ConvCase:
    """How a convolution runs on inputs of one layout.

    Attributes:
        src: layout of the input.
        op: the convolution.
        sharding: what it reads, and the layout of its output.
        held: shards of its parameters.
        geo: geometry of this rank's computation; None where filters of a grouped
            convolution are split.
        is_local: whether the rank's shard is read as it is, possibly with halos.
        torchs: one call of torch that computes this rank's part, if there is one.
    """

    src: Layout
    op: Conv
    sharding: OpSharding
    held: Mapping[str, ParamShards]
    geo: Geometry | None
    is_local: bool = False
    torchs: TorchCall | None = None


def conv_case(op: Conv, src: Layout, split: Split, group: RankGroup) -> ConvCase:
    """Returns how a convolution runs on inputs of this layout.

    Args:
        op: the convolution.
        src: layout of the input.
        split: how the layer is split.
        group: the ranks.
    """
    split = op.canonical(split)
    sharding, held = (
        cached_sharding(op, (src,), split),
        op.param_shards(split, group.size),
    )
    if split.kind == "replicate":
        whole = Layout.replicated(op.spec.x_shape, 1)
        geo = slab_geometry(op, whole, Split("filter", (op.spec.K,)), 0)
        return ConvCase(
            src, op, sharding, held, geo, False, _torchs(geo, whole.boxes[0])
        )
    if split.kind == "filter" and op.spec.groups > 1:
        return ConvCase(src, op, sharding, held, None)
    if exchanges_halos(op, src, split):
        geo = spatial_geometry(op, src, split, group.rank)
        return ConvCase(
            src, op, sharding, held, geo, True, _torchs(geo, src.boxes[group.rank])
        )
    geo, (read,) = slab_geometry(op, src, split, group.rank), sharding.input_layouts
    stays = src.kind == "sharded" and src.boxes == read.boxes
    return ConvCase(
        src, op, sharding, held, geo, stays, _torchs(geo, read.boxes[group.rank])
    )


def _torchs(geo: Geometry, read: Box) -> TorchCall | None:
    """Returns torch's call for this rank's part, if one call computes it.

    There is none where something is sent, is empty, or is padded on one side only, nor where
    `aten` has a computation of its own.
    """
    s, own = geo.op.spec, geo.own
    if (
        own is None
        or geo.held
        or not (geo.covers and geo.adds_bias and read.numel and prod(geo.y_shape))
    ):
        return None
    whole = own.rows == (read.lo[geo.dim], read.hi[geo.dim]) and own.taps == (
        0,
        s.kernel[geo.dim - 2],
    )
    padding = geo.padding(own)
    if (
        not whole or any(lo != hi for lo, hi in padding) or geo.y_shape[-1] == 1
    ):  # see `aten` of one column
        return None
    if overruns((geo.y_shape[1], read.shape[1] // geo.groups, *s.kernel), s.stride):
        return None
    conv = (torch.conv1d, torch.conv2d, torch.conv3d)[s.spatial_dims - 1]
    return TorchCall(
        conv, (s.stride, tuple(lo for lo, _ in padding), s.dilation, geo.groups)
    )


def convolution(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    way: ConvCase,
    group: RankGroup,
    followers: tuple[str, ...] = (),
    chunks: int = 1,
) -> Tensor:
    """Runs a convolution of any rank under a split.

    Args:
        x: the input.
        w: what this rank holds of the weight.
        b: what this rank holds of the bias.
        way: see `conv_case`.
        group: the ranks.
        followers: the functions that alone will be called on the result. Without autograd
            the convolution is deferred, to compute them in its epilogue.
        chunks: in which the batch of a result that is sharded over channels is gathered.

    Returns:
        A HetTensor, or a plain tensor where every rank computed the whole.
    """
    step, geo = way.sharding, way.geo
    if step.output.kind == "replicated":
        assert geo is not None
        return _apply(gather(x, images=True), w, b, geo, group, way.torchs)
    if step.partial_grads and torch.is_grad_enabled():
        w = synced_grad(group, w, way.held["weight"])
        b = synced_grad(group, b, way.held["bias"]) if b is not None else None
    local = (
        x.local
        if way.is_local and isinstance(x, HetTensor)
        else to_layout(x, step.input_layouts[0], group)
    )
    if geo is None:
        return HetTensor.wrap(
            _grouped(local, w, b, way.op, step.output, group), step.output, group
        )
    if (followers or chunks > 1) and step.output.kind == "sharded" and may_defer(x):
        local, w, b = autocast(local, w, b)
        waiting = DeferredConv(
            local, w, b, geo, step.output, group, followers, chunks, seen=version(local)
        )
        return HetTensor.deferred(
            waiting, step.output, waiting.x.dtype, waiting.x.device, group
        )
    return HetTensor.made(
        _apply(local, w, b, geo, group, way.torchs), step.output, group
    )


def _apply(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    geo: Geometry,
    group: RankGroup,
    torchs: TorchCall | None,
) -> Tensor:
    if torchs is not None and kernels.only_aten():  # it brings its backward, and casts
        return kernels.call_layer(torchs.conv, x, w, b, *torchs.args)
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        x, w, b = autocast(x, w, b)
        with torch.autocast(kind, enabled=False):
            return LocalConv.apply(x, w, b, geo, group)  # type: ignore[no-any-return]
    if not torch.is_grad_enabled():
        return computed(x, w, b, geo, group)[0]
    return LocalConv.apply(x, w, b, geo, group)  # type: ignore[no-any-return]


def _grouped(
    x: Tensor, w: Tensor, b: Tensor | None, op: Conv, y: Layout, group: RankGroup
) -> Tensor:
    """Computes this rank's filters of a grouped convolution.

    They are part of a first group, whole groups, and part of a last one.
    """
    s = op.spec
    k_lo, k_hi = y.boxes[group.rank].lo[1], y.boxes[group.rank].hi[1]
    per_k, per_c, first = (
        s.K // s.groups,
        s.C // s.groups,
        op.group_span((k_lo, k_hi))[0],
    )
    cuts = sorted(
        {
            k_lo,
            k_hi,
            *(
                c
                for c in (-(-k_lo // per_k) * per_k, k_hi // per_k * per_k)
                if k_lo < c < k_hi
            ),
        }
    )
    outs = []
    for a, z in itertools.pairwise(cuts) if k_lo < k_hi else [(k_lo, k_hi)]:
        g0, g1 = op.group_span((a, z))
        x_run = x[:, (g0 - first) * per_c : (g1 - first) * per_c]
        geo = group_geometry(op, len(x), z - a, max(g1 - g0, 1))
        rows = slice(a - k_lo, z - k_lo)
        outs.append(
            _apply(x_run, w[rows], b[rows] if b is not None else None, geo, group, None)
        )
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1)


class _GradientOnly(torch.autograd.Function):
    """Zeros in the place of a bias that another rank adds.

    The gradient is that of the bias that is added. A rank holds all of the bias or none.
    """

    @staticmethod
    def forward(ctx: Any, b: Tensor, features: int) -> Tensor:
        ctx.held = len(b)
        return b.new_zeros(features)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return uncounted(g[: ctx.held]), None


def linear(
    x: Tensor, w: Tensor, b: Tensor | None, op: Linear, split: Split, group: RankGroup
) -> Tensor:
    """Runs a linear layer under a split.

    Args:
        x: the input.
        w: what this rank holds of the weight.
        b: what this rank holds of the bias.
        op: the layer.
        split: how it is split.
        group: the ranks.

    Returns:
        A HetTensor, or for ``replicate`` a plain tensor.
    """
    if split.kind == "replicate":
        return _linear(gather(x), w, b, op.features)
    sharding, held = (
        op.sharding((layout_of(x, group),), split),
        op.param_shards(split, group.size),
    )
    if sharding.partial_grads:
        w = synced_grad(group, w, held["weight"])
        b = synced_grad(group, b, held["bias"]) if b is not None else None
    elif sharding.output.kind == "replicated" and not held["weight"].is_replicated:
        op.check(
            split, group.size
        )  # refuses an input without the dimension that is cut: all would need the weight
    # Of a partial output one summand holds the bias; who has it computes its gradient:
    # all have the cotangent.
    adds_bias = split.kind != "channel" or group.rank == split.peers(group.rank)[0]
    features = sharding.output.boxes[group.rank].shape[-1]
    y = _linear(
        to_layout(x, sharding.input_layouts[0], group), w, b, features, adds_bias
    )
    return HetTensor.wrap(y, sharding.output, group)


def _linear(
    x: Tensor, w: Tensor, b: Tensor | None, features: int, adds_bias: bool = True
) -> Tensor:
    if w.shape != (features, x.shape[-1]):  # a rank without rows holds no weight
        return empty_output((*x.shape[:-1], features), *autocast(x, w, b))
    if b is not None and not adds_bias:
        b = (
            _GradientOnly.apply(b, features)
            if b.requires_grad and torch.is_grad_enabled()
            else None
        )
    return call_layer(F.linear, x, w, b)


def conv_transpose(
    call: Call,
    sharding: OpSharding,
    group: RankGroup,
    func: Func,
    args: Args,
    kwargs: Kwargs,
) -> HetTensor:
    """Runs a transposed convolution on shards.

    Each rank computes its outputs from all inputs that contribute to them, and crops the
    outputs of other ranks.
    """
    assert isinstance(call, WeightedCall)
    op = call.op
    assert isinstance(op, ConvTranspose)
    assert call.weight is not None
    x, own = (
        to_layout(call.inputs[0], sharding.input_layouts[0], group),
        sharding.output.boxes[group.rank],
    )
    w = synced_grad(group, gather(call.weight))
    b = synced_grad(group, gather(call.bias)) if call.bias is not None else None
    if not (x.numel() and own.numel):  # the graph still reaches every tensor
        y = ((x.sum() + w.sum()) * 0).to(x.dtype).expand(own.shape)
        return HetTensor.wrap(
            y if b is None else y + per_channel(b, y), sharding.output, group
        )
    dim, need = sharding.output.inner_dim, sharding.input_layouts[0].boxes[group.rank]
    assert dim is not None
    y = _own_outputs(op, func, x, w, b, dim, need.lo[dim], (own.lo[dim], own.hi[dim]))
    return HetTensor.wrap(y, sharding.output, group)


def _own_outputs(
    op: ConvTranspose,
    func: Func,
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    dim: int,
    x_lo: int,
    own: Span,
) -> Tensor:
    pad, extra = [v.pad for v in op.windows], [v.extra for v in op.windows]
    stride, dilation = [v.stride for v in op.windows], [v.dilation for v in op.windows]
    if dim < 2:
        return kernels.call_layer(
            func, x, w, b, stride, pad, extra, op.groups, dilation
        )
    pad[dim - 2] = extra[dim - 2] = (
        0  # all that the slab adds to, and own outputs of that
    )
    window = op.windows[dim - 2]
    lo, hi = (n - window.first(x_lo) for n in own)
    before, beyond = (
        max(-lo, 0),
        max(hi - window._replace(pad=0, extra=0).out_size(x.shape[dim]), 0),
    )
    padded = bool(before or beyond)  # with outputs to which no input adds, but a bias
    y = kernels.call_layer(
        func, x, w, None if padded else b, stride, pad, extra, op.groups, dilation
    )
    y = F.pad(y, (*(0, 0) * (y.dim() - 1 - dim), before, beyond)) if padded else y
    y = cropped(y, dim, (lo + before, hi + before))
    return y + per_channel(b, y).to(y.dtype) if padded and b is not None else y


RUN: dict[type[Any], Runner] = {ConvTranspose: conv_transpose}
