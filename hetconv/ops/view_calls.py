"""Calls that take views of shards, or join and reshape them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from hetconv.comm.redistribute import clone_if_aliased
from hetconv.operators.shapes import Cat, PixelShuffle, Reshape, Stack
from hetconv.operators.views import SplitView, View
from hetconv.runtime.het_tensor import HetTensor
from hetconv.runtime.inputs import Args, Kwargs, empty_output
from hetconv.sharding.layout import Layout
from hetconv.sharding.rule import OpSharding
from hetconv.torch_internals import tree_iter

from .as_called import Again, AgainMaker, Runner, ShardedCall
from .views import Retake, link, shared


def local_view(
    op: View, local: Tensor, read: Layout, output: Layout, rank: int
) -> Tensor:
    """Returns a view's local shard; it shares the memory of the source's shard.

    Args:
        op: The view.
        local: The source's shard on this rank.
        read: Layout of the source.
        output: Layout of the view.
        rank: This rank.
    """
    for step in _view_steps(op, read, output, rank):
        local = step(local)
    return local


def _view_steps(
    op: View, read: Layout, output: Layout, rank: int
) -> list[Callable[[Tensor], Tensor]]:
    """Returns what takes a view of a shard, in order."""
    box, seen = read.boxes[rank], output.boxes[rank].shape
    index: list[slice | int] = []
    for d, (lo, hi) in enumerate(op.spans):
        (first, last), step = (
            op.visible_span(d, (box.lo[d], box.hi[d])),
            op.stride_along(d),
        )
        a, b = lo + first * step - box.lo[d], min(lo + last * step, hi) - box.lo[d]
        index.append(slice(a, b, step) if d in op.dims else lo - box.lo[d])
    steps: list[Callable[[Tensor], Tensor]] = []
    if any(i != slice(0, n, 1) for i, n in zip(index, box.shape, strict=True)):
        steps.append(lambda x: x[tuple(index)])
    kept = [d for d in op.dims if d is not None]
    if kept != sorted(kept):
        order = [sorted(kept).index(d) for d in kept]
        steps.append(lambda x: x.permute(order))
    if None in op.dims:
        new = tuple(None if d is None else slice(None) for d in op.dims)
        steps.append(lambda x: x[new])
    steps.append(lambda x: x if x.shape == seen else x.expand(seen))
    return steps


def view(c: ShardedCall) -> HetTensor:
    """Takes a view of the local shard."""
    assert isinstance(c.call.op, View)
    return _take(c, c.call.op, c.sharding, c.on)


def split_view(c: ShardedCall) -> tuple[HetTensor, ...]:
    """Takes several views of the local shard, such as those of `torch.split`."""
    op, (x,) = c.call.op, c.call.inputs
    assert isinstance(op, SplitView)
    assert isinstance(x, HetTensor)
    shardings, func = op.shardings((x.placement,)), _retaking(c)
    layouts = [sharding.output for sharding in shardings]
    parts = _parts(func, x, layouts) if _alone(c) is not None else None
    if parts is not None:
        return parts

    views = enumerate(zip(op.views, shardings, strict=True))
    return tuple(
        _take(c, one, sharding, _part_of(func, i), several=True)
        for i, (one, sharding) in views
    )


def _parts(
    func: Callable[[Tensor], Any], x: HetTensor, layouts: Sequence[Layout]
) -> tuple[HetTensor, ...] | None:
    """Takes all views by one call, whose gradient is one concatenation.

    Args:
        func: The call.
        x: What the views are of.
        layouts: Layout of each view.

    Returns:
        The views; None if the call has other results on the local shard.
    """
    rank, local = x.group.rank, func(x.local)
    shapes = [layout.boxes[rank].shape for layout in layouts]
    if [tuple(part.shape) for part in local] != shapes:
        return None

    made = (HetTensor.made(t, y, x.group) for t, y in zip(local, layouts, strict=True))
    return tuple(
        link(view, x, _part_of(func, i), read_only=True) for i, view in enumerate(made)
    )


def _part_of(func: Callable[[Tensor], Any], i: int) -> Retake:
    """Returns what takes one of the views that a call returns."""
    return lambda whole: func(whole)[i]


def split_view_again(c: ShardedCall, by_order: bool) -> Again | None:
    """Returns what takes the same views of other shards."""
    op, x = c.call.op, _alone(c)
    if x is None or by_order:
        return None
    assert isinstance(op, SplitView)
    layouts = [sharding.output for sharding in op.shardings((x.placement,))]
    func = _retaking(c)

    def again(args: Args, kwargs: Kwargs) -> tuple[HetTensor, ...] | None:
        return _parts(func, args[0], layouts)

    return again


def _take(
    c: ShardedCall,
    op: View,
    sharding: OpSharding,
    retake: Retake,
    several: bool = False,
) -> HetTensor:
    (x,), read, output = c.call.inputs, sharding.input_layouts[0], sharding.output
    assert isinstance(x, HetTensor)
    assert isinstance(read, Layout)
    local = local_view(op, x.local, read, output, c.group.rank)
    taken = HetTensor.wrap(local, output, c.group)
    return link(taken, x, retake, read_only=several or taken.numel() > x.numel())


def cat(c: ShardedCall) -> HetTensor:
    """Concatenates or stacks the local shards."""
    op = c.call.op
    assert isinstance(op, Cat | Stack)
    return c.wrap(_join(op)(c.local_inputs(), op.dim))


def _join(op: Cat | Stack) -> Callable[..., Tensor]:
    return torch.cat if isinstance(op, Cat) else torch.stack


def pixel_shuffle(c: ShardedCall) -> HetTensor:
    """Runs `torch.nn.functional.pixel_shuffle` on the local shard."""
    x = c.local_input()
    if not x.numel():  # torch's own backward gives an empty gradient of another shape
        return c.wrap(empty_output(c.box.shape, x))
    return c.wrap(c.on(x))


def reshape(c: ShardedCall) -> HetTensor:
    """Reshapes the local shard.

    The result is a view where the shard's memory format allows it, and else a copy. Both
    count as views that may be copies, because ranks may differ in this.
    """
    (x,) = c.call.inputs
    assert isinstance(x, HetTensor)
    return link(c.wrap(x.local.reshape(c.box.shape)), x, c.on, copies=True)


def _alone(c: ShardedCall) -> HetTensor | None:
    """Returns the first argument if it is the one tensor of a call and is read as it is.

    Another one, such as the second argument of `expand_as`, would be kept alive.
    """
    x, args = c.call.inputs[0], c.args
    others = tree_iter([*args[1:], *c.kwargs.values()])
    is_first = bool(args) and args[0] is x
    is_first = is_first and not any(isinstance(a, Tensor) for a in others)
    if not isinstance(x, HetTensor) or not is_first or c.call.in_place:
        return None
    return x if x.placement == c.sharding.input_layouts[0] else None


def view_again(c: ShardedCall, by_order: bool) -> Again | None:
    """Returns what takes the same view of other shards."""
    op, x, output, rank = c.call.op, _alone(c), c.output, c.group.rank
    if x is None or by_order or not isinstance(op, View):
        return None
    steps = _view_steps(op, x.placement, output, rank)
    retake = _retaking(c)
    read_only = prod(output.shape) > x.numel()

    def again(args: Args, kwargs: Kwargs) -> HetTensor:
        source = args[0]
        local = source.local
        for step in steps:
            local = step(local)
        taken = HetTensor.made(local, output, source.group)
        return link(taken, source, retake, read_only=read_only)

    return again


def reshape_again(c: ShardedCall, by_order: bool) -> Again | None:
    """Returns what reshapes other shards in the same way."""
    if _alone(c) is None:
        return None
    shape, output, retake = c.box.shape, c.output, _retaking(c)

    def again(args: Args, kwargs: Kwargs) -> HetTensor | None:
        source = args[0]
        if by_order and shared(source):  # whether it is a copy depends on its views
            return None
        local = source.local.reshape(shape)
        if by_order:
            local = clone_if_aliased(local, source.local)
        taken = HetTensor.made(local, output, source.group)
        return link(taken, source, retake, copies=True)

    return again


def _retaking(c: ShardedCall) -> Callable[[Tensor], Any]:
    """Returns the call as a function of its first argument, which it does not keep alive."""
    func, args, kwargs = c.func, c.args[1:], dict(c.kwargs)
    return lambda whole: func(whole, *args, **kwargs)


def cat_again(c: ShardedCall, by_order: bool) -> Again | None:
    """Returns what concatenates or stacks other shards in the same way."""
    op, output, group = c.call.op, c.output, c.group
    assert isinstance(op, Cat | Stack)
    given = c.args[0] if c.args else None
    reads = zip(c.call.inputs, c.sharding.input_layouts, strict=True)
    if not isinstance(given, tuple | list) or len(given) != len(c.call.inputs):
        return None
    if not all(isinstance(x, HetTensor) and x.placement == read for x, read in reads):
        return None
    join, dim = _join(op), op.dim

    def again(args: Args, kwargs: Kwargs) -> HetTensor:
        return HetTensor.made(join([x.local for x in args[0]], dim), output, group)

    return again


RUN: dict[type[Any], Runner] = {
    Cat: cat,
    SplitView: split_view,
    PixelShuffle: pixel_shuffle,
    Reshape: reshape,
    Stack: cat,
    View: view,
}
AGAIN: dict[type[Any], AgainMaker] = {
    Cat: cat_again,
    Reshape: reshape_again,
    SplitView: split_view_again,
    Stack: cat_again,
    View: view_again,
}
