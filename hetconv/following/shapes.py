"""Operators that give the same numbers another shape or place."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ..layout import Layout, Shape
from ..rules import REPLICATE, Gather, Split, Step
from .base import on_parts, recut


@dataclass(frozen=True)
class PixelShuffle:
    """(N, C r^2, H, W) -> (N, C, H r, W r)."""

    shape: Shape
    factor: int

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
class Flatten:
    """Dimensions ``start`` to ``end`` (inclusive) become one."""

    shape: Shape
    start: int
    end: int

    def step(self, inputs: tuple[Layout, ...], split: Split = REPLICATE) -> Step:
        x = inputs[0]
        if x.kind == "partial":
            return Step((x,), Layout.partial(self.shape, x.world, x.shares))
        if x.kind == "sharded" and x.dim is not None:
            d = x.dim
            if d < self.start:
                return Step((x,), recut(x, self.shape, d, x.sizes))
            if d > self.end:
                return Step((x,), recut(x, self.shape, d - (self.end - self.start), x.sizes))
            if prod(x.shape[self.start : d]) == 1:
                inner = prod(x.shape[d + 1 : self.end + 1])
                return Step((x,), recut(x, self.shape, self.start, [s * inner for s in x.sizes]))
        return Gather(self.shape).step(inputs)


@dataclass(frozen=True)
class Cat:
    """Concatenation along ``dim`` of inputs that are cut alike along another dimension."""

    shape: Shape
    dim: int

    def step(self, inputs: tuple[Layout, ...], split: Split = REPLICATE) -> Step:
        parts = (on_parts(x) for x in inputs)
        lead = next((x for x in parts if x.kind == "sharded" and x.dim not in (None, self.dim)), None)
        if lead is None or lead.dim is None:
            return Gather(self.shape).step(inputs)
        reads = tuple(Layout.sharded(x.shape, lead.dim, lead.sizes) for x in inputs)
        return Step(reads, recut(lead, self.shape, lead.dim, lead.sizes))
