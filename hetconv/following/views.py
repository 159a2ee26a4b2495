"""Operators whose results share memory with their input: other orders, ranges and pieces of its dimensions."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ..layout import Box, Layout, Shape
from ..rules import REPLICATE, Gather, Split, Step
from ..spec import Span


def cut_dims(x: Layout) -> set[int]:
    """The dimensions that some rank does not hold whole."""
    return {d for d, n in enumerate(x.shape) if any((b.lo[d], b.hi[d]) != (0, n) for b in x.boxes)}


@dataclass(frozen=True)
class View:
    """A permutation, an index, a broadcast. ``dims``: for each output dimension that of the input, None for a new one.

    ``spans`` are the ranges of the input that are seen; a dimension that is not among ``dims`` is dropped.
    """

    shape: Shape
    spans: tuple[Span, ...]
    dims: tuple[int | None, ...]

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
            lo, hi = (0, n) if d is None else self.spans[d]
            a, b = (0, n) if d is None else (box.lo[d], box.hi[d])
            ends.append((min(max(a, lo), hi) - lo, min(max(b, lo), hi) - lo))
        return Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))


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
