"""Operators along some dimensions: sums, extremes, softmax, sorting."""

from __future__ import annotations

from dataclasses import dataclass

from hetconv.sharding.layer_rules import REPLICATE, Gather, Split, Step
from hetconv.sharding.layout import Layout, Shape

from .base import on_parts, per_sample, recut, unless


def _cut_elsewhere(inputs: tuple[Layout, ...], dims: tuple[int, ...]) -> Layout | None:
    """The layout of the first input that is cut, unless along one of ``dims``."""
    lead = next((x for x in map(on_parts, inputs) if x.kind == "sharded"), None)
    return lead if lead is not None and lead.dim is not None and lead.dim not in dims else None


@dataclass(frozen=True)
class Reduction:
    """One number for all entries along ``dims``. Of a sum or mean (``linear``) a part along them gives a summand.

    Of several inputs all are read alike; the result may be several tensors of one shape, such as values and indices.
    """

    shape: Shape
    dims: tuple[int, ...]
    keepdim: bool
    linear: bool

    @per_sample(unless(lambda op: 0 in op.dims))
    def step(self, inputs: tuple[Layout, ...], split: Split = REPLICATE) -> Step:
        x = inputs[0]
        if self.linear and x.kind == "partial":
            return Step((x,), Layout.partial(self.shape, x.world, x.shares))
        if self.linear and x.dim is not None and x.dim in self.dims:
            return Step((x,), Layout.partial(self.shape, x.world, x.sizes))
        lead = _cut_elsewhere(inputs, self.dims)
        if lead is None or lead.dim is None:
            return Gather(self.shape).step(inputs)
        d = lead.dim if self.keepdim else lead.dim - sum(r < lead.dim for r in self.dims)
        return Step((lead,) * len(inputs), recut(lead, self.shape, d, lead.sizes))


@dataclass(frozen=True)
class Along:
    """Results along ``dims`` depend on all entries there, and may be more or fewer: softmax, a running sum, sorting."""

    shape: Shape
    dims: tuple[int, ...]

    @per_sample(unless(lambda op: 0 in op.dims))
    def step(self, inputs: tuple[Layout, ...], split: Split = REPLICATE) -> Step:
        lead = _cut_elsewhere(inputs, self.dims)
        if lead is None or lead.dim is None:
            return Gather(self.shape).step(inputs)
        return Step((lead,) * len(inputs), recut(lead, self.shape, lead.dim, lead.sizes))
