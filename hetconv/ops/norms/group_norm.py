"""Group norm on shards with the statistics of whole groups."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
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
from hetconv.operators.norms import GroupNorm
from hetconv.runtime.inputs import differentiable_gradients
from hetconv.sharding.layout import Box, ReadRegion
from hetconv.sharding.rule import OpSharding

from .statistics import (
    Shares,
    as_tensor,
    bias_like,
    combined,
    exact_of,
    gathered,
    shares_tensor,
)


@dataclass(frozen=True, eq=False)
class GroupStatistics:
    """How ranks find the statistics of the groups of which they hold shards.

    Letters: a shard has n samples and c channels of G groups.

    Attributes:
        op: The norm.
        eps: Added to the variance.
        sharding: How it runs.
        group: The ranks.
    """

    op: GroupNorm
    eps: float
    sharding: OpSharding
    group: RankGroup

    @cached_property
    def lo(self) -> int:
        """The first of the local channels."""
        return self.sharding.output.boxes[self.group.rank].lo[1]

    def shares(self, like: Tensor) -> Shares:
        """Returns the fraction of each group that each of this rank's peers holds.

        Args:
            like: Moments, whose dtype and device a tensor of fractions has.
        """
        layout, rank = self.sharding.output, self.group.rank
        peers = layout.peers(rank)
        of_peers = self.op.shares(layout)[peers.start : peers.stop]
        if all(len({*of_groups}) == 1 for of_groups in of_peers):
            return tuple(of_groups[0] for of_groups in of_peers)
        return shares_tensor(
            of_peers, layout.boxes[rank].shape[0], like.dtype, like.device
        )

    def own_moments(self, x: Tensor) -> Tensor:
        """Returns (1, 2, n G): variances and means of the groups within a shard x."""
        return moments_of_groups(x, self.op, self.lo, exact_of(x))[None]

    def of_channels(self, each: Tensor, channels: int) -> tuple[Tensor, Tensor]:
        """Returns mean and variance (n, c) of each channel's group.

        Args:
            each: (P, 2, n G): moments of the shards of P peers.
            channels: c.
        """
        stats = combined(each, self.shares(each))
        var, mean = to_channels(stats, self.op, self.lo, channels)
        return mean, var

    def own_sums(self, local: Tensor, gain: Tensor | None) -> Tensor:
        """Returns (2, n G): what a shard adds to the sums that gradients need.

        Args:
            local: (2, n, c): sums of g times the normalized x, and of g.
            gain: Weight (c,), or None.
        """
        scaled = local if gain is None else local * gain
        return to_groups(scaled, self.op, self.lo).flatten(1)

    def gradient_factors(
        self, total: Tensor, mean: Tensor, invstd: Tensor, gain: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what the gradient of x consists of: x * first + g * second + third.

        Args:
            total: (2, n G): sums of `own_sums` over the ranks.
            mean: (n, c).
            invstd: (n, c).
            gain: Weight (c,), or None.
        """
        count = self.op.channels * prod(self.op.shape[2:])
        of_channels = to_channels(total, self.op, self.lo, mean.shape[1])
        along, shift = (of_channels * (invstd / -count)).unbind()
        along = along * invstd
        scale = invstd if gain is None else invstd * gain
        return along, scale, shift - along * mean


Known = tuple[Tensor, Tensor]
"""Mean and variance (n, c) of each channel's group."""


def known_statistics(x: Tensor, statistics: GroupStatistics) -> Known:
    """Exchanges the moments of shards x."""
    (move,) = statistics.sharding.forward_moves
    each = gathered(statistics.own_moments(x), move, statistics.group)
    return statistics.of_channels(each, x.shape[1])


class SplitGroupNorm(torch.autograd.Function):
    """Normalizes shards of groups that several ranks share.

    Letters are those of `GroupStatistics`; weight and bias are (c,).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: GroupStatistics,
        known: Known | None = None,
    ) -> Tensor:
        """Normalizes by statistics that are ``known``, or exchanges moments."""
        known = known or known_statistics(x, statistics)
        ctx.save_for_backward(x, weight, *known)
        ctx.statistics = statistics
        ctx.bias_dtype = bias.dtype if bias is not None else None
        ctx.call = call_tags.forward_call()
        return norms.normalized(x, *known, weight, bias, statistics.eps)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Sums over whole groups, and returns the gradients."""
        x, weight, mean, var = ctx.saved_tensors
        call_tags.enter_backward(ctx.call)
        statistics: GroupStatistics = ctx.statistics
        if torch.is_grad_enabled():
            compute = partial(differentiable, statistics)
            wanted = ctx.needs_input_grad[2]
            inputs = (x, weight, bias_like(x, x.shape[1], ctx.bias_dtype, wanted))
            return *differentiable_gradients(compute, inputs, g), None, None
        invstd = (var + statistics.eps).rsqrt_()
        local = mean.new_zeros((2, *mean.shape))
        if x.numel():
            local = norms.sums(g, x, mean, invstd)
        gain = None if weight is None else weight.to(mean.dtype)
        own, (move,) = (
            statistics.own_sums(local, gain),
            statistics.sharding.backward_moves,
        )
        whole = Box.whole(tuple(own.shape))
        total = run_rounds(statistics.group, own, move.forward, whole, whole)
        gx = None
        if ctx.needs_input_grad[0]:
            factors = statistics.gradient_factors(total, mean, invstd, gain)
            gx = norms.combination(x, g, *factors)
        return gx, *parameter_gradients(ctx, local, weight), None, None


def parameter_gradients(
    ctx: Any, local: Tensor, weight: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the gradients of weight and bias, inputs 1 and 2 of an autograd function.

    Args:
        ctx: Of the function, with the data type of the bias.
        local: (2, n, c): sums of g times the normalized x, and of g.
        weight: (c,), or None.
    """
    of_weight, of_bias = local.sum(1)
    wanted = ctx.needs_input_grad
    return (
        of_weight.to(weight.dtype) if weight is not None and wanted[1] else None,
        of_bias.to(ctx.bias_dtype) if wanted[2] else None,
    )


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
    if x.shape[1] == op.shape[1]:
        return norms.moments(x, exact, op.groups).flatten(1)
    each = norms.moments(x, exact, x.shape[1])
    held = to_groups(torch.ones_like(each[0]), op, lo).clamp(min=1)
    centre = to_groups(each[1], op, lo) / held
    apart = each[1] - to_channels(centre.flatten(), op, lo, x.shape[1])
    var = to_groups(each[0] + apart.square_(), op, lo) / held
    return torch.stack((var.flatten(), centre.flatten()))


def differentiable(
    statistics: GroupStatistics, x: Tensor, weight: Tensor | None, bias: Tensor
) -> Tensor:
    """Computes `SplitGroupNorm` by operators that autograd can differentiate again."""
    op, group, (move,) = (
        statistics.op,
        statistics.group,
        statistics.sharding.forward_moves,
    )
    exact, lo, channels = exact_of(x), statistics.lo, x.shape[1]
    # The added zero keeps an empty shard in the graph.
    own = _differentiable_moments(x.to(exact), op, lo) + x.sum().to(exact) * 0
    read = ReadRegion(move.dst.shape, move.dst.boxes)
    each = redistribute_local(group, own[None], move.src, read)
    shares = as_tensor(statistics.shares(each), each)
    mean = (each[:, 1] * shares).sum(0)
    var = ((each[:, 0] + (each[:, 1] - mean) ** 2) * shares).sum(0)
    centre, scale = (
        to_channels(t, op, lo, channels).view(-1, channels, *(1,) * (x.dim() - 2))
        for t in (mean, (var + statistics.eps).rsqrt())
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
    every = v.reshape(*v.shape[:-1], -1, op.groups)
    if op.channels > 1:
        every = every.unsqueeze(-1).expand(*every.shape, op.channels).flatten(-2)
    if channels < op.shape[1]:
        every = every[..., lo : lo + channels]
    return every.contiguous()
