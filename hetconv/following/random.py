"""Operators that draw random numbers: dropout, noise."""

from __future__ import annotations

from dataclasses import dataclass

from ..layout import Layout, Shape
from ..rules import REPLICATE, Gather, Split, Step
from .base import on_parts
from .creation import Like


@dataclass(frozen=True)
class Drawn:
    """Elementwise, with a random number for each entry of the first ``dims`` dimensions and all that lies in it.

    Dropout of features draws for samples and channels, every other one for single numbers.
    """

    shape: Shape
    dims: int

    def step(self, inputs: tuple[Layout, ...], split: Split = REPLICATE) -> Step:
        x = on_parts(inputs[0])
        if x.kind != "sharded" or x.dim is None:
            return Gather(self.shape).step(inputs)
        return Step((x,), x)

    def apart(self, x: Layout) -> bool:
        """Whether parts need different numbers; else they are the same ones for all parts."""
        return x.dim is not None and x.dim < self.dims


@dataclass(frozen=True)
class NoiseLike(Like):
    """Random numbers in the shape of another tensor."""
