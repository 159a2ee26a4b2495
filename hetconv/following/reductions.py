"""Operators that combine the entries along some dimensions: sums, extremes, softmax."""

from __future__ import annotations

from dataclasses import dataclass

from ..layout import Layout, Shape
from ..rules import REPLICATE, Gather, Split, Step
from .base import on_parts, recut


@dataclass(frozen=True)
class Reduction:
    """One number for all entries along ``dims``. Of a sum or mean (``linear``) a part along them gives a summand."""

    shape: Shape
    dims: tuple[int, ...]
    keepdim: bool
    linear: bool

    def step(self, inputs: tuple[Layout, ...], split: Split = REPLICATE) -> Step:
        x = inputs[0]
        if self.linear and x.kind == "partial":
            return Step((x,), Layout.partial(self.shape, x.world, x.shares))
        x = on_parts(x)
        if x.kind != "sharded" or x.dim is None:
            return Gather(self.shape).step(inputs)
        if x.dim in self.dims:
            if not self.linear:
                return Gather(self.shape).step(inputs)
            return Step((x,), Layout.partial(self.shape, x.world, x.sizes))
        d = x.dim if self.keepdim else x.dim - sum(r < x.dim for r in self.dims)
        return Step((x,), recut(x, self.shape, d, x.sizes))


@dataclass(frozen=True)
class Softmax:
    """The same shape; every result depends on all entries along ``dim``."""

    shape: Shape
    dim: int

    def step(self, inputs: tuple[Layout, ...], split: Split = REPLICATE) -> Step:
        x = on_parts(inputs[0])
        if x.kind != "sharded" or x.dim in (None, self.dim):
            return Gather(self.shape).step(inputs)
        return Step((x,), x)
