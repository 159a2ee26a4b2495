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
from hetconv.operators.base import WeightedCall
from hetconv.operators.conv_transpose import ConvTranspose
from hetconv.runtime.gradient_sync import synced_grad
from hetconv.runtime.het_tensor import HetTensor, gather
from hetconv.runtime.inputs import (
    Func,
    autocast,
    cached_sharding,
    cropped,
    empty_output,
    layout_of,
    to_layout,
    uncounted,
)
from hetconv.sharding.conv_spec import Span
from hetconv.sharding.layer_rules import Conv, Linear, exchanges_halos
from hetconv.sharding.layout import Layout, Shape
from hetconv.sharding.param_shards import ParamShards
from hetconv.sharding.rule import OpSharding
from hetconv.sharding.split import Split

from .as_called import Runner, ShardedCall
from .conv_geometry import (
    Geometry,
    Region,
    group_geometry,
    region_of,
    slab_geometry,
    spatial_geometry,
)
from .deferred import DeferredConv, may_defer, version
from .halo_exchange import LocalConv, compute
from .halo_region import halo_region
from .norms.deferred_norm import normalized_region


class TorchCall(NamedTuple):
    """Call of torch's own convolution.

    Attributes:
        conv: The function.
        args: Its arguments after input, weight and bias.
    """

    conv: Callable[..., Tensor]
    args: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class ConvCase:
    """Plan of a convolution on an input of a given layout.

    Attributes:
        src: Layout of the input.
        op: The convolution.
        sharding: Layouts that it reads and writes.
        held: Which ranks hold what of each parameter.
        geo: This rank's share; None if filters of a grouped convolution are split.
        is_local: Whether the shard of the input is read as it is, perhaps with halos.
        torch_call: The one call that is all that this rank computes, if there is one.
        region: What this rank reads where halos are exchanged, if that can be one buffer.
        region_call: The one call of torch on that buffer.
    """

    src: Layout
    op: Conv
    sharding: OpSharding
    held: Mapping[str, ParamShards]
    geo: Geometry | None
    is_local: bool = False
    torch_call: TorchCall | None = None
    region: Region | None = None
    region_call: TorchCall | None = None


def conv_case(op: Conv, src: Layout, split: Split, group: RankGroup) -> ConvCase:
    """Returns how a convolution runs.

    Args:
        op: The convolution.
        src: Layout of its input.
        split: How it is split.
        group: The ranks.
    """
    split, rank = op.canonical(split), group.rank
    sharding = cached_sharding(op, (src,), split)
    held, is_local = op.param_shards(split, group.size), False
    if split.kind == "filter" and op.spec.groups > 1:
        return ConvCase(src, op, sharding, held, None)
    if split.kind == "replicate":
        whole = Layout.replicated(op.spec.x_shape, 1)
        geo = slab_geometry(op, whole, Split("filter", (op.spec.K,)), 0)
        read = whole.boxes[0]
    elif exchanges_halos(op, src, split):
        geo, is_local = spatial_geometry(op, src, split, rank), True
        read = src.boxes[rank]
    else:
        geo, boxes = (
            slab_geometry(op, src, split, rank),
            sharding.input_layouts[0].boxes,
        )
        read, is_local = boxes[rank], src.kind == "sharded" and src.boxes == boxes
    region = region_of(op, src, split, rank)
    of_region = None
    if region is not None:
        of_region = _torch_call(region.geo, region.shape, region.span)
    rows = (read.lo[geo.dim], read.hi[geo.dim])
    own_call = _torch_call(geo, read.shape, rows)
    return ConvCase(src, op, sharding, held, geo, is_local, own_call, region, of_region)


def _torch_call(geo: Geometry, shape: Shape, rows: Span) -> TorchCall | None:
    """Returns the one call of torch that computes all of this rank's share, or None.

    There is none if halos are exchanged, if a tensor is empty, if the padding of a
    dimension differs between its sides, or where `aten` works around torch.

    Args:
        geo: The share of the convolution.
        shape: Shape of the input.
        rows: Range of the input along the split, of the whole.
    """
    s, own = geo.op.spec, geo.own
    if own is None or geo.held or not (geo.covers and geo.adds_bias):
        return None
    segment = own.segment
    taps, padding = (0, s.kernel[geo.dim - 2]), geo.padding(segment)
    if not prod(shape) or not prod(geo.y_shape) or geo.y_shape[-1] == 1:
        return None
    if (segment.rows, segment.taps) != (rows, taps) or any(a != b for a, b in padding):
        return None
    if overruns((geo.y_shape[1], shape[1] // geo.groups, *s.kernel), s.stride):
        return None
    conv = (torch.conv1d, torch.conv2d, torch.conv3d)[s.spatial_dims - 1]
    return TorchCall(
        conv, (s.stride, tuple(lo for lo, _ in padding), s.dilation, geo.groups)
    )


def convolution(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    case: ConvCase,
    group: RankGroup,
    fusible: tuple[str, ...] = (),
    chunks: int = 1,
) -> Tensor:
    """Computes a convolution of any number of spatial dimensions under a split.

    Args:
        x: The input.
        w: What this rank holds of the weight.
        b: What this rank holds of the bias.
        case: How the convolution runs on an input of this layout.
        group: The ranks.
        fusible: Functions that alone will be called on the result, in order. Without
            autograd the convolution is deferred, so that they are fused into it.
        chunks: Number of chunks of the batch in which the result is gathered, if it is
            sharded by channels and asked for whole without autograd.

    Returns:
        A HetTensor, or a plain tensor if every rank computed the whole.
    """
    sharding, geo = case.sharding, case.geo
    if sharding.output.kind == "replicated":
        assert geo is not None
        return _apply(gather(x, images=True), w, b, geo, group, case.torch_call)
    if sharding.partial_grads and torch.is_grad_enabled():
        w = synced_grad(group, w, case.held["weight"])
        b = synced_grad(group, b, case.held["bias"]) if b is not None else None
    call = case.torch_call
    buffer = _region(x, case, group)
    if buffer is not None:
        assert case.region is not None
        local, geo, call = buffer, case.region.geo, case.region_call
    elif case.is_local and isinstance(x, HetTensor):
        local = x.local
    else:
        local = to_layout(x, sharding.input_layouts[0], group)
    output = sharding.output
    if geo is None:
        y = _grouped(local, w, b, case.op, output, group)
        return HetTensor.wrap(y, output, group)
    if (fusible or chunks > 1) and output.kind == "sharded" and may_defer(x):
        local, w, b = autocast(local, w, b)
        seen = version(local)
        deferred = DeferredConv(
            local, w, b, geo, output, group, fusible, chunks, seen=seen
        )
        return HetTensor.deferred(deferred, output, local.dtype, local.device, group)
    y = _apply(local, w, b, geo, group, call)
    return HetTensor.made(y, output, group)


def _region(x: Tensor, case: ConvCase, group: RankGroup) -> Tensor | None:
    """Returns all rows that a rank reads in one buffer, if that is the fastest way."""
    region = case.region
    if region is None or not isinstance(x, HetTensor):
        return None
    normalized = normalized_region(x, region)
    if normalized is not None or case.is_local:
        return normalized
    return halo_region(x.local, region, group)


def _apply(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    geo: Geometry,
    group: RankGroup,
    torch_call: TorchCall | None,
) -> Tensor:
    if torch_call is not None and kernels.only_aten():  # it has a backward, and casts
        return kernels.call_layer(torch_call.conv, x, w, b, *torch_call.args)
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        x, w, b = autocast(x, w, b)
        with torch.autocast(kind, enabled=False):
            return LocalConv.apply(x, w, b, geo, group)  # type: ignore[no-any-return]
    if not torch.is_grad_enabled():
        return compute(x, w, b, geo, group)[0]
    return LocalConv.apply(x, w, b, geo, group)  # type: ignore[no-any-return]


def _grouped(
    x: Tensor, w: Tensor, b: Tensor | None, op: Conv, y: Layout, group: RankGroup
) -> Tensor:
    """Computes the local filters of a grouped convolution.

    These are a part of a first group, whole groups, and a part of a last group: up to
    three convolutions, whose outputs are concatenated.
    """
    s = op.spec
    k_lo, k_hi = y.boxes[group.rank].lo[1], y.boxes[group.rank].hi[1]
    per_k, per_c = s.K // s.groups, s.C // s.groups
    first_group = op.group_span((k_lo, k_hi))[0]
    whole_groups = -(-k_lo // per_k) * per_k, k_hi // per_k * per_k
    cuts = sorted({k_lo, k_hi, *(k for k in whole_groups if k_lo < k < k_hi)})
    outputs = []
    for lo, hi in itertools.pairwise(cuts) if k_lo < k_hi else [(k_lo, k_hi)]:
        g0, g1 = op.group_span((lo, hi))
        channels = x[:, (g0 - first_group) * per_c : (g1 - first_group) * per_c]
        geo = group_geometry(op, len(x), hi - lo, max(g1 - g0, 1))
        own = slice(lo - k_lo, hi - k_lo)
        bias = b[own] if b is not None else None
        outputs.append(_apply(channels, w[own], bias, geo, group, None))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


class _GradientOnly(torch.autograd.Function):
    """Returns zeros instead of a bias that another rank adds.

    The gradient of the bias is computed as if it were added here. A rank holds all of
    the bias or none of it.
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
    """Computes a linear layer under a split.

    Args:
        x: The input (..., in_features).
        w: What this rank holds of the weight.
        b: What this rank holds of the bias.
        op: The layer.
        split: How it is split.
        group: The ranks.

    Returns:
        A HetTensor, or a plain tensor for ``replicate``.
    """
    if split.kind == "replicate":
        return _linear(gather(x), w, b, op.features)
    sharding = op.sharding((layout_of(x, group),), split)
    held = op.param_shards(split, group.size)
    if sharding.partial_grads:
        w = synced_grad(group, w, held["weight"])
        b = synced_grad(group, b, held["bias"]) if b is not None else None
    elif sharding.output.kind == "replicated" and not held["weight"].is_replicated:
        # Refuses an input without the dimension that is split: all would need the weight.
        op.check(split, group.size)
    # One summand of a partial output has the bias. Its rank computes the gradient of
    # the bias, since all ranks have the gradient of the output.
    adds_bias = split.kind != "channel" or group.rank == split.peers(group.rank)[0]
    features = sharding.output.boxes[group.rank].shape[-1]
    local = to_layout(x, sharding.input_layouts[0], group)
    y = _linear(local, w, b, features, adds_bias)
    return HetTensor.wrap(y, sharding.output, group)


def _linear(
    x: Tensor, w: Tensor, b: Tensor | None, features: int, adds_bias: bool = True
) -> Tensor:
    if w.shape != (features, x.shape[-1]):  # a rank without rows holds no weight
        return empty_output((*x.shape[:-1], features), *autocast(x, w, b))
    if b is not None and not adds_bias:
        has_grad = b.requires_grad and torch.is_grad_enabled()
        b = _GradientOnly.apply(b, features) if has_grad else None
    return call_layer(F.linear, x, w, b)


def conv_transpose(c: ShardedCall) -> HetTensor:
    """Runs a transposed convolution on the inputs that add to the local outputs."""
    call, group, own = c.call, c.group, c.box
    assert isinstance(call, WeightedCall)
    op = call.op
    assert isinstance(op, ConvTranspose)
    assert call.weight is not None
    x = c.local_input()
    w = synced_grad(group, gather(call.weight))
    b = synced_grad(group, gather(call.bias)) if call.bias is not None else None
    if not (x.numel() and own.numel):  # the graph still reaches every tensor
        y = ((x.sum() + w.sum()) * 0).to(x.dtype).expand(own.shape)
        return c.wrap(y if b is None else y + per_channel(b, y))
    dim, read = c.output.inner_dim, c.sharding.input_layouts[0].boxes[group.rank]
    assert dim is not None
    out = (own.lo[dim], own.hi[dim])
    return c.wrap(_own_outputs(op, c.func, x, w, b, dim, read.lo[dim], out))


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
    """Computes the outputs ``own`` along ``dim`` from the slab ``x``, which begins at ``x_lo``."""
    pad, extra = [v.pad for v in op.windows], [v.extra for v in op.windows]
    stride, dilation = [v.stride for v in op.windows], [v.dilation for v in op.windows]
    if dim < 2:
        return kernels.call_layer(
            func, x, w, b, stride, pad, extra, op.groups, dilation
        )
    # Without padding torch computes all outputs that the slab adds to; of these the
    # local ones are taken, and those to which only the bias adds are padded.
    pad[dim - 2] = extra[dim - 2] = 0
    window = op.windows[dim - 2]
    lo, hi = (n - window.first(x_lo) for n in own)
    computed = window._replace(pad=0, extra=0).out_size(x.shape[dim])
    before, beyond = max(-lo, 0), max(hi - computed, 0)
    padded = bool(before or beyond)
    y = kernels.call_layer(
        func, x, w, None if padded else b, stride, pad, extra, op.groups, dilation
    )
    y = F.pad(y, (*(0, 0) * (y.dim() - 1 - dim), before, beyond)) if padded else y
    y = cropped(y, dim, (lo + before, hi + before))
    return y + per_channel(b, y).to(y.dtype) if padded and b is not None else y


RUN: dict[type[Any], Runner] = {ConvTranspose: conv_transpose}
