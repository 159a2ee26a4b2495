"""Poolings, whose windows read halos."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hetconv.sharding.conv_spec import Span, Window
from hetconv.sharding.layer_rules import REPLICATE, Gather, Split, Step, window_need
from hetconv.sharding.layout import Layout, Shape, apportion

from .base import on_parts, per_sample, recut, slabs


@dataclass(frozen=True)
class Pool:
    """Pooling with one window per spatial dimension; without windows only torch knows what an output reads.

    ``other``: neither the maximum nor the average, and without padding, so that a slab is pooled as called.
    """

    kind: Literal["max", "average", "other"]
    shape: Shape
    windows: tuple[Window, ...] = ()
    count_padding: bool = True

    @per_sample()
    def step(self, inputs: tuple[Layout, ...], split: Split = REPLICATE) -> Step:
        x = on_parts(inputs[0])
        if x.kind != "sharded" or x.dim is None or (x.dim > 1 and not self.windows):
            return Gather(self.shape).step(inputs)
        if x.dim < 2:
            return Step((x,), recut(x, self.shape, x.dim, x.sizes))
        y = recut(x, self.shape, x.dim, apportion(self.shape[x.dim], x.sizes))
        return Step((window_need(x.shape, y, x.dim, self.windows[x.dim - 2]),), y)


@dataclass(frozen=True)
class AdaptivePool:
    """Output i of m pools the inputs from floor(i n / m) to ceil((i + 1) n / m), of n, in each spatial dimension."""

    kind: Literal["max", "average"]
    shape: Shape

    @per_sample()
    def step(self, inputs: tuple[Layout, ...], split: Split = REPLICATE) -> Step:
        x = on_parts(inputs[0])
        if x.kind != "sharded" or x.dim is None:
            return Gather(self.shape).step(inputs)
        if x.dim < 2:
            return Step((x,), recut(x, self.shape, x.dim, x.sizes))
        y = recut(x, self.shape, x.dim, apportion(self.shape[x.dim], x.sizes))
        reads = [self.reads(x.dim, x.shape[x.dim], (b.lo[x.dim], b.hi[x.dim])) for b in y.boxes]
        return Step((slabs(x.shape, x.dim, reads),), y)

    def reads(self, dim: int, n: int, out: Span) -> Span:
        """The inputs, of ``n`` along ``dim``, that the outputs ``out`` pool."""
        m = self.shape[dim]
        return (out[0] * n // m, -(-out[1] * n // m)) if out[0] < out[1] else (0, 0)


@dataclass(frozen=True)
class GlobalAveragePool:
    """Adaptive average pooling to one pixel. A cut over space gives summands of the mean."""

    shape: Shape

    @per_sample()
    def step(self, inputs: tuple[Layout, ...], split: Split = REPLICATE) -> Step:
        x = inputs[0]
        if x.kind == "partial":
            return Step((x,), Layout.partial(self.shape, x.world, x.shares))
        if x.kind != "sharded" or x.dim is None:
            return Gather(self.shape).step(inputs)
        if x.dim < 2:
            return Step((x,), recut(x, self.shape, x.dim, x.sizes))
        return Step((x,), Layout.partial(self.shape, x.world, x.sizes))
