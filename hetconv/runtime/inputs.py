"""Layouts of inputs, and bringing them to the layouts that an operator reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hetconv.comm.exchange_plan import local_slice
from hetconv.comm.rank_group import RankGroup
from hetconv.comm.redistribute import redistribute_local
from hetconv.sharding.conv_spec import Span
from hetconv.sharding.layout import Box, Layout, ReadRegion, Shape
from hetconv.sharding.rule import Operator, OpSharding
from hetconv.sharding.split import REPLICATE, Split
from hetconv.signature_cache import Cache

from .gradient_sync import is_replica, synced_grad
from .het_tensor import HetTensor

Func = Callable[..., Any]
Args = Sequence[Any]
Kwargs = Mapping[str, Any]
_steps: Cache[tuple[Operator, tuple[Layout, ...], Split], OpSharding] = Cache()


def cached_sharding(
    op: Operator, inputs: tuple[Layout, ...], split: Split = REPLICATE
) -> OpSharding:
    """Returns how an operator runs on inputs with these layouts, from a cache."""
    key = (op, inputs, split)
    return _steps.current.get(key) or _steps.add(key, op.sharding(inputs, split))


def layout_of(x: Tensor, group: RankGroup) -> Layout:
    """Returns the layout of a tensor. A plain tensor is a replicated value."""
    return (
        x.placement
        if isinstance(x, HetTensor)
        else _replicated(tuple(x.shape), group.size)
    )


@lru_cache(maxsize=8192)
def _replicated(shape: Shape, world: int) -> Layout:
    return Layout.replicated(shape, world)


def to_layout(x: Tensor, read: Layout | ReadRegion, group: RankGroup) -> Tensor:
    """Returns this rank's part of a tensor as an operator reads it.

    Args:
        x: a HetTensor, or a plain tensor that is replicated.
        read: the layout or region that the operator reads.
        group: the ranks.
    """
    if isinstance(x, HetTensor):
        if x.placement is read:
            return x.local
        if x.pending is not None and all(
            box == Box.whole(read.shape) for box in read.boxes
        ):
            return x.whole()  # without autograd, for which a need and a replica differ
        return redistribute_local(group, x.local, x.placement, read)
    if isinstance(read, Layout) and read.kind == "replicated":
        return x
    if is_replica(x):
        return local_slice(
            synced_grad(group, x), Box.whole(tuple(x.shape)), read.boxes[group.rank]
        )
    return redistribute_local(
        group, x, Layout.replicated(tuple(x.shape), group.size), read
    )


def empty_output(shape: tuple[int, ...], *sources: Tensor | None) -> Tensor:
    """Returns an empty tensor whose backward reaches all sources.

    Every rank thereby takes part in every exchange of the backward pass.

    Args:
        shape: of the result.
        sources: tensors of the graph; the first one gives the dtype.
    """
    first, *rest = (x for x in sources if x is not None)
    reached = sum((x.sum() for x in rest), first.sum(dtype=first.dtype))
    return (reached + first.new_zeros(shape)).to(first.dtype)


def differentiable_gradients(
    compute: Callable[..., Tensor], inputs: Sequence[Tensor | None], g: Tensor
) -> tuple[Tensor | None, ...]:
    """Returns gradients as functions that autograd can differentiate again.

    An autograd function uses it in a backward with ``create_graph=True``: the result is
    computed again by operators that autograd knows, and these are differentiated.

    Args:
        compute: computes the result from ``inputs``; all ranks call it alike.
        inputs: what the backward returns gradients for; None, or a tensor without a
            gradient, gives None.
        g: the gradient of the result.
    """
    with torch.enable_grad():
        # Aliases, at which autograd stops: parameters of one bucket have one node, to
        # which it would go through x too.
        aliases = [x.view_as(x) if x is not None else None for x in inputs]
        wanted = [x for x in aliases if x is not None and x.requires_grad]
        y = compute(*aliases)
        if not y.requires_grad:  # a rank without parameters and without rows
            return (None,) * len(inputs)
        found = iter(
            torch.autograd.grad(y, wanted, g, create_graph=True, allow_unused=True)
        )
    return tuple(
        next(found) if x is not None and x.requires_grad else None for x in inputs
    )


def uncounted(gradient: Tensor) -> Tensor:
    """Returns the gradient of a bias that another rank adds.

    It has the value of that rank's gradient, but contributes nothing to the gradient of the
    gradient: the cotangent of a partial value is the same on every rank, contributions to
    its gradient add up, and so only one rank may contribute.
    """
    return _Uncounted.apply(gradient) if torch.is_grad_enabled() else gradient


class _Uncounted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return torch.zeros_like(g)


def tie_to_graph(y: Tensor, *sources: Tensor) -> Tensor:
    """Returns ``y``, with the gradients of all sources in its graph, if only as zeros.

    Ranks have different parts, some of them empty. Where gradients are differentiated
    again, every rank must reach the same exchanges; a gradient that one rank leaves out
    would cut them off.
    """
    return _TieToGraph.apply(y, *sources)  # type: ignore[no-any-return]


class _TieToGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, *sources: Tensor) -> Tensor:
        ctx.save_for_backward(*sources)
        return y.data  # nobody else has y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
        sources = ctx.saved_tensors
        return g, *(_Zeros.apply(k, *sources, g) for k in range(len(sources)))


class _Zeros(torch.autograd.Function):
    """Zeros like one of the tensors, as a function of all of them."""

    @staticmethod
    def forward(ctx: Any, index: int, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.zeros_like(tensors[index])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        return None, *(_Zeros.apply(k, *tensors, g) for k in range(len(tensors)))


class _Cropped(torch.autograd.Function):
    """`torch.narrow` whose gradient keeps the memory format of an image.

    The gradient of torch's own is always contiguous.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, dim: int, span: Span) -> Tensor:
        ctx.pads = *(0, 0) * (y.dim() - 1 - dim), span[0], y.shape[dim] - span[1]
        return y.narrow(dim, span[0], span[1] - span[0]).data  # nobody else has y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return F.pad(g, ctx.pads), None, None


def cropped(y: Tensor, dim: int, span: Span) -> Tensor:
    """Returns a view of what is within a span of one dimension."""
    return y if span == (0, y.shape[dim]) else _Cropped.apply(y, dim, span)


def autocast(
    x: Tensor, w: Tensor, b: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns a layer's input and parameters in the dtype of autocast, where that is on.

    As in torch, float64 stays.
    """
    kind = w.device.type
    if not torch.is_autocast_enabled(kind) or w.dtype == torch.float64:
        return x, w, b
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), w.to(dtype), b.to(dtype) if b is not None else None
