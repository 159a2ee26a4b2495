"""Views of shards, and which HetTensors share memory.

Tensors that share memory on one device share it on shards too, or are replicated before
one of them is written to. A view of a shard is written to as in torch, if the write
leaves its layout as it is. Any other write gathers the tensor that the views were taken
of, and takes the views of it again, by the calls that made them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hetconv.comm.redistribute import clone_if_aliased
from hetconv.kernels import CHANNELS_LAST
from hetconv.operators.shapes import Cat, PixelShuffle, Reshape, Stack
from hetconv.operators.views import SplitView, View
from hetconv.runtime.het_tensor import HetTensor, gather
from hetconv.runtime.inputs import Args, Func, Kwargs, empty_output
from hetconv.sharding.layout import Layout
from hetconv.sharding.rule import OpSharding
from hetconv.torch_internals import storage_id, tree_iter, tree_map

from .as_called import Again, AgainMaker, Runner, ShardedCall

Retake = Callable[[Tensor], Tensor]
"""Takes a view again, of the whole tensor."""


@dataclass(eq=False)
class Family:
    """HetTensor and its views, which share memory.

    Attributes:
        views: The views, in the order in which they were taken.
        copies: Whether some may be copies, on this rank or another, because a shard's
            memory format is not that of the whole.
        images: Whether some are copies on one device if the tensor is channels-last.
        read_only: Whether PyTorch may refuse to write to some.
    """

    views: list[ref[HetTensor]] = field(default_factory=list)
    copies: bool = False
    images: bool = False
    read_only: bool = False


class Source(NamedTuple):
    """Origin of a view.

    Attributes:
        tensor: The tensor that it is a view of.
        retake: Takes it again, of the whole tensor.
        with_grad: Whether autograd was on.
        read_only: Whether PyTorch may refuse to write to it, because the call returned
            several views, or expanded the tensor.
    """

    tensor: HetTensor
    retake: Retake
    with_grad: bool
    read_only: bool


_families: Any = WeakIdKeyDictionary()  # of each tensor that has or is a view
_sources: Any = WeakIdKeyDictionary()  # of each view: a `Source`


def link(
    view: HetTensor,
    source: HetTensor,
    retake: Retake,
    *,
    copies: bool = False,
    images: bool = False,
    read_only: bool = False,
) -> HetTensor:
    """Records that ``view`` shares the memory of ``source``.

    Args:
        view: The view.
        source: The tensor that it is a view of.
        retake: Takes the view again, of the whole tensor.
        copies: As in `Family`.
        images: As in `Family`.
        read_only: As in `Source`.

    Returns:
        The view.
    """
    family = _families.setdefault(source, Family())
    family.views.append(ref(view))
    family.copies |= copies
    family.images |= images
    family.read_only |= read_only
    _families[view] = family
    _sources[view] = Source(source, retake, torch.is_grad_enabled(), read_only)
    return view


def shared(x: HetTensor) -> bool:
    """Returns whether a tensor has views or is one; the same on every rank.

    Views that nobody holds any more count too, because ranks free them at other times.
    """
    return x in _families


def may_write(x: HetTensor, output: Layout) -> bool:
    """Returns whether a call in place may write to the local shard alone.

    Args:
        x: The tensor that the call writes to.
        output: Layout of the result.
    """
    if x.placement.kind == "replicated":  # plain views of the whole may exist
        return False
    family = _families.get(x)
    if family is None:
        return True
    # PyTorch may refuse to read such views after the write.
    if family.read_only and torch.is_grad_enabled():
        return False
    return not family.copies and output == x.placement


def make_whole(x: HetTensor) -> None:
    """Replicates a tensor and all that share its memory; collective.

    Afterwards they share memory as on one device.
    """
    if x.placement.kind == "replicated":
        return
    root, family = x, _families.get(x, Family())
    while root in _sources:
        root = _sources[root].tensor
    with torch.enable_grad():
        root.become_whole(gather(root, images=family.images))
    members = [root]
    for view in (v for r in family.views if (v := r()) is not None):
        source: Source = _sources[view]
        with torch.set_grad_enabled(source.with_grad):
            view.become_whole(source.retake(source.tensor.local))
        members.append(view)
    for member in members:  # a view keeps its source until here
        _families.pop(member, None)
        _sources.pop(member, None)


def shows(x: HetTensor, func: Func, args: Args, kwargs: Kwargs) -> bool:
    """Returns whether a call on a view returns a view on one device.

    There a view has the strides that its source gives it; gathered alone, it has others.
    """
    with torch.no_grad():
        like = stand_in(x)
        try:
            result = func(
                *tree_map(lambda a: like if a is x else a, args), **dict(kwargs)
            )
        except Exception:  # the call takes other tensors too
            return True
    memory = storage_id(like)
    return any(
        storage_id(r) == memory for r in tree_iter(result) if isinstance(r, Tensor)
    )


def stand_in(
    x: HetTensor, *, images: bool = False, device: torch.device | str = "meta"
) -> Tensor:
    """Returns a tensor of zeros with the strides that ``x`` has on one device.

    Args:
        x: A tensor that may be a view.
        images: Whether its source is channels-last on one device, not contiguous.
        device: Device of the result.
    """
    taken, root = list[Source](), x
    while root in _sources:
        taken.append(_sources[root])
        root = taken[-1].tensor
    shape, order = root.placement.shape, torch.contiguous_format
    if images:
        order = CHANNELS_LAST.get(len(shape), order)
    like = torch.empty(
        shape, dtype=root.dtype, device=device, memory_format=order
    ).zero_()
    if root.local.requires_grad:
        with torch.enable_grad():
            like = like.requires_grad_().clone()
    for source in reversed(taken):
        with torch.set_grad_enabled(source.with_grad):
            like = source.retake(like)
    return like


def may_be_refused(x: HetTensor) -> bool:
    """Returns whether PyTorch may refuse to write to ``x``, as it does to some views.

    The write to a shard does not show it, because the shard need not be a view.
    """
    while (source := _sources.get(x)) is not None:
        if source.read_only or not source.with_grad:
            return True
        x = source.tensor
    return False


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

    def retake(i: int) -> Retake:
        return lambda whole: c.on(whole)[i]

    views = enumerate(zip(op.views, op.shardings((x.placement,)), strict=True))
    return tuple(
        _take(c, one, sharding, retake(i), several=True) for i, (one, sharding) in views
    )


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
    join = torch.cat if isinstance(op, Cat) else torch.stack
    return c.wrap(join(c.local_inputs(), op.dim))


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
    """Returns the first argument if it is the one tensor of a call and is read as it is."""
    (x, *others), args = c.call.inputs, c.args
    is_first = bool(args) and args[0] is x and not others
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


def _retaking(c: ShardedCall) -> Retake:
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
    join, dim = torch.cat if isinstance(op, Cat) else torch.stack, op.dim

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
    Stack: cat_again,
    View: view_again,
}
