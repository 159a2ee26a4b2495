"""Calls of norms on shards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hetconv.comm.rank_group import RankGroup
from hetconv.operators.base import function_name
from hetconv.operators.norms import (
    BatchNorm,
    BatchNormCall,
    GroupNorm,
    LocalNorm,
    NormCall,
)
from hetconv.ops.as_called import Again, AgainMaker, Runner, ShardedCall, called_on
from hetconv.runtime.gradient_sync import synced_grad
from hetconv.runtime.het_tensor import HetTensor, gather
from hetconv.runtime.inputs import Args, Func, Kwargs

from .batch_norm import Norm, batch_norm, on_shared_channels
from .deferred_norm import deferred
from .group_norm import GroupStatistics, SplitGroupNorm
from .statistics import empty_result


def group_norm(c: ShardedCall) -> HetTensor:
    """Normalizes the local shard of x (N, C, ...) with the statistics of whole groups.

    If samples or whole groups of channels are sharded, the statistics are local; else
    the ranks combine their moments.
    """
    call, group, box = c.call, c.group, c.box
    assert isinstance(call, NormCall)
    assert isinstance(call.op, GroupNorm)
    x, op = c.local_input(), call.op
    if c.sharding.forward_moves:
        statistics = GroupStatistics(op, call.eps, c.sharding, group)
        return _shared_group_norm(c.func, x, call.weight, call.bias, statistics)
    x = _cast(c.func, x)
    own = slice(box.lo[1], box.hi[1])
    weight, bias = (_synced(p, group, own) for p in (call.weight, call.bias))
    if not x.numel():
        return c.wrap(empty_result(x, weight, bias))
    # torch.nn.functional's refuses a shard of one element per group
    groups = x.shape[1] // op.channels
    return c.wrap(torch.group_norm(x, groups, weight, bias, call.eps))


def _cast(func: Func, x: Tensor) -> Tensor:
    """Casts x as torch's autocast does; for instance norm it does not."""
    casts = x.is_cuda and torch.is_autocast_enabled("cuda")
    if casts and x.dtype != torch.float64 and function_name(func) == "group_norm":
        return x.float()
    return x


def _synced(p: Tensor | None, group: RankGroup, own: slice) -> Tensor | None:
    """Returns this rank's slice of a parameter that several ranks use."""
    if p is None:
        return None
    whole = synced_grad(group, gather(p))
    return whole if own == slice(0, len(whole)) else whole[own]


def _shared_group_norm(
    func: Func,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: GroupStatistics,
) -> HetTensor:
    """Normalizes a shard of groups that several ranks share, at once or when it is used."""
    group, output = statistics.group, statistics.sharding.output
    x, box = _cast(func, x), output.boxes[group.rank]
    own = slice(box.lo[1], box.hi[1])
    weight, bias = (_synced(p, group, own) for p in (weight, bias))
    later = deferred(x, weight, bias, statistics)
    if later is not None:
        return later
    y = SplitGroupNorm.apply(x, weight, bias, statistics)
    return HetTensor.wrap(y, output, group)


def group_norm_again(c: ShardedCall, by_order: bool) -> Again | None:
    """Returns what runs a group norm on other shards of groups that several ranks share."""
    call = c.call
    if not c.sharding.forward_moves or not _reads_first(c):
        return None
    assert isinstance(call, NormCall)
    assert isinstance(call.op, GroupNorm)
    statistics = GroupStatistics(call.op, call.eps, c.sharding, c.group)
    at, func = _positions(c, (call.weight, call.bias)), c.func
    if at is None:
        return None

    def again(args: Args, kwargs: Kwargs) -> HetTensor:
        weight, bias = (None if n is None else _given(args, kwargs)[n] for n in at)
        return _shared_group_norm(func, args[0].local, weight, bias, statistics)

    return again


def batch_norm_again(c: ShardedCall, by_order: bool) -> Again | None:
    """Returns what runs a batch norm in training on other shards of the same channels."""
    call, sharding, group, output = c.call, c.sharding, c.group, c.output
    if not sharding.forward_moves or group.size == 1 or not _reads_first(c):
        return None
    assert isinstance(call, BatchNormCall)
    at = _positions(c, (call.weight, call.bias, call.mean, call.var))
    if at is None:
        return None
    momentum, eps = call.momentum, call.eps

    def again(args: Args, kwargs: Kwargs) -> HetTensor:
        given = _given(args, kwargs)
        weight, bias, mean, var = (None if n is None else given[n] for n in at)
        norm = Norm(weight, bias, mean, var, True, momentum, eps)
        y = on_shared_channels(args[0].local, norm, sharding, group)
        return HetTensor.made(y, output, group)

    return again


def local_norm_again(c: ShardedCall, by_order: bool) -> Again | None:
    """Returns what normalizes within other shards in the same way."""
    if not c.box.numel or not _reads_first(c):
        return None
    at = _positions(c, c.call.params)
    if at is None:
        return None
    func, output, group = c.func, c.output, c.group

    def again(args: Args, kwargs: Kwargs) -> HetTensor:
        given = _given(args, kwargs)
        for n in at:
            if n is not None:
                given[n] = synced_grad(group, given[n])
        rest = (given[n] for n in range(1, len(args)))
        named = {name: given[name] for name in kwargs}
        return HetTensor.made(func(args[0].local, *rest, **named), output, group)

    return again


def _reads_first(c: ShardedCall) -> bool:
    """Returns whether the first argument is the input, and nothing is to be moved."""
    x = c.call.inputs[0]
    if not isinstance(x, HetTensor) or not c.args or c.args[0] is not x:
        return False
    if any(isinstance(p, HetTensor) for p in c.call.params):
        return False
    return x.placement == c.sharding.input_layouts[0]


def _given(args: Args, kwargs: Kwargs) -> dict[int | str, Any]:
    """Returns arguments by index or name."""
    given: dict[int | str, Any] = dict(enumerate(args))
    given.update(kwargs)
    return given


def _positions(
    c: ShardedCall, tensors: Iterable[Tensor | None]
) -> list[int | str | None] | None:
    """Returns the index or the name of each argument, None of one that is not given.

    The result is None if a tensor is given twice: another call of the same signature may
    be given two.
    """
    given, found = _given(c.args, c.kwargs), list[int | str | None]()
    for t in tensors:
        at = [n for n, v in given.items() if t is not None and v is t]
        if len(at) > 1:
            return None
        found.append(at[0] if at else None)
    return found


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
AGAIN: dict[type[Any], AgainMaker] = {
    BatchNorm: batch_norm_again,
    GroupNorm: group_norm_again,
    LocalNorm: local_norm_again,
}
