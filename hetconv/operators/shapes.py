"""Operators that give the same numbers another shape or place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from hetconv.sharding.hierarchical import TwoLevel
from hetconv.sharding.layer_rules import REPLICATE, Gather, Split, Step
from hetconv.sharding.layout import Layout, Need, Shape, apportion, spans

from .base import on_parts, per_sample, recut, slabs, unless


@dataclass(frozen=True)
class PixelShuffle:
    """(N, C r^2, H, W) -> (N, C, H r, W r)."""

    shape: Shape
    factor: int

    @per_sample()
    def step(self, inputs: tuple[Layout, ...], split: Split = REPLICATE) -> Step:
        x, r = inputs[0], self.factor
        if x.kind == "partial":
            return Step((x,), Layout.partial(self.shape, x.world, x.shares))
        if x.kind == "sharded" and x.dim in (0, 2, 3):
            scale = 1 if x.dim == 0 else r
            return Step((x,), recut(x, self.shape, x.dim, [s * scale for s in x.sizes]))
        if x.kind == "sharded" and x.dim == 1 and all(s % (r * r) == 0 for s in x.sizes):
            return Step((x,), recut(x, self.shape, 1, [s // (r * r) for s in x.sizes]))
        return Gather(self.shape).step(inputs)


@dataclass(frozen=True)
class Reshape:
    """The same numbers in the same order in another shape."""

    shape: Shape

    @per_sample()
    def step(self, inputs: tuple[Layout, ...], split: Split = REPLICATE) -> Step:
        x = inputs[0]
        if x.kind == "partial":
            return Step((x,), Layout.partial(self.shape, x.world, x.shares))
        if x.kind != "sharded" or x.dim is None or not prod(x.shape):
            return Gather(self.shape).step(inputs)
        before, after, n = prod(x.shape[: x.dim]), prod(x.shape[x.dim + 1 :]), x.shape[x.dim]
        # An output dimension with as much before it as the cut one: a slice of the one is a slice of the other, where
        # it is a whole number of its entries.
        starts = [d for d in range(len(self.shape)) if prod(self.shape[:d]) == before]
        for d in sorted(starts, key=lambda d: (self.shape[d] != n, -self.shape[d])):
            entry = prod(self.shape[d + 1 :])
            if all(size * after % entry == 0 for size in x.sizes):
                return Step((x,), recut(x, self.shape, d, [size * after // entry for size in x.sizes]))
        return Gather(self.shape).step(inputs)


@dataclass(frozen=True)
class Stack:
    """A new dimension ``dim``, along which inputs that are cut alike follow each other."""

    shape: Shape
    dim: int

    @per_sample(unless(lambda op: op.dim == 0))
    def step(self, inputs: tuple[Layout, ...], split: Split = REPLICATE) -> Step:
        lead = next((x for x in map(on_parts, inputs) if x.kind == "sharded" and x.dim is not None), None)
        if lead is None or lead.dim is None:
            return Gather(self.shape).step(inputs)
        reads = tuple(Layout.sharded(x.shape, lead.dim, lead.sizes) for x in inputs)
        return Step(reads, recut(lead, self.shape, lead.dim + (lead.dim >= self.dim), lead.sizes))


def _whole(x: Layout) -> Layout:
    return Layout.replicated(x.shape, x.world)


@dataclass(frozen=True)
class Cat:
    """Concatenation along ``dim`` of inputs that are cut alike along another dimension, or along ``dim`` itself.

    There the parts move to where they belong in the result, but for channels, which are gathered: the convolution that
    most often follows reads all of them, and they would travel twice.
    """

    shape: Shape
    dim: int

    def step(self, inputs: tuple[Layout, ...], split: Split = REPLICATE) -> Step:
        """By the first input that is cut otherwise; what inputs hold along ``dim`` counts where there is none."""
        one_level = tuple(_whole(x) if isinstance(x, TwoLevel) else x for x in inputs)
        if one_level != inputs:
            step = self._step(tuple(_whole(x) if on_parts(x).dim == self.dim else x for x in inputs), split)
            if step.output.kind != "replicated":
                return step
        return self._step(one_level, split)

    @per_sample(unless(lambda op: op.dim == 0))
    def _step(self, inputs: tuple[Layout, ...], split: Split) -> Step:
        parts = [x for x in map(on_parts, inputs) if x.kind == "sharded" and x.dim is not None]
        lead = next((x for x in parts if x.dim != self.dim), None)
        if lead is not None and lead.dim is not None:
            reads = tuple(Layout.sharded(x.shape, lead.dim, lead.sizes) for x in inputs)
            return Step(reads, recut(lead, self.shape, lead.dim, lead.sizes))
        held = tuple(map(sum, zip(*(x.sizes for x in parts), strict=True)))
        if self.dim == 1 or not any(held):
            return Gather(self.shape).step(inputs)
        y = recut(parts[0], self.shape, self.dim, apportion(self.shape[self.dim], held))
        return Step(tuple(self._needs(inputs, y)), y)

    def _needs(self, inputs: tuple[Layout, ...], y: Layout) -> Iterator[Need]:
        """What each rank's part of the result holds of every input."""
        for x, (lo, hi) in zip(inputs, spans([x.shape[self.dim] for x in inputs]), strict=True):
            own = ((b.lo[self.dim], b.hi[self.dim]) for b in y.boxes)
            yield slabs(x.shape, self.dim, [(min(max(a, lo), hi) - lo, min(max(b, lo), hi) - lo) for a, b in own])
