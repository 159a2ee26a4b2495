"""Normalizations."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ..layout import Layout, Move, Shape, from_each, summed
from ..rules import REPLICATE, Gather, Split, Step
from .base import on_parts


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
        return Step((x,), x, forward=(from_each((2, channels), world),), backward=(summed((2, channels), world),))


@dataclass(frozen=True)
class GroupNorm:
    """Group norm of (N, C, ...); instance norm has a channel per group. Ranks that share a group combine moments."""

    shape: Shape
    groups: int

    @property
    def channels(self) -> int:
        """The channels of a group."""
        return self.shape[1] // self.groups

    def step(self, inputs: tuple[Layout, ...], split: Split = REPLICATE) -> Step:
        x = on_parts(inputs[0])
        if x.kind != "sharded" or x.dim is None:
            return Gather(self.shape).step(inputs)
        if x.dim == 0 or (x.dim == 1 and not any(b.lo[1] % self.channels for b in x.boxes)):
            return Step((x,), x, contributes=True)
        if len(self.shape) == 2:
            return Gather(self.shape).step(inputs)
        two = (2, self.shape[0] * self.groups)
        return Step((x,), x, contributes=True, forward=(from_each(two, x.world),), backward=(summed(two, x.world),))

    def shares(self, x: Layout) -> tuple[tuple[float, ...], ...]:
        """By rank and group: the share of a group's elements, in any sample, that the rank holds."""
        whole = self.channels * prod(self.shape[2:])
        starts = range(0, self.shape[1], self.channels)
        return tuple(
            tuple(max(min(b.hi[1], c + self.channels) - max(b.lo[1], c), 0) * prod(b.shape[2:]) / whole for c in starts)
            for b in x.boxes
        )


@dataclass(frozen=True)
class OwnNorm:
    """A normalization over whole ``dims``, such as layer norm: as called, where the cut is along another one."""

    shape: Shape
    dims: tuple[int, ...]

    def step(self, inputs: tuple[Layout, ...], split: Split = REPLICATE) -> Step:
        x = on_parts(inputs[0])
        if x.kind != "sharded" or x.dim is None or x.dim in self.dims:
            return Gather(self.shape).step(inputs)
        return Step((x,), x, contributes=True)
