"""Operators that give the same numbers another shape or place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from hetconv.sharding.hierarchical import HierarchicalLayout
from hetconv.sharding.layer_rules import REPLICATE, Gather, OpSharding, Split
from hetconv.sharding.layout import Layout, ReadRegion, Shape, apportion, spans

from .base import (
    Args,
    Call,
    Kwargs,
    Reader,
    arg,
    dim_of,
    inputs_unless,
    per_sample,
    reduce_scattered,
    resharded,
    slab_reads,
)


@dataclass(frozen=True)
class PixelShuffle:
    """(N, C r^2, H, W) -> (N, C, H r, W r)."""

    shape: Shape
    factor: int

    @per_sample()
    def sharding(
        self, inputs: tuple[Layout, ...], split: Split = REPLICATE
    ) -> OpSharding:
        x, r = inputs[0], self.factor
        if x.kind == "partial":
            return OpSharding((x,), Layout.partial(self.shape, x.world, x.shares))
        if x.kind == "sharded" and x.dim in (0, 2, 3):
            scale = 1 if x.dim == 0 else r
            return OpSharding(
                (x,), resharded(x, self.shape, x.dim, [s * scale for s in x.sizes])
            )
        if (
            x.kind == "sharded"
            and x.dim == 1
            and all(s % (r * r) == 0 for s in x.sizes)
        ):
            return OpSharding(
                (x,), resharded(x, self.shape, 1, [s // (r * r) for s in x.sizes])
            )
        return Gather(self.shape).sharding(inputs)


@dataclass(frozen=True)
class Reshape:
    """The same numbers in the same order in another shape."""

    shape: Shape

    @per_sample()
    def sharding(
        self, inputs: tuple[Layout, ...], split: Split = REPLICATE
    ) -> OpSharding:
        x = inputs[0]
        if x.kind == "partial":
            return OpSharding((x,), Layout.partial(self.shape, x.world, x.shares))
        if x.kind != "sharded" or x.dim is None or not prod(x.shape):
            return Gather(self.shape).sharding(inputs)
        before, after, n = (
            prod(x.shape[: x.dim]),
            prod(x.shape[x.dim + 1 :]),
            x.shape[x.dim],
        )
        # An output dimension with as much before it as the cut one: a slice of the one
        # is a slice of the other, where it is a whole number of its entries.
        starts = [d for d in range(len(self.shape)) if prod(self.shape[:d]) == before]
        for d in sorted(starts, key=lambda d: (self.shape[d] != n, -self.shape[d])):
            entry = prod(self.shape[d + 1 :])
            if all(size * after % entry == 0 for size in x.sizes):
                return OpSharding(
                    (x,),
                    resharded(
                        x, self.shape, d, [size * after // entry for size in x.sizes]
                    ),
                )
        return Gather(self.shape).sharding(inputs)


@dataclass(frozen=True)
class Stack:
    """A new dimension ``dim``, along which inputs that are cut alike follow each other."""

    shape: Shape
    dim: int

    @per_sample(inputs_unless(lambda op: op.dim == 0))
    def sharding(
        self, inputs: tuple[Layout, ...], split: Split = REPLICATE
    ) -> OpSharding:
        lead = next(
            (
                x
                for x in map(reduce_scattered, inputs)
                if x.kind == "sharded" and x.dim is not None
            ),
            None,
        )
        if lead is None or lead.dim is None:
            return Gather(self.shape).sharding(inputs)
        reads = tuple(Layout.sharded(x.shape, lead.dim, lead.sizes) for x in inputs)
        return OpSharding(
            reads,
            resharded(lead, self.shape, lead.dim + (lead.dim >= self.dim), lead.sizes),
        )


def _whole(x: Layout) -> Layout:
    return Layout.replicated(x.shape, x.world)


@dataclass(frozen=True)
class Cat:
    """Concatenation along ``dim`` of inputs that are cut alike along another dimension,
    or along ``dim`` itself.

    There the parts move to where they belong in the result, but for channels, which are
    gathered: the convolution that most often follows reads all of them, and they would
    travel twice.
    """

    shape: Shape
    dim: int

    def sharding(
        self, inputs: tuple[Layout, ...], split: Split = REPLICATE
    ) -> OpSharding:
        """By the first input that is cut otherwise; what inputs hold along ``dim``
        counts where there is none.
        """
        one_level = tuple(
            _whole(x) if isinstance(x, HierarchicalLayout) else x for x in inputs
        )
        if one_level != inputs:
            sharding = self._sharding(
                tuple(
                    _whole(x) if reduce_scattered(x).dim == self.dim else x
                    for x in inputs
                ),
                split,
            )
            if sharding.output.kind != "replicated":
                return sharding
        return self._sharding(one_level, split)

    @per_sample(inputs_unless(lambda op: op.dim == 0))
    def _sharding(self, inputs: tuple[Layout, ...], split: Split) -> OpSharding:
        parts = [
            x
            for x in map(reduce_scattered, inputs)
            if x.kind == "sharded" and x.dim is not None
        ]
        lead = next((x for x in parts if x.dim != self.dim), None)
        if lead is not None and lead.dim is not None:
            reads = tuple(Layout.sharded(x.shape, lead.dim, lead.sizes) for x in inputs)
            return OpSharding(reads, resharded(lead, self.shape, lead.dim, lead.sizes))
        held = tuple(map(sum, zip(*(x.sizes for x in parts), strict=True)))
        if self.dim == 1 or not any(held):
            return Gather(self.shape).sharding(inputs)
        y = resharded(
            parts[0], self.shape, self.dim, apportion(self.shape[self.dim], held)
        )
        return OpSharding(tuple(self._needs(inputs, y)), y)

    def _needs(self, inputs: tuple[Layout, ...], y: Layout) -> Iterator[ReadRegion]:
        """What each rank's part of the result holds of every input."""
        for x, (lo, hi) in zip(
            inputs, spans([x.shape[self.dim] for x in inputs]), strict=True
        ):
            own = ((b.lo[self.dim], b.hi[self.dim]) for b in y.boxes)
            yield slab_reads(
                x.shape,
                self.dim,
                [(min(max(a, lo), hi) - lo, min(max(b, lo), hi) - lo) for a, b in own],
            )


def _pixel_shuffle(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, r = arg(args, kwargs, 0, "input"), arg(args, kwargs, 1, "upscale_factor")
    if x.dim() != 4 or x.shape[1] % (r * r):
        return None
    n, c, h, w = x.shape
    return Call(PixelShuffle((n, c // (r * r), h * r, w * r), r), (x,))


def _flatten(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x = arg(args, kwargs, 0, "input")
    if x.dim() == 0:
        return None
    start, end = (
        arg(args, kwargs, i, n, d) % x.dim()
        for i, n, d in ((1, "start_dim", 0), (2, "end_dim", -1))
    )
    if start >= end:
        return None
    return Call(
        Reshape(
            (*x.shape[:start], prod(x.shape[start : end + 1]), *x.shape[end + 1 :])
        ),
        (x,),
    )


def sizes_of(args: Args, kwargs: Kwargs, name: str) -> tuple[int, ...] | None:
    """Integers given one by one, as a sequence, or by keyword; None for anything else."""
    given = args[1:] if len(args) > 1 else (kwargs.get(name),)
    listed = (
        tuple(given[0])
        if len(given) == 1 and isinstance(given[0], Sequence)
        else tuple(given)
    )
    return listed if all(type(n) is int for n in listed) else None


def _filled(shape: tuple[int, ...], total: int) -> tuple[int, ...] | None:
    """A shape with the extent that a single -1 stands for; None where torch has
    something to say.
    """
    known = prod(n for n in shape if n != -1)
    if shape.count(-1) == 1 and known > 0 and total % known == 0:
        return tuple(total // known if n == -1 else n for n in shape)
    return shape if min(shape, default=0) >= 0 and known == total else None


def _reshape(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, shape = (
        arg(args, kwargs, 0, "input"),
        sizes_of(args, kwargs, "size" if name == "view" else "shape"),
    )
    filled = (
        _filled(shape, x.numel())
        if isinstance(x, Tensor) and shape is not None
        else None
    )
    return Call(Reshape(filled), (x,)) if filled is not None else None


def _unflatten(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, dim, sizes = (
        arg(args, kwargs, i, n) for i, n in enumerate(("input", "dim", "sizes"))
    )
    dim = dim_of(dim, x.dim())
    if dim is None or not isinstance(sizes, Sequence):
        return None
    filled = _filled(tuple(sizes), x.shape[dim])
    return (
        Call(Reshape((*x.shape[:dim], *filled, *x.shape[dim + 1 :])), (x,))
        if filled
        else None
    )


def _joined(args: Args, kwargs: Kwargs) -> tuple[tuple[Tensor, ...], Any] | None:
    """(the tensors of a concatenation, the dimension), unless they differ in rank."""
    tensors, dim = arg(args, kwargs, 0, "tensors"), arg(args, kwargs, 1, "dim", 0)
    same = isinstance(tensors, Sequence) and len({x.dim() for x in tensors}) == 1
    return (tuple(tensors), dim) if same and isinstance(dim, int) else None


def _cat(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    joined = _joined(args, kwargs)
    if joined is None:
        return None
    tensors, dim = joined
    dim %= tensors[0].dim()
    shape = list(tensors[0].shape)
    shape[dim] = sum(x.shape[dim] for x in tensors)
    return Call(Cat(tuple(shape), dim), tensors)


def _stack(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    joined = _joined(args, kwargs)
    if joined is None or len({x.shape for x in joined[0]}) != 1:
        return None
    tensors, shape = joined[0], joined[0][0].shape
    dim = dim_of(joined[1], len(shape) + 1)
    if dim is None:
        return None
    return Call(Stack((*shape[:dim], len(tensors), *shape[dim:]), dim), tensors)


READERS: dict[str, Reader] = {
    "pixel_shuffle": _pixel_shuffle,
    "flatten": _flatten,
    "cat": _cat,
    "stack": _stack,
    "reshape": _reshape,
    "view": _reshape,
    "unflatten": _unflatten,
}
