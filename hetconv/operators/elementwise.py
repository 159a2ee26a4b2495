"""Elementwise functions and joins."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetconv.sharding.layer_rules import REPLICATE, Gather, Split, Step
from hetconv.sharding.layout import Box, Layout, Need, Shape

from .base import cut_dims, on_parts

ACTIVATIONS = ("relu", "relu6", "hardtanh", "leaky_relu", "silu", "gelu")
"""Elementwise functions that the kernels compute as they store a result; of hardtanh those that are a relu6."""


@dataclass(frozen=True)
class PRelu:
    """x where it is positive, else x times the slope of its channel, or the one slope."""

    shape: Shape

    def step(self, inputs: tuple[Layout, ...], split: Split = REPLICATE) -> Step:
        x, slopes = on_parts(inputs[0]), inputs[1]
        if x.kind != "sharded":
            return Gather(self.shape).step(inputs)
        by_channel = slopes.shape != (1,)
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
        if x.kind != "sharded" or x.shape == self.shape:
            return x if x.kind == "sharded" else None
        skip, cut = len(self.shape) - len(x.shape), cut_dims(x)
        if any(self.shape[skip + d] != x.shape[d] for d in cut):
            return None
        boxes = [Box.whole(self.shape)] * x.world
        for d in cut:
            boxes = [b.along(skip + d, own.lo[d], own.hi[d]) for b, own in zip(boxes, x.boxes, strict=True)]
        if skip:
            return Layout(self.shape, "sharded", tuple(boxes))
        return replace(x, shape=self.shape, boxes=tuple(boxes))

    def _read(self, shape: Shape, lead: Layout) -> Layout | Need:
        if shape == self.shape:
            return lead
        skip = len(self.shape) - len(shape)
        own = (Box(b.lo[skip:], b.hi[skip:]) for b in lead.boxes)
        return Need(shape, tuple(Box(tuple(map(_first, b.lo, b.hi, shape)), tuple(map(min, b.hi, shape))) for b in own))


def _first(lo: int, hi: int, n: int) -> int:
    """Where [lo, hi) begins in a dimension of ``n`` entries, one of them if it is broadcast."""
    return min(lo, n - 1) if lo < hi else min(lo, n)
