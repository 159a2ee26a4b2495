"""Views on shards.

What shares memory on one device shares it on shards, or becomes whole before it is
written to. A view of a shard is written to as in torch, where that keeps its layout.
Anything else gathers the base of the views, and takes the views of it again by the calls
that made them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hetconv.comm.rank_group import RankGroup
from hetconv.kernels import CHANNELS_LAST
from hetconv.operators.base import Call
from hetconv.operators.shapes import Cat, PixelShuffle, Reshape, Stack
from hetconv.operators.views import SplitView, View
from hetconv.runtime.het_tensor import HetTensor, gather
from hetconv.runtime.inputs import (
    Args,
    Func,
    Kwargs,
    Runner,
    as_called,
    empty_output,
    to_layout,
)
from hetconv.sharding.layout import Layout
from hetconv.sharding.rule import OpSharding
from hetconv.torch_internals import storage_id, tree_iter, tree_map

Retake = Callable[[Tensor], Tensor]


@dataclass(eq=False)
class Family:
    """HetTensors that share memory.

    Attributes:
        views: in the order in which they were taken, with their sources.
        copies: whether some may be copies, on any rank, where a shard has another memory
            order than the whole.
        images: whether some are copies on one device, if the base is channels-last.
        read_only: whether PyTorch may refuse to write to some.
    """

    views: list[ref[HetTensor]] = field(default_factory=list)
    copies: bool = False
    images: bool = False
    read_only: bool = False


class Source(NamedTuple):
    """What a view was taken of.

    Attributes:
        tensor: the source.
        retake: takes the view again.
        with_grad: whether it was taken with autograd.
        read_only: whether PyTorch may refuse to write to the view, as it does for one of
            several that a call returned, or an expanded one.
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
    """Records that a view shares the memory of its source.

    Args:
        view: the view.
        source: what it was taken of.
        retake: takes the view of the whole.
        copies: see `Family`.
        images: see `Family`.
        read_only: see `Family`.
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
    """Returns whether a tensor has or is a view. The same on every rank.

    Views that nobody holds any more count too.
    """
    return x in _families


def may_write(x: HetTensor, output: Layout) -> bool:
    """Returns whether a call in place may write to this rank's shard alone.

    Args:
        x: what is written to.
        output: layout of the result.
    """
    if x.placement.kind == "replicated":  # plain views of the whole may be out
        return False
    family = _families.get(x)
    if family is None:
        return True
    if (
        family.read_only and torch.is_grad_enabled()
    ):  # which PyTorch may refuse to read afterwards
        return False
    return not family.copies and output == x.placement


def make_whole(x: HetTensor) -> None:
    """Replicates a tensor and all that share its memory. Collective."""
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
    """Returns whether a call gives a view of a view in its memory order on one device.

    A tensor that is gathered alone has another order.
    """
    with torch.no_grad():
        like = stand_in(x)
        try:
            result = func(
                *tree_map(lambda a: like if a is x else a, args), **dict(kwargs)
            )
        except Exception:  # it takes more than this tensor and numbers
            return True
    memory = storage_id(like)
    return any(
        storage_id(r) == memory for r in tree_iter(result) if isinstance(r, Tensor)
    )


def stand_in(
    x: HetTensor, *, images: bool = False, device: torch.device | str = "meta"
) -> Tensor:
    """Returns a tensor without values that has the strides of ``x`` on one device.

    Args:
        x: a HetTensor whose base is contiguous.
        images: whether the base is channels-last instead.
        device: of the result.
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
    """Returns whether PyTorch may refuse writes to a tensor, as it does for some views.

    A shard of a view need not be a view.
    """
    while (source := _sources.get(x)) is not None:
        if source.read_only or not source.with_grad:
            return True
        x = source.tensor
    return False


def local_view(
    op: View, local: Tensor, read: Layout, output: Layout, rank: int
) -> Tensor:
    """Returns this rank's shard of a view, as a view of the source's shard.

    Args:
        op: the view.
        local: shard of the source.
        read: layout of the source.
        output: layout of the view.
        rank: this rank.
    """
    box, seen = read.boxes[rank], output.boxes[rank]
    index: list[slice | int] = []
    for d, (lo, hi) in enumerate(op.spans):
        (first, last), step = (
            op.visible_span(d, (box.lo[d], box.hi[d])),
            op.stride_along(d),
        )
        a, b = lo + first * step - box.lo[d], min(lo + last * step, hi) - box.lo[d]
        index.append(slice(a, b, step) if d in op.dims else lo - box.lo[d])
    if any(i != slice(0, n, 1) for i, n in zip(index, local.shape, strict=True)):
        local = local[tuple(index)]
    order = [d for d in op.dims if d is not None]
    if order != sorted(order):
        local = local.permute([sorted(order).index(d) for d in order])
    if None in op.dims:
        local = local[tuple(None if d is None else slice(None) for d in op.dims)]
    return local if tuple(local.shape) == seen.shape else local.expand(seen.shape)


def viewed(
    call: Call,
    sharding: OpSharding,
    group: RankGroup,
    func: Func,
    args: Args,
    kwargs: Kwargs,
) -> HetTensor:
    """Takes a view."""
    assert isinstance(call.op, View)
    return _taken(call, call.op, sharding, group, as_called(func, args, kwargs))


def pieces(
    call: Call,
    sharding: OpSharding,
    group: RankGroup,
    func: Func,
    args: Args,
    kwargs: Kwargs,
) -> tuple[HetTensor, ...]:
    """Takes several views."""
    assert isinstance(call.op, SplitView)
    (x,) = call.inputs
    assert isinstance(x, HetTensor)
    again = as_called(func, args, kwargs)

    def piece(i: int) -> Retake:
        return lambda whole: again(whole)[i]

    taken = enumerate(
        zip(call.op.views, call.op.shardings((x.placement,)), strict=True)
    )
    return tuple(
        _taken(call, op, own, group, piece(i), several=True) for i, (op, own) in taken
    )


def _taken(
    call: Call,
    op: View,
    sharding: OpSharding,
    group: RankGroup,
    retake: Retake,
    several: bool = False,
) -> HetTensor:
    (x,), read = call.inputs, sharding.input_layouts[0]
    assert isinstance(x, HetTensor)
    assert isinstance(read, Layout)
    view = HetTensor.wrap(
        local_view(op, x.local, read, sharding.output, group.rank),
        sharding.output,
        group,
    )
    return link(view, x, retake, read_only=several or view.numel() > x.numel())


def cat(
    call: Call,
    sharding: OpSharding,
    group: RankGroup,
    func: Func,
    args: Args,
    kwargs: Kwargs,
) -> HetTensor:
    """Concatenates, or stacks along a new dimension."""
    assert isinstance(call.op, Cat | Stack)
    parts = [
        to_layout(x, r, group)
        for x, r in zip(call.inputs, sharding.input_layouts, strict=True)
    ]
    join = torch.cat if isinstance(call.op, Cat) else torch.stack
    return HetTensor.wrap(join(parts, call.op.dim), sharding.output, group)


def reshaped(
    call: Call,
    sharding: OpSharding,
    group: RankGroup,
    func: Func,
    args: Args,
    kwargs: Kwargs,
) -> HetTensor:
    """Reshapes a shard by the same call."""
    x = to_layout(call.inputs[0], sharding.input_layouts[0], group)
    if not x.numel():  # torch's own backward gives an empty gradient of another shape
        return HetTensor.wrap(
            empty_output(sharding.output.boxes[group.rank].shape, x),
            sharding.output,
            group,
        )
    return HetTensor.wrap(as_called(func, args, kwargs)(x), sharding.output, group)


def regrouped(
    call: Call,
    sharding: OpSharding,
    group: RankGroup,
    func: Func,
    args: Args,
    kwargs: Kwargs,
) -> HetTensor:
    """Reshapes a shard to a view where its strides allow it, else to a copy.

    Both count as views that may be copies.
    """
    (x,), shape = call.inputs, sharding.output.boxes[group.rank].shape
    assert isinstance(x, HetTensor)
    y = HetTensor.wrap(x.local.reshape(shape), sharding.output, group)
    return link(y, x, as_called(func, args, kwargs), copies=True)


RUN: dict[type[Any], Runner] = {
    Cat: cat,
    SplitView: pieces,
    PixelShuffle: reshaped,
    Reshape: regrouped,
    Stack: cat,
    View: viewed,
}
