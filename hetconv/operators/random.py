"""Operators that draw random numbers: dropout, noise."""

from __future__ import annotations

from dataclasses import dataclass

from hetconv.sharding.layer_rules import REPLICATE, Gather, Split, Step
from hetconv.sharding.layout import Layout, Shape

from .base import on_parts


@dataclass(frozen=True)
class Drawn:
    """Elementwise, with a random number for each entry of the first ``dims`` dimensions and all that lies in it.

    Dropout of features draws for samples and channels, every other one for single numbers.
    """

    shape: Shape
    dims: int

    def step(self, inputs: tuple[Layout, ...], split: Split = REPLICATE) -> Step:
        x = on_parts(inputs[0])
        if x.kind != "sharded" or x.inner is None:
            return Gather(self.shape).step(inputs)
        return Step((x,), x)

    def drawn_by(self, x: Layout, rank: int) -> int:
        """The first of the ranks whose parts have the same numbers as this one's: itself where each needs its own."""
        apart = x.inner is not None and x.inner < self.dims
        return rank if apart else x.mates(rank).start


@dataclass(frozen=True)
class Like:
    """A tensor in the shape of another one, whose values are not read: it is cut alike, and nothing moves."""

    shape: Shape

    def step(self, inputs: tuple[Layout, ...], split: Split = REPLICATE) -> Step:
        x = on_parts(inputs[0])
        return Step(inputs, x) if x.kind == "sharded" else Gather(self.shape).step(inputs)


@dataclass(frozen=True)
class NoiseLike(Like):
    """Random numbers in the shape of another tensor."""
