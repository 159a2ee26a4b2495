"""Sharding rules: what an operator reads of its inputs, and the layout of its output.

An operator is a frozen dataclass whose method ``sharding`` is its rule. The planner
predicts what these rules cost and the runtime follows them. `layer_rules` has the
layers that a plan splits, `hetconv.operators` all operators that follow their inputs.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

from .layout import Layout, Layouts, ReadRegion, Shape
from .moves import Move
from .split import REPLICATE, Split


@dataclass(frozen=True)
class OpSharding:
    """How one operator runs on shards.

    Attributes:
        input_layouts: The layout or region to which each input is redistributed.
        output: Layout of the local results.
        partial_grads: Whether ranks use replicated parameters for their own shards
            only, so that gradients of these are all-reduced.
        forward_moves: Moves of statistics in the forward pass.
        backward_moves: Moves of statistics in the backward pass, also performed in
            their forward direction.
        joins_round: Whether statistics travel in messages of the operator that reads the
            result, so that they need no round of their own.
        shared_stats: How many running statistics each rank shares with all others; they
            are all-gathered once per forward, with those of other operators.
    """

    input_layouts: tuple[Layout | ReadRegion, ...]
    output: Layout
    partial_grads: bool = False
    forward_moves: tuple[Move, ...] = ()
    backward_moves: tuple[Move, ...] = ()
    joins_round: bool = False
    shared_stats: tuple[int, ...] = ()


class Operator(Hashable, Protocol):
    """An operator with a sharding rule."""

    def sharding(self, inputs: Layouts, split: Split) -> OpSharding:
        """Returns how the operator runs.

        Args:
            inputs: Layout of each input.
            split: How a plan splits the operator. Only the layers that a plan names
                read it; all others follow their inputs.
        """


@dataclass(frozen=True)
class Gather:
    """An operator without a rule: ranks gather its inputs and compute the whole result.

    Attributes:
        shape: Shape of the output.
    """

    shape: Shape

    def sharding(self, inputs: Layouts, split: Split = REPLICATE) -> OpSharding:
        """Returns replicated inputs and a replicated output."""
        world = inputs[0].world
        whole = tuple(Layout.replicated(x.shape, world) for x in inputs)
        return OpSharding(whole, Layout.replicated(self.shape, world))
