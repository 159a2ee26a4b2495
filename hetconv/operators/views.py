"""Operators whose results share memory with their input: other orders, ranges and pieces of its dimensions."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from hetconv.sharding.conv_spec import Span
from hetconv.sharding.layer_rules import REPLICATE, Gather, Split, Step
from hetconv.sharding.layout import Box, Layout, Shape

from .base import cut_dims, per_sample, unless


@dataclass(frozen=True)
class View:
    """A permutation, an index, a broadcast. ``dims``: for each output dimension that of the input, None for a new one.

    ``spans`` are the ranges of the input that are seen; a dimension that is not among ``dims`` is dropped. Of a range,
    every entry is seen, or every so many as ``steps`` says.
    """

    shape: Shape
    spans: tuple[Span, ...]
    dims: tuple[int | None, ...]
    steps: tuple[int, ...] = ()

    @per_sample(unless(lambda op: op.dims[:1] != (0,)))
    def step(self, inputs: tuple[Layout, ...], split: Split = REPLICATE) -> Step:
        x = inputs[0]
        if x.kind == "partial" and prod(self.shape) <= prod(x.shape):  # else a sum of many more numbers would follow
            return Step((x,), Layout.partial(self.shape, x.world, x.shares))
        if x.kind != "sharded" or not cut_dims(x) <= set(self.dims) or 0 in self.shape:
            return Gather(self.shape).step(inputs)
        return Step((x,), Layout(self.shape, "sharded", tuple(map(self.seen, x.boxes))))

    def seen(self, box: Box) -> Box:
        """Where what a box of the input shows lies in the output; what shows nothing keeps its place in the order."""
        ends: list[Span] = []
        for d, n in zip(self.dims, self.shape, strict=True):
            ends.append((0, n) if d is None else self.taken(d, (box.lo[d], box.hi[d])))
        return Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))

    def taken(self, d: int, held: Span) -> Span:
        """Where the entries of a range of input dimension ``d`` that are seen lie in the output."""
        (lo, hi), step = self.spans[d], self.step_along(d)
        a, b = (-(-(min(max(end, lo), hi) - lo) // step) for end in held)
        return a, b

    def step_along(self, d: int) -> int:
        return self.steps[d] if self.steps else 1


@dataclass(frozen=True)
class Pieces:
    """Several views of one input, one after another along ``dim``."""

    views: tuple[View, ...]
    dim: int

    def step(self, inputs: tuple[Layout, ...], split: Split = REPLICATE) -> Step:
        return self.steps(inputs)[0]

    def steps(self, inputs: tuple[Layout, ...]) -> tuple[Step, ...]:
        """One for each view."""
        if inputs[0].kind == "sharded" and self.dim in cut_dims(inputs[0]):
            return tuple(Gather(view.shape).step(inputs) for view in self.views)
        return tuple(view.step(inputs) for view in self.views)
