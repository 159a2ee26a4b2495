"""Elementwise functions and joins."""

from __future__ import annotations

from dataclasses import dataclass

from ..layout import Box, Layout, Need, Shape
from ..rules import REPLICATE, Gather, Split, Step
from .base import on_parts

ACTIVATIONS = ("relu", "relu6", "hardtanh", "leaky_relu", "silu", "gelu")
"""Elementwise functions that the kernels compute as they store a result; of hardtanh those that are a relu6."""


@dataclass(frozen=True)
class PRelu:
    """x where it is positive, else x times the slope of its channel, or the one slope."""

    shape: Shape

    def step(self, inputs: tuple[Layout, ...], split: Split = REPLICATE) -> Step:
        x, slopes = on_parts(inputs[0]), inputs[1]
        if x.kind != "sharded" or x.dim is None:
            return Gather(self.shape).step(inputs)
        by_channel = x.dim == 1 and slopes.shape != (1,)
        own = tuple(Box((b.lo[1],), (b.hi[1],)) if by_channel else Box.whole(slopes.shape) for b in x.boxes)
        return Step((x, Need(slopes.shape, own)), x, contributes=True)


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
        if x.shape == self.shape:
            return x
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
