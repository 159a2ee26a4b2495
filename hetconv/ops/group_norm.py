"""Group norm with the statistics of the whole, and norms that are local to a shard."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hetconv.comm import call_tags
from hetconv.comm.rank_group import RankGroup
from hetconv.comm.redistribute import redistribute_local, run_rounds
from hetconv.kernels.epilogue import per_channel
from hetconv.operators.base import function_name
from hetconv.operators.norms import BatchNorm, GroupNorm, LocalNorm, NormCall
from hetconv.runtime.gradient_sync import synced_grad
from hetconv.runtime.het_tensor import HetTensor, gather
from hetconv.runtime.inputs import differentiable_gradients
from hetconv.sharding.layout import Box, ReadRegion
from hetconv.sharding.rule import OpSharding

from .as_called import Runner, ShardedCall, called_on
from .batch_norm import batch_norm, empty_result, exact_of


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
    local channels; mean and invstd (n, G) are those of whole groups.
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
        layout, lo = sharding.output, sharding.output.boxes[group.rank].lo[1]
        own = _group_moments(x.to(exact), op, lo)
        (move,), rank = sharding.forward_moves, group.rank
        src, dst = move.src.boxes[rank], move.dst.boxes[rank]
        each = run_rounds(group, own[None], move.forward, src, dst)
        variances, means = each.view(len(each), 2, -1, op.groups).unbind(1)
        peers = layout.peers(group.rank)
        share = each.new_tensor(op.shares(layout)[peers.start : peers.stop])[:, None]
        mean = (share * means).sum(0)
        invstd = ((share * (variances + (means - mean) ** 2)).sum(0) + eps).rsqrt()
        scale, centre = _to_channels(invstd, op, lo, x), _to_channels(mean, op, lo, x)
        scale = scale if weight is None else scale * per_channel(weight.to(exact), x)
        shift = (
            -centre * scale
            if bias is None
            else per_channel(bias.to(exact), x) - centre * scale
        )
        ctx.save_for_backward(x, weight, mean, invstd)
        ctx.op, ctx.sharding, ctx.group, ctx.lo, ctx.eps = op, sharding, group, lo, eps
        ctx.bias_dtype = bias.dtype if bias is not None else None
        ctx.call = call_tags.forward_call()
        return torch.addcmul(shift, x.to(exact), scale).to(x.dtype)

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
        op, lo, dims = ctx.op, ctx.lo, list(range(2, x.dim()))
        scale = _to_channels(invstd, op, lo, x)
        centred = (x.to(mean.dtype) - _to_channels(mean, op, lo, x)) * scale
        g = g.to(mean.dtype)
        of_weight, of_bias = (g * centred).sum(dims), g.sum(dims)  # (N, c)
        gains = mean.new_ones(x.shape[1]) if weight is None else weight.to(mean.dtype)
        own = torch.stack(
            [_to_groups(s * gains, op, lo).flatten() for s in (of_weight, of_bias)]
        )
        (move,) = ctx.sharding.backward_moves
        whole = Box.whole(tuple(own.shape))
        along, total = run_rounds(ctx.group, own, move.forward, whole, whole).view(
            2, *mean.shape
        )
        gx = None
        if ctx.needs_input_grad[0]:
            g = g if weight is None else g * per_channel(gains, x)
            along, total = (_to_channels(s, op, lo, x) for s in (along, total))
            gx = (
                (g - (total + centred * along) / (op.channels * prod(op.shape[2:])))
                * scale
            ).to(x.dtype)
        g_weight = (
            of_weight.sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        )
        g_bias = of_bias.sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return gx, g_weight, g_bias, None, None, None, None


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
    lo = layout.boxes[group.rank].lo[1]
    # The added zero keeps an empty shard in the graph.
    own = _group_moments(x.to(exact), op, lo) + x.sum().to(exact) * 0
    each = redistribute_local(
        group, own[None], move.src, ReadRegion(move.dst.shape, move.dst.boxes)
    )
    variances, means = each.view(len(each), 2, -1, op.groups).unbind(1)
    peers = layout.peers(group.rank)
    share = each.new_tensor(op.shares(layout)[peers.start : peers.stop])[:, None]
    mean = (share * means).sum(0)
    invstd = ((share * (variances + (means - mean) ** 2)).sum(0) + eps).rsqrt()
    y = (x.to(exact) - _to_channels(mean, op, lo, x)) * _to_channels(invstd, op, lo, x)
    y = y if weight is None else y * per_channel(weight.to(exact), x)
    return (y + per_channel(bias.to(exact), x)).to(x.dtype)


def _group_moments(x: Tensor, op: GroupNorm, lo: int) -> Tensor:
    """Returns (2, N G): variance and mean of the local shard of each sample's groups.

    Those of an empty shard are zero, and have no weight.
    """
    if not x.numel():
        return x.new_zeros((2, len(x) * op.groups))
    var, mean = torch.var_mean(x, list(range(2, x.dim())), correction=0)
    held = _to_groups(torch.ones_like(mean), op, lo).clamp(min=1)
    centre = _to_groups(mean, op, lo) / held
    apart = mean - _to_channels(centre, op, lo, mean)
    return torch.stack(
        [(_to_groups(var + apart**2, op, lo) / held).flatten(), centre.flatten()]
    )


def _to_groups(v: Tensor, op: GroupNorm, lo: int) -> Tensor:
    """Sums (N, c) of the local channels, which begin at ``lo``, per group: (N, G)."""
    every = F.pad(v, (lo, op.shape[1] - lo - v.shape[1]))
    return every.reshape(-1, op.groups, op.channels).sum(2)


def _to_channels(v: Tensor, op: GroupNorm, lo: int, like: Tensor) -> Tensor:
    """Repeats (N, G) for the local channels: (N, c, 1, ...), which broadcasts to ``like``."""
    own = v.repeat_interleave(op.channels, 1)[:, lo : lo + like.shape[1]]
    return own.view(*own.shape, *[1] * (like.dim() - 2))


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
