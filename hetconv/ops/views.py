"""Views on parts. What shares memory on one device shares it on parts, or becomes whole
before it is written to.

A view of a part is written to as in torch, where that leaves its layout as it is.
Anything else gathers what the first source holds and takes the views of it anew, by the
calls that made them.
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
from hetconv.sharding.layer_rules import OpSharding
from hetconv.sharding.layout import Layout
from hetconv.torch_internals import storage_id, tree_iter, tree_map

Retake = Callable[[Tensor], Tensor]


@dataclass(eq=False)
class Family:
    """Tensors on parts that share memory: ``views``, in the order in which they were
    taken, and what they are of.

    ``copies``: some may be copies, on this rank or another, where a part lies in memory
    as the whole would not. ``images``: some are copies on one device, if what they are
    of is channels-last. ``read_only``: PyTorch may refuse to write to some.
    """

    views: list[ref[HetTensor]] = field(default_factory=list)
    copies: bool = False
    images: bool = False
    read_only: bool = False


class Source(NamedTuple):
    """What a view was taken of, how, and whether with autograd.

    ``read_only``: PyTorch may refuse to write to it, as one of several that a call
    returned, or as an expanded one.
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
    """Says that ``view`` shares the memory of ``source`` and how to take it of the whole."""
    family = _families.setdefault(source, Family())
    family.views.append(ref(view))
    family.copies |= copies
    family.images |= images
    family.read_only |= read_only
    _families[view] = family
    _sources[view] = Source(source, retake, torch.is_grad_enabled(), read_only)
    return view


def shared(x: HetTensor) -> bool:
    """Whether it has or is a view on parts. The same on every rank: what nobody holds
    any more counts.
    """
    return x in _families


def may_write(x: HetTensor, output: Layout) -> bool:
    """Whether a call in place, whose result lies as ``output``, may write to this
    rank's part alone.
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
    """Replicates a tensor and all that share its memory, which they then do as on one
    device; collective.
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
    """Whether a call gives a view of a view as it lies on one device: gathered alone it
    lies in another order.
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
    """A tensor of no value that lies as ``x`` does on one device, if what it is a view
    of is contiguous.

    With ``images``, if that is channels-last.
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
    """Whether PyTorch may refuse to write to it, as it does to some views. A part of
    one need not be a view.
    """
    while (source := _sources.get(x)) is not None:
        if source.read_only or not source.with_grad:
            return True
        x = source.tensor
    return False


def local_view(
    op: View, local: Tensor, read: Layout, output: Layout, rank: int
) -> Tensor:
    """What this rank's part shows of a view; it shares the part's memory."""
    box, seen = read.boxes[rank], output.boxes[rank]
    index: list[slice | int] = []
    for d, (lo, hi) in enumerate(op.spans):
        (first, last), step = op.taken(d, (box.lo[d], box.hi[d])), op.stride_along(d)
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
    """Concatenation, or along a new dimension."""
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
    """Operators whose local form is their own call on the part."""
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
    """A view where the part lies in memory so that it can be one, else a copy: both
    count as views that are copies.
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
