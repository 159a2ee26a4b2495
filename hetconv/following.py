"""Operators that follow their inputs: their rules say how the result lies, given how the inputs lie. Pure.

Adding an operator is a class here, a reader in `calls` and an entry in `ops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from .layout import Box, Layout, Move, Need, Shape, apportion, summed
from .rules import REPLICATE, Gather, Split, Step, window_need
from .spec import Window

ACTIVATIONS = ("relu", "relu6", "hardtanh", "leaky_relu", "silu", "gelu")
"""Elementwise functions that the kernels compute as they store a result; of hardtanh those that are a relu6."""


def on_parts(x: Layout) -> Layout:
    """A partial sum as its consumers on parts want it: scattered over channels in the proportions of its shares."""
    if x.kind != "partial" or len(x.shape) < 2:
        return Layout.replicated(x.shape, x.world) if x.kind == "partial" else x
    return Layout.sharded(x.shape, 1, apportion(x.shape[1], x.shares))


def recut(x: Layout, shape: Shape, dim: int, sizes: Sequence[int]) -> Layout:
    """The layout of an output of ``shape`` that is cut along ``dim`` as ``x`` is cut along its own dimension."""
    return Layout.sharded(shape, dim, sizes) if x.kind == "sharded" else Layout.replicated(shape, x.world)


@dataclass(frozen=True)
class Pointwise:
    """Elementwise on one or more inputs with broadcasting. The result is cut as the first sharded input is."""

    shape: Shape

    def step(self, inputs: tuple[Layout, ...], split: Split = REPLICATE) -> Step:
        lead = next((y for x in inputs if (y := self._lifted(on_parts(x))) is not None), None)
        if lead is None:
            return Gather(self.shape).step(inputs)
        return Step(tuple(self._read(x.shape, lead) for x in inputs), lead, contributes=True)

    def _lifted(self, x: Layout) -> Layout | None:
        """The output layout that a sharded input suggests, unless it is cut where it is broadcast."""
        if x.kind != "sharded" or x.dim is None:
            return None
        dim = x.dim + len(self.shape) - len(x.shape)
        return Layout.sharded(self.shape, dim, x.sizes) if self.shape[dim] == x.shape[x.dim] else None

    def _read(self, shape: Shape, lead: Layout) -> Layout | Need:
        if shape == self.shape:
            return lead
        skip = len(self.shape) - len(shape)
        own = [Box(b.lo[skip:], b.hi[skip:]) for b in lead.boxes]
        clipped = [
            Box(
                tuple(min(a, n - 1) for a, n in zip(b.lo, shape, strict=True)) if b.numel else b.lo,
                tuple(map(min, b.hi, shape)),
            )
            for b in own
        ]
        return Need(shape, tuple(clipped))


@dataclass(frozen=True)
class BatchNorm:
    """Batch norm over dimension 1. In training every rank needs the statistics of all parts.

    ``tracks``: running statistics are updated, so a cut over channels must gather them.
    """

    shape: Shape
    training: bool
    tracks: bool

    def step(self, inputs: tuple[Layout, ...], split: Split = REPLICATE) -> Step:
        x = on_parts(inputs[0])
        if x.kind != "sharded" or x.dim is None:
            return Gather(self.shape).step(inputs)
        channels, world = self.shape[1], x.world
        if not self.training:
            return Step((x,), x, contributes=True)
        if x.dim == 1:
            stats = Layout.sharded((2, channels), 1, x.sizes)
            gathered = (Move(stats, Layout.replicated((2, channels), world)),) if self.tracks else ()
            return Step((x,), x, contributes=True, forward=gathered)
        each = Layout.sharded((world, 2, channels), 0, (1,) * world)
        return Step(
            (x,),
            x,
            forward=(Move(each, Layout.replicated(each.shape, world)),),
            backward=(summed((2, channels), world),),
        )


@dataclass(frozen=True)
class Pool:
    """Max or average pooling with one window per spatial dimension."""

    kind: Literal["max", "average"]
    shape: Shape
    windows: tuple[Window, Window]
    count_padding: bool = True

    def step(self, inputs: tuple[Layout, ...], split: Split = REPLICATE) -> Step:
        source = inputs[0]
        x = on_parts(source)
        if x.kind != "sharded" or x.dim is None:
            return Gather(self.shape).step(inputs)
        if x.dim < 2:
            return Step((x,), recut(x, self.shape, x.dim, x.sizes))
        y = recut(x, self.shape, x.dim, apportion(self.shape[x.dim], x.sizes))
        return Step((window_need(x.shape, y, x.dim, self.windows[x.dim - 2]),), y)


@dataclass(frozen=True)
class GlobalAveragePool:
    """Adaptive average pooling to 1 x 1. A cut over space gives summands of the mean."""

    shape: Shape

    def step(self, inputs: tuple[Layout, ...], split: Split = REPLICATE) -> Step:
        x = inputs[0]
        if x.kind == "partial":
            return Step((x,), Layout.partial(self.shape, x.world, x.shares))
        if x.kind != "sharded" or x.dim is None:
            return Gather(self.shape).step(inputs)
        if x.dim < 2:
            return Step((x,), recut(x, self.shape, x.dim, x.sizes))
        return Step((x,), Layout.partial(self.shape, x.world, x.sizes))


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
