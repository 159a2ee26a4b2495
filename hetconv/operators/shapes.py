"""Operators that reshape, concatenate or stack: the same numbers in another shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from hetconv.sharding.conv_spec import Span
from hetconv.sharding.hierarchical import HierarchicalLayout
from hetconv.sharding.layout import Layout, Layouts, ReadRegion, Shape, apportion, spans
from hetconv.sharding.rule import OpSharding
from hetconv.sharding.split import REPLICATE, Split

from .base import (
    Args,
    Call,
    Kwargs,
    PerSampleOperator,
    Reader,
    arg,
    bind,
    canonical_index,
    reduce_scattered,
    slab_reads,
    span_along,
)


@dataclass(frozen=True)
class PixelShuffle(PerSampleOperator):
    """A pixel shuffle, (N, C r^2, H, W) -> (N, C, H r, W r).

    Attributes:
        shape: Shape of the output.
        factor: The factor r.
    """

    shape: Shape
    factor: int

    def _follow(self, inputs: Layouts) -> OpSharding | None:
        x, r = inputs[0], self.factor
        if x.kind == "partial":
            return OpSharding((x,), Layout.partial(self.shape, x.world, x.shares))
        if x.dim is None or (x.dim == 1 and any(s % (r * r) for s in x.sizes)):
            return None
        if x.dim == 1:
            sizes = [size // (r * r) for size in x.sizes]
        else:
            sizes = [size if x.dim == 0 else size * r for size in x.sizes]
        return OpSharding((x,), Layout.sharded(self.shape, x.dim, sizes))


@dataclass(frozen=True)
class Reshape(PerSampleOperator):
    """The same numbers in the same order in another shape.

    Attributes:
        shape: Shape of the output.
    """

    shape: Shape

    def _follow(self, inputs: Layouts) -> OpSharding | None:
        """Returns how the operator runs; see `Operator`.

        A slice of the input is a slice along an output dimension that has as many
        entries before it, if it is a whole number of entries of that dimension.
        """
        x = inputs[0]
        if x.kind == "partial":
            return OpSharding((x,), Layout.partial(self.shape, x.world, x.shares))
        if x.dim is None or not prod(x.shape):
            return None
        before, after = prod(x.shape[: x.dim]), prod(x.shape[x.dim + 1 :])
        n, numels = x.shape[x.dim], [size * after for size in x.sizes]
        starts = [d for d in range(len(self.shape)) if prod(self.shape[:d]) == before]
        for d in sorted(starts, key=lambda d: (self.shape[d] != n, -self.shape[d])):
            entry_numel = prod(self.shape[d + 1 :])
            if all(numel % entry_numel == 0 for numel in numels):
                sizes = [numel // entry_numel for numel in numels]
                return OpSharding((x,), Layout.sharded(self.shape, d, sizes))
        return None


def _sharded_inputs(inputs: Layouts) -> list[Layout]:
    """Returns the inputs that are split along one dimension, as shards are read."""
    return [x for x in map(reduce_scattered, inputs) if x.dim is not None]


@dataclass(frozen=True)
class Stack(PerSampleOperator):
    """A stack of tensors along a new dimension.

    All inputs are read as the first sharded one is split.

    Attributes:
        shape: Shape of the output.
        dim: The new dimension.
    """

    shape: Shape
    dim: int

    def _has_samples(self, inputs: Layouts) -> Sequence[bool] | None:
        return None if self.dim == 0 else super()._has_samples(inputs)

    def _follow(self, inputs: Layouts) -> OpSharding | None:
        lead = next(iter(_sharded_inputs(inputs)), None)
        if lead is None or lead.dim is None:
            return None
        reads = tuple(Layout.sharded(x.shape, lead.dim, lead.sizes) for x in inputs)
        dim = lead.dim + (lead.dim >= self.dim)
        return OpSharding(reads, Layout.sharded(self.shape, dim, lead.sizes))


def _replicated(x: Layout) -> Layout:
    return Layout.replicated(x.shape, x.world)


@dataclass(frozen=True)
class Cat(PerSampleOperator):
    """A concatenation.

    If an input is split along another dimension, all inputs are read alike. If inputs
    are split along ``dim`` only, their shards move to where they belong in the result.
    Channels are gathered instead: the convolution that most often follows reads all of
    them, and they would move twice.

    Attributes:
        shape: Shape of the output.
        dim: Dimension along which the inputs are concatenated.
    """

    shape: Shape
    dim: int

    def sharding(self, inputs: Layouts, split: Split = REPLICATE) -> OpSharding:
        """Returns how the operator runs; see `Operator`."""
        one_level = tuple(
            _replicated(x) if isinstance(x, HierarchicalLayout) else x for x in inputs
        )
        if one_level != inputs:
            other_dims = tuple(
                _replicated(x) if reduce_scattered(x).dim == self.dim else x
                for x in inputs
            )
            sharding = super().sharding(other_dims)
            if sharding.output.kind != "replicated":
                return sharding
        return super().sharding(one_level)

    def _has_samples(self, inputs: Layouts) -> Sequence[bool] | None:
        return None if self.dim == 0 else super()._has_samples(inputs)

    def _follow(self, inputs: Layouts) -> OpSharding | None:
        leads = _sharded_inputs(inputs)
        for lead in leads:
            if lead.dim is not None and lead.dim != self.dim:
                dim, sizes = lead.dim, lead.sizes
                reads = tuple(Layout.sharded(x.shape, dim, sizes) for x in inputs)
                return OpSharding(reads, Layout.sharded(self.shape, dim, sizes))
        held = tuple(map(sum, zip(*(x.sizes for x in leads), strict=True)))
        if self.dim == 1 or not any(held):
            return None
        sizes = apportion(self.shape[self.dim], held)
        y = Layout.sharded(self.shape, self.dim, sizes)
        starts = spans([x.shape[self.dim] for x in inputs])
        regions = (
            self._region(x, span, y) for x, span in zip(inputs, starts, strict=True)
        )
        return OpSharding(tuple(regions), y)

    def _region(self, x: Layout, span: Span, y: Layout) -> ReadRegion:
        """Returns what each rank's shard of ``y`` has of the input at ``span`` of it."""
        lo, hi = span
        reads = []
        for box in y.boxes:
            start, end = span_along(box, self.dim)
            reads.append((min(max(start, lo), hi) - lo, min(max(end, lo), hi) - lo))
        return slab_reads(x.shape, self.dim, reads)


def _read_pixel_shuffle(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, r = bind(args, kwargs, input=None, upscale_factor=None)
    if x.dim() != 4 or x.shape[1] % (r * r):
        return None
    n, c, h, w = x.shape
    return Call(PixelShuffle((n, c // (r * r), h * r, w * r), r), (x,))


def _read_flatten(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, start, end = bind(args, kwargs, input=None, start_dim=0, end_dim=-1)
    if x.dim() == 0:
        return None
    start, end = start % x.dim(), end % x.dim()
    if start >= end:
        return None
    flat = prod(x.shape[start : end + 1])
    return Call(Reshape((*x.shape[:start], flat, *x.shape[end + 1 :])), (x,))


def read_sizes(args: Args, kwargs: Kwargs, name: str) -> tuple[int, ...] | None:
    """Returns integers that are given one by one, as a sequence, or by keyword.

    Args:
        args: Positional arguments of a call, the tensor first.
        kwargs: Keyword arguments of the call.
        name: Name of the keyword.

    Returns:
        The integers, or None for anything else.
    """
    given: Any = args[1:] if len(args) > 1 else (kwargs.get(name),)
    if len(given) == 1 and isinstance(given[0], Sequence):
        given = given[0]
    return tuple(given) if all(type(n) is int for n in given) else None


def _with_inferred(shape: tuple[int, ...], numel: int) -> tuple[int, ...] | None:
    """Returns a shape with the extent that a single -1 stands for."""
    known = prod(n for n in shape if n != -1)
    if shape.count(-1) == 1 and known > 0 and numel % known == 0:
        return tuple(numel // known if n == -1 else n for n in shape)
    return shape if min(shape, default=0) >= 0 and known == numel else None


def _read_reshape(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x = arg(args, kwargs, 0, "input")
    shape = read_sizes(args, kwargs, "size" if name == "view" else "shape")
    if not isinstance(x, Tensor) or shape is None:
        return None
    inferred = _with_inferred(shape, x.numel())
    return Call(Reshape(inferred), (x,)) if inferred is not None else None


def _read_unflatten(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, dim, sizes = bind(args, kwargs, input=None, dim=None, sizes=None)
    dim = canonical_index(dim, x.dim())
    if dim is None or not isinstance(sizes, Sequence):
        return None
    inferred = _with_inferred(tuple(sizes), x.shape[dim])
    if not inferred:
        return None
    return Call(Reshape((*x.shape[:dim], *inferred, *x.shape[dim + 1 :])), (x,))


def _tensors_and_dim(
    args: Args, kwargs: Kwargs
) -> tuple[tuple[Tensor, ...], int] | None:
    """Returns the arguments of cat or stack, unless the tensors differ in rank."""
    tensors, dim = bind(args, kwargs, tensors=None, dim=0)
    if not isinstance(tensors, Sequence) or not isinstance(dim, int):
        return None
    return (tuple(tensors), dim) if len({x.dim() for x in tensors}) == 1 else None


def _read_cat(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    given = _tensors_and_dim(args, kwargs)
    if given is None:
        return None
    tensors, dim = given
    dim %= tensors[0].dim()
    shape = list(tensors[0].shape)
    shape[dim] = sum(x.shape[dim] for x in tensors)
    return Call(Cat(tuple(shape), dim), tensors)


def _read_stack(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    given = _tensors_and_dim(args, kwargs)
    if given is None:
        return None
    tensors, shape = given[0], given[0][0].shape
    dim = canonical_index(given[1], len(shape) + 1)
    if dim is None or len({x.shape for x in tensors}) != 1:
        return None
    return Call(Stack((*shape[:dim], len(tensors), *shape[dim:]), dim), tensors)


READERS: dict[str, Reader] = {
    "pixel_shuffle": _read_pixel_shuffle,
    "flatten": _read_flatten,
    "cat": _read_cat,
    "stack": _read_stack,
    "reshape": _read_reshape,
    "view": _read_reshape,
    "unflatten": _read_unflatten,
}
