"""Group norm with the statistics of the whole, and norms that are local to a shard."""

from __future__ import annotations

from functools import lru_cache, partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hetconv.comm import call_tags
from hetconv.comm.rank_group import RankGroup
from hetconv.comm.redistribute import redistribute_local, run_rounds
from hetconv.kernels import norms
from hetconv.kernels.epilogue import per_channel
from hetconv.operators.base import function_name
from hetconv.operators.norms import BatchNorm, GroupNorm, LocalNorm, NormCall
from hetconv.ops.as_called import Runner, ShardedCall, called_on
from hetconv.runtime.gradient_sync import synced_grad
from hetconv.runtime.het_tensor import HetTensor, gather
from hetconv.runtime.inputs import differentiable_gradients
from hetconv.sharding.layout import Box, Layout, ReadRegion
from hetconv.sharding.rule import OpSharding

from .batch_norm import batch_norm
from .statistics import combined, empty_result, exact_of


def group_norm(c: ShardedCall) -> HetTensor:
    """Normalizes the local shard of x (N, C, ...) with the statistics of whole groups.

    If samples or whole groups of channels are sharded, the statistics are local; else
    the ranks combine their moments.
    """
    call, group, box = c.call, c.group, c.box
    assert isinstance(call, NormCall)
    assert isinstance(call.op, GroupNorm)
    x, op = c.local_input(), call.op
    casts = function_name(c.func) == "group_norm" and torch.is_autocast_enabled("cuda")
    if casts and x.is_cuda and x.dtype != torch.float64:
        x = x.float()  # as torch's autocast does; for instance norm it does not
    own = slice(box.lo[1], box.hi[1])
    weight, bias = (
        synced_grad(group, gather(p))[own] if p is not None else None
        for p in (call.weight, call.bias)
    )
    if c.sharding.forward_moves:
        y = _SplitGroupNorm.apply(x, weight, bias, call.eps, op, c.sharding, group)
    elif not x.numel():
        y = empty_result(x, weight, bias)
    else:  # torch.nn.functional's refuses a shard of one element per group
        y = torch.group_norm(x, x.shape[1] // op.channels, weight, bias, call.eps)
    return c.wrap(y)


class _SplitGroupNorm(torch.autograd.Function):
    """Normalizes shards of groups that several ranks share.

    Letters: x (n, c, ...) has the local samples and channels, weight and bias (c,) the
    local channels.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        op: GroupNorm,
        sharding: OpSharding,
        group: RankGroup,
    ) -> Tensor:
        exact = exact_of(x)
        layout, (move,), rank = sharding.output, sharding.forward_moves, group.rank
        lo = layout.boxes[rank].lo[1]
        own = moments_of_groups(x, op, lo, exact)
        src, dst = move.src.boxes[rank], move.dst.boxes[rank]
        each = run_rounds(group, own[None], move.forward, src, dst)
        stats = combined(each, _shares(op, layout, rank, exact, x.device))
        var, mean = (to_channels(t, op, lo, x.shape[1]) for t in stats)
        invstd = (var + eps).rsqrt_()
        y = normalized(x, mean, invstd, weight, bias)
        ctx.save_for_backward(x, weight, mean, invstd)
        ctx.op, ctx.sharding, ctx.group, ctx.lo, ctx.eps = op, sharding, group, lo, eps
        ctx.bias_dtype = bias.dtype if bias is not None else None
        ctx.call = call_tags.forward_call()
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd = ctx.saved_tensors
        call_tags.enter_backward(ctx.call)
        if torch.is_grad_enabled():
            bias = x.new_zeros(
                x.shape[1], dtype=ctx.bias_dtype or x.dtype
            ).requires_grad_(ctx.needs_input_grad[2])
            compute = partial(_differentiable, ctx.eps, ctx.op, ctx.sharding, ctx.group)
            gradients = differentiable_gradients(compute, (x, weight, bias), g)
            return *gradients, None, None, None, None
        op, lo = ctx.op, ctx.lo
        local = (
            norms.sums(g, x, mean, invstd)
            if x.numel()
            else mean.new_zeros((2, *mean.shape))
        )
        gain = None if weight is None else weight.to(mean.dtype)
        own = to_groups(local if gain is None else local * gain, op, lo).flatten(1)
        (move,) = ctx.sharding.backward_moves
        whole = Box.whole(tuple(own.shape))
        total = run_rounds(ctx.group, own, move.forward, whole, whole)
        gx = None
        if ctx.needs_input_grad[0]:
            gx = input_gradient(g, x, mean, invstd, gain, total, op, lo)
        of_weight, of_bias = local.sum(1)
        g_weight = of_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None
        g_bias = of_bias.to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return gx, g_weight, g_bias, None, None, None, None


def moments_of_groups(x: Tensor, op: GroupNorm, lo: int, exact: torch.dtype) -> Tensor:
    """Returns (2, N G): variance and mean of the local shard of each sample's groups.

    Those of an empty shard are zero, and have no weight.

    Args:
        x: (N, c, ...), the local shard.
        op: The norm.
        lo: The first of the local channels.
        exact: Data type of the result.
    """
    if not x.numel():
        return x.new_zeros((2, len(x) * op.groups), dtype=exact)
    each = norms.moments(x, exact)
    if each.shape[2] == op.shape[1]:
        var, mean = each.view(2, -1, op.channels)
        among_channels, mean = torch.var_mean(mean, 1, correction=0)
        return torch.stack((var.mean(1).add_(among_channels), mean))
    held = to_groups(torch.ones_like(each[0]), op, lo).clamp(min=1)
    centre = to_groups(each[1], op, lo) / held
    apart = each[1] - to_channels(centre.flatten(), op, lo, x.shape[1])
    var = to_groups(each[0] + apart.square_(), op, lo) / held
    return torch.stack((var.flatten(), centre.flatten()))


def normalized(
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Normalizes a shard by statistics (N, c) of its channels; weight and bias are (c,)."""
    scale = invstd if weight is None else invstd * weight.to(invstd.dtype)
    shift = (mean * scale).neg_()
    if bias is not None:
        shift += bias
    return norms.affine(x, scale, shift)


def input_gradient(
    g: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    gain: Tensor | None,
    total: Tensor,
    op: GroupNorm,
    lo: int,
) -> Tensor:
    """Returns the gradient of x (n, c, ...) from that of the normalized x.

    Args:
        g: Gradient of the result.
        x: The input.
        mean: (n, c).
        invstd: (n, c).
        gain: The weight (c,), or None.
        total: (2, n G): sums over whole groups of gain times g times the normalized x,
            and of gain times g.
        op: The norm.
        lo: The first of the local channels.
    """
    count = op.channels * prod(op.shape[2:])
    of_channels = to_channels(total.view(2, -1), op, lo, x.shape[1])
    along, shift = (of_channels * (invstd / -count)).unbind()
    along = along * invstd
    numbers = along, invstd if gain is None else invstd * gain, shift - along * mean
    return norms.combination(x, g, *numbers)


@lru_cache(1024)
def _shares(
    op: GroupNorm, layout: Layout, rank: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Returns (P, n G): the fraction of each group that each of a rank's peers holds."""
    peers, box = layout.peers(rank), layout.boxes[rank]
    of_peers = op.shares(layout)[peers.start : peers.stop]
    share = torch.tensor(of_peers, dtype=dtype, device="cpu")
    return share.repeat(1, box.shape[0]).to(device)


def _differentiable(
    eps: float,
    op: GroupNorm,
    sharding: OpSharding,
    group: RankGroup,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor,
) -> Tensor:
    """Computes `_SplitGroupNorm` by operators that autograd can differentiate again."""
    layout, exact, (move,) = sharding.output, exact_of(x), sharding.forward_moves
    lo, channels = layout.boxes[group.rank].lo[1], x.shape[1]
    # The added zero keeps an empty shard in the graph.
    own = _differentiable_moments(x.to(exact), op, lo) + x.sum().to(exact) * 0
    read = ReadRegion(move.dst.shape, move.dst.boxes)
    each = redistribute_local(group, own[None], move.src, read)
    share = _shares(op, layout, group.rank, exact, x.device)
    mean = (each[:, 1] * share).sum(0)
    var = ((each[:, 0] + (each[:, 1] - mean) ** 2) * share).sum(0)
    centre, scale = (
        to_channels(t, op, lo, channels).view(-1, channels, *(1,) * (x.dim() - 2))
        for t in (mean, (var + eps).rsqrt())
    )
    y = (x.to(exact) - centre) * scale
    y = y if weight is None else y * per_channel(weight.to(exact), x)
    return (y + per_channel(bias.to(exact), x)).to(x.dtype)


def _differentiable_moments(x: Tensor, op: GroupNorm, lo: int) -> Tensor:
    """Computes `moments_of_groups` by operators that autograd can differentiate again."""
    if not x.numel():
        return x.new_zeros((2, len(x) * op.groups))
    var, mean = torch.var_mean(x, list(range(2, x.dim())), correction=0)
    held = to_groups(torch.ones_like(mean), op, lo).clamp(min=1)
    centre = to_groups(mean, op, lo) / held
    apart = mean - to_channels(centre.flatten(), op, lo, x.shape[1])
    var = to_groups(var + apart**2, op, lo) / held
    return torch.stack([var.flatten(), centre.flatten()])


def to_groups(v: Tensor, op: GroupNorm, lo: int) -> Tensor:
    """Sums (..., c) of the local channels, which begin at ``lo``, per group: (..., G)."""
    if v.shape[-1] != op.shape[1]:
        v = F.pad(v, (lo, op.shape[1] - lo - v.shape[-1]))
    return v.reshape(*v.shape[:-1], op.groups, op.channels).sum(-1)


def to_channels(v: Tensor, op: GroupNorm, lo: int, channels: int) -> Tensor:
    """Repeats (..., N G) for the local channels, which begin at ``lo``: (..., N, c)."""
    every = v.reshape(*v.shape[:-1], -1, op.groups, 1)
    every = every.expand(*every.shape[:-1], op.channels).flatten(-2)
    return every[..., lo : lo + channels].contiguous()


def local_norm(c: ShardedCall) -> HetTensor:
    """Normalizes within the local shard, such as layer norm and local response norm."""
    x = c.local_input()
    if function_name(c.func) == "local_response_norm" and not x.numel():
        # torch returns x itself, in another dtype than autocast's
        dtype = c.on(x.new_ones((1,) * x.dim())).dtype
        return c.wrap((x * 1).to(dtype))
    params = {id(p): synced_grad(c.group, gather(p)) for p in c.call.params}
    local = {id(c.call.inputs[0]): x} | params
    return c.wrap(called_on(local, c.func, c.args, c.kwargs))


RUN: dict[type[Any], Runner] = {
    BatchNorm: batch_norm,
    GroupNorm: group_norm,
    LocalNorm: local_norm,
}
