"""Normalizations."""

from __future__ import annotations

from dataclasses import dataclass

from ..layout import Layout, Move, Shape, summed
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
        each = Layout.sharded((world, 2, channels), 0, (1,) * world)
        return Step(
            (x,),
            x,
            forward=(Move(each, Layout.replicated(each.shape, world)),),
            backward=(summed((2, channels), world),),
        )
