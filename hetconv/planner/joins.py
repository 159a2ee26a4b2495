"""How operators that follow their inputs may run, by the choice that their inputs lie by. Pure.

Where inputs lie by the choices of different nodes, the operator is a join. How its
result lies is told input by input: each adds to what those before it said.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from hetconv.cost.network import Array
from hetconv.operators.base import reduce_scattered
from hetconv.operators.shapes import Cat
from hetconv.operators.views import SplitView
from hetconv.sharding.layout import Layout, ReadRegion
from hetconv.sharding.rule import OpSharding
from hetconv.sharding.split import REPLICATE, Split
from hetconv.tracing.graph import Graph, Node

# of a concatenation along its cut, where what inputs hold adds up in very many ways
MAX_JOIN_STATES = 1000


@dataclass(frozen=True, eq=False)
class Strategies:
    """How an operator may run, by a node's choice. ``reads`` of each input, and
    ``outputs``, by choice.
    """

    splits: tuple[Split, ...]
    shardings: tuple[OpSharding, ...]
    input_layouts: tuple[tuple[Layout | ReadRegion, ...], ...]
    outputs: tuple[tuple[Layout, ...], ...]

    @staticmethod
    def of(
        node: Node, splits: tuple[Split, ...], steps: tuple[OpSharding, ...]
    ) -> Strategies:
        reads = tuple(zip(*(s.input_layouts for s in steps), strict=True))
        outputs = [tuple(s.output for s in steps)] * len(node.outputs)
        if isinstance(node.op, SplitView):
            outputs = list(
                zip(
                    *(
                        [y.output for y in node.op.shardings(s.input_layouts)]  # type: ignore[arg-type]
                        for s in steps
                    ),
                    strict=True,
                )
            )
        return Strategies(splits, steps, reads, tuple(outputs))

    @staticmethod
    def unsplit(node: Node, steps: Sequence[OpSharding]) -> Strategies:
        """Of an operator that a plan does not name."""
        return Strategies.of(node, (REPLICATE,) * len(steps), tuple(steps))


class PlacementByChoice(NamedTuple):
    """Where a value lies, by the choice of ``node``; what lies in one way whatever is
    chosen has no node.
    """

    node: str | None
    layouts: tuple[Layout, ...]


Link = tuple[Array, Array]


def following_strategies(
    node: Node, wholes: tuple[Layout, ...], inputs: Sequence[PlacementByChoice]
) -> Strategies:
    """Of an operator whose inputs lie by the choice of one node, if any. ``wholes``:
    the inputs, replicated.
    """
    count = max((len(x.layouts) for x in inputs), default=1)
    rows = list(
        zip(
            *(x.layouts if x.node is not None else x.layouts * count for x in inputs),
            strict=True,
        )
    )
    return Strategies.unsplit(
        node, [node.op.sharding(row, REPLICATE) for row in rows or [wholes]]
    )


def led_by(
    node: Node, wholes: tuple[Layout, ...], inputs: Sequence[PlacementByChoice], k: int
) -> list[OpSharding | None]:
    """By how input ``k`` lies: how the operator runs if this input leads it, or None if
    it does not.
    """
    steps = (
        node.op.sharding((*wholes[:k], x, *wholes[k + 1 :]), REPLICATE)
        for x in inputs[k].layouts
    )
    return [s if s.output.kind != "replicated" else None for s in steps]


@dataclass(frozen=True)
class JoinState:
    """What inputs say of how the result lies: as one of them leads it, or nothing.

    A concatenation along its cut is cut by what each rank has ``held`` of all inputs,
    which lie as in ``example``. Of an input that leads, ``example`` is its layout, and
    ``lead`` its position.
    """

    sharding: OpSharding | None
    held: tuple[int, ...] = ()
    example: tuple[Layout, ...] = field(default=(), compare=False)
    lead: int = field(default=0, compare=False)

    def then(self, other: JoinState) -> JoinState:
        if self.sharding is not None or other.sharding is not None:
            return self if self.sharding is not None else other
        held = (
            tuple(map(sum, zip(self.held, other.held, strict=True)))
            if self.held and other.held
            else ()
        )
        return JoinState(
            None, held or self.held or other.held, self.example + other.example
        )


def rebased(
    states: Sequence[JoinState], node: Node, wholes: tuple[Layout, ...]
) -> list[JoinState]:
    """The same states, of another concatenation that begins with these inputs."""
    steps: dict[Layout, OpSharding] = {}  # by how the result of the one before lies
    found = []
    for said in states:
        if said.sharding is None:
            found.append(said)
            continue
        if said.sharding.output not in steps:
            inputs = (*wholes[: said.lead], *said.example, *wholes[said.lead + 1 :])
            steps[said.sharding.output] = node.op.sharding(inputs, REPLICATE)
        found.append(replace(said, sharding=steps[said.sharding.output]))
    return found


def join_states(
    node: Node, wholes: tuple[Layout, ...], inputs: Sequence[PlacementByChoice]
) -> tuple[list[Link], Strategies]:
    """A join has a state for each input after the first: what was said before, and what
    this input says, if it counts.

    Gives `extend` for each of these inputs, and how the operator runs by the last state.
    """
    for adds in (True, False):
        before, links = votes(node, wholes, inputs, 0, adds), []
        for k in range(1, len(inputs)):
            link, before = extend(before, votes(node, wholes, inputs, k, adds), before)
            links.append(link)
            if adds and len(before) > MAX_JOIN_STATES:
                break
        else:
            break
    return links, finalize(node, wholes, before)


def extend(
    before: Sequence[JoinState], own: Sequence[JoinState], marks: Sequence[Hashable]
) -> tuple[Link, list[JoinState]]:
    """(states before, states) and (ways in which an input lies, states): 0 where they
    fit, else inf; the states.

    A state goes on from those before that have the same of ``marks``.
    """
    states: list[tuple[Hashable, JoinState, JoinState | None]] = []
    for mark, said in dict(zip(marks, before, strict=True)).items():
        states += (
            [(mark, said, now) for now in dict.fromkeys(own)]
            if said.sharding is None
            else [(mark, said, None)]
        )
    goes_on = [[mark == m for mark, _, _ in states] for m in marks]
    agrees = [[now is None or now == o for _, _, now in states] for o in own]
    link = np.where(goes_on, 0.0, np.inf), np.where(agrees, 0.0, np.inf)
    return link, [
        said.then(now) if now is not None else said for _, said, now in states
    ]


def finalize(
    node: Node, wholes: tuple[Layout, ...], states: Sequence[JoinState]
) -> Strategies:
    """How the operator runs, by what all inputs together say."""
    gathered = node.op.sharding(wholes, REPLICATE)
    steps = (
        s.sharding or (node.op.sharding(s.example, REPLICATE) if s.held else gathered)
        for s in states
    )
    return Strategies.unsplit(node, list(steps))


def votes(
    node: Node,
    wholes: tuple[Layout, ...],
    inputs: Sequence[PlacementByChoice],
    k: int,
    adds: bool,
) -> list[JoinState]:
    """By how input ``k`` lies. ``adds``: whether a concatenation along the cut counts
    what each input holds.
    """
    found = []
    for x, step in zip(inputs[k].layouts, led_by(node, wholes, inputs, k), strict=True):
        along = (
            adds
            and isinstance(node.op, Cat)
            and reduce_scattered(x).dim == node.op.dim != 1
        )
        found.append(
            JoinState(None, reduce_scattered(x).sizes, (x,))
            if along
            else JoinState(step, (), (x,), k)
        )
    return found


def nested_concats(graph: Graph) -> set[Node]:
    """The concatenations of channels whose inputs begin as another's do, or go on: the
    layers of a dense block.
    """
    cats = [n for n in graph.nodes if isinstance(n.op, Cat) and n.op.dim == 1]
    known = {n.inputs for n in cats}
    longer = {
        n for n in cats if any(n.inputs[:k] in known for k in range(1, len(n.inputs)))
    }
    begun = {n.inputs[:k] for n in longer for k in range(1, len(n.inputs))}
    return longer | {n for n in cats if n.inputs in begun}
