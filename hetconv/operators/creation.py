"""New tensors in the shape of another one."""

from __future__ import annotations

from dataclasses import dataclass

from hetconv.sharding.layer_rules import REPLICATE, Gather, Split, Step
from hetconv.sharding.layout import Layout, Shape

from .base import on_parts


@dataclass(frozen=True)
class Like:
    """A tensor in the shape of another one, whose values are not read: it is cut alike, and nothing moves."""

    shape: Shape

    def step(self, inputs: tuple[Layout, ...], split: Split = REPLICATE) -> Step:
        x = on_parts(inputs[0])
        return Step(inputs, x) if x.kind == "sharded" else Gather(self.shape).step(inputs)
