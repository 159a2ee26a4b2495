"""Views of shards, and which HetTensors share memory.

Tensors that share memory on one device share it on shards too, or are replicated before
one of them is written to. A view of a shard is written to as in torch, if the write
leaves its layout as it is. Any other write gathers the tensor that the views were taken
of, and takes the views of it again, by the calls that made them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hetconv.kernels import CHANNELS_LAST
from hetconv.runtime.het_tensor import HetTensor, gather
from hetconv.runtime.inputs import Args, Func, Kwargs
from hetconv.sharding.layout import Layout
from hetconv.torch_internals import storage_id, tree_iter, tree_map

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
