"""Extremes along dimensions that are cut: those of shards are gathered and compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hetconv.comm import call_tags
from hetconv.comm.rank_group import RankGroup
from hetconv.comm.redistribute import function_result, moved_back
from hetconv.operators.base import function_name
from hetconv.operators.reductions import Extreme
from hetconv.ops.as_called import (
    Again,
    AgainMaker,
    Runner,
    ShardedCall,
    along_dim,
    along_dim_again,
)
from hetconv.ops.norms.statistics import exact_of, gathered
from hetconv.runtime.het_tensor import HetTensor
from hetconv.runtime.inputs import Args, Kwargs
from hetconv.sharding.moves import Move, all_reduce

FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "all": torch.all,
    "amax": torch.amax,
    "amin": torch.amin,
    "any": torch.any,
}


@dataclass(frozen=True, eq=False)
class ExtremeOfShards:
    """How ranks find extremes of which each has candidates in its shard.

    Letters: there are K extremes, and P ranks with a shard that is not empty.

    Attributes:
        op: The operator.
        function: torch's function of a tensor, dimensions, and whether to keep them.
        move: The all-gather of the shards' extremes.
        group: The ranks.
    """

    op: Extreme
    function: Callable[..., Tensor]
    move: Move
    group: RankGroup

    def gathered(self, own: Tensor, ties: Tensor | None) -> Tensor:
        """Returns (P, 2, K): extremes of shards and numbers of ties; or (P, 1, K).

        Args:
            own: The extremes of this rank's shard.
            ties: How many entries of the shard are equal to each extreme, as a tensor
                of the same shape; None where no gradient is needed.
        """
        message = own.reshape(1, 1, -1)
        if self.op.counts_ties:
            message = message.to(exact_of(own))
            counts = torch.zeros_like(message)
            if ties is not None:
                counts.copy_(ties.view_as(counts))
            message = torch.cat((message, counts), 1)
        held = self.move.src.boxes[self.group.rank].shape[0]
        return gathered(message[:held], self.move, self.group)

    def of_all(self, each: Tensor, like: Tensor) -> Tensor:
        """Returns the extremes of the whole, in the shape and data type of a tensor.

        Args:
            each: What `gathered` returned.
            like: The extremes of this rank's shard.
        """
        return self.function(each[:, 0], 0).to(like.dtype).view_as(like)

    def of_own(self, x: Tensor) -> Tensor:
        """Returns the extremes of a shard; of an empty one, a tensor of their shape."""
        if x.numel():
            return self.function(x, self.op.dims, True)
        kept = (1 if d in self.op.dims else n for d, n in enumerate(x.shape))
        return self.function(x.new_zeros(*kept), self.op.dims, True)


class _Extreme(torch.autograd.Function):
    """Extremes of the whole, whose gradient all entries that are equal to them share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, of_shards: ExtremeOfShards) -> Tensor:
        own = of_shards.of_own(x)
        is_extreme = x == own
        ties = is_extreme.sum(of_shards.op.dims, keepdim=True)
        each = of_shards.gathered(own, ties)
        y = of_shards.of_all(each, own)
        at_extreme = each[:, 0] == y.flatten()
        count = (each[:, 1] * at_extreme).sum(0).view_as(y)
        ctx.save_for_backward(is_extreme, own == y, count.to(x.dtype))
        ctx.group, ctx.call = of_shards.group, call_tags.forward_call()
        return function_result(y, x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        is_extreme, holds_extreme, count = ctx.saved_tensors
        call_tags.enter_backward(ctx.call)
        # Each rank uses the whole gradient for its own shard, which matters to the
        # gradient of the gradient.
        g = moved_back(g, all_reduce(tuple(g.shape), ctx.group.size), ctx.group)
        return g * holds_extreme / count * is_extreme, None


def _extreme(x: Tensor, of_shards: ExtremeOfShards) -> Tensor:
    """Returns the extremes of the whole, of which ``x`` is a shard."""
    if of_shards.op.counts_ties and x.requires_grad and torch.is_grad_enabled():
        y: Tensor = _Extreme.apply(x, of_shards)
    else:
        own = of_shards.of_own(x)
        y = of_shards.of_all(of_shards.gathered(own, None), own)
    return y.view(of_shards.op.shape)


def _of_shards(c: ShardedCall) -> ExtremeOfShards:
    op, (move,) = c.call.op, c.sharding.forward_moves
    assert isinstance(op, Extreme)
    return ExtremeOfShards(op, FUNCTIONS[function_name(c.func)], move, c.group)


def extreme(c: ShardedCall) -> Any:
    """Runs amax, amin, any or all.

    If a reduced dimension is sharded, the result is an ordinary tensor on every rank.
    """
    if not c.sharding.forward_moves:
        return along_dim(c)
    return _extreme(c.local_input(), _of_shards(c))


def extreme_again(c: ShardedCall, by_order: bool) -> Again | None:
    """Returns what finds the extremes of other shards with the same layout."""
    if not c.sharding.forward_moves:
        return along_dim_again(c, by_order)
    x = c.call.inputs[0]
    if not isinstance(x, HetTensor) or not c.args or c.args[0] is not x:
        return None
    if x.placement != c.sharding.input_layouts[0]:
        return None
    of_shards = _of_shards(c)

    def again(args: Args, kwargs: Kwargs) -> Any:
        return _extreme(args[0].local, of_shards)

    return again


RUN: dict[type[Any], Runner] = {Extreme: extreme}
AGAIN: dict[type[Any], AgainMaker] = {Extreme: extreme_again}
