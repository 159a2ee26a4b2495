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
from hetconv.operators.base import on_parts
from hetconv.operators.shapes import Cat
from hetconv.operators.views import Pieces
from hetconv.sharding.layer_rules import REPLICATE, Split, Step
from hetconv.sharding.layout import Layout, Need
from hetconv.tracing.graph import Graph, Node

# of a concatenation along its cut, where what inputs hold adds up in very many ways
MOST_STATES = 1000


@dataclass(frozen=True, eq=False)
class Ways:
    """How an operator may run, by a node's choice. ``reads`` of each input, and
    ``outputs``, by choice.
    """

    splits: tuple[Split, ...]
    steps: tuple[Step, ...]
    reads: tuple[tuple[Layout | Need, ...], ...]
    outputs: tuple[tuple[Layout, ...], ...]

    @staticmethod
    def of(node: Node, splits: tuple[Split, ...], steps: tuple[Step, ...]) -> Ways:
        reads = tuple(zip(*(s.reads for s in steps), strict=True))
        outputs = [tuple(s.output for s in steps)] * len(node.outputs)
        if isinstance(node.op, Pieces):
            outputs = list(
                zip(
                    *([y.output for y in node.op.steps(s.reads)] for s in steps),  # type: ignore[arg-type]
                    strict=True,
                )
            )
        return Ways(splits, steps, reads, tuple(outputs))

    @staticmethod
    def unsplit(node: Node, steps: Sequence[Step]) -> Ways:
        """Of an operator that a plan does not name."""
        return Ways.of(node, (REPLICATE,) * len(steps), tuple(steps))


class Lies(NamedTuple):
    """Where a value lies, by the choice of ``node``; what lies in one way whatever is
    chosen has no node.
    """

    node: str | None
    layouts: tuple[Layout, ...]


Link = tuple[Array, Array]


def followed(node: Node, wholes: tuple[Layout, ...], inputs: Sequence[Lies]) -> Ways:
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
    return Ways.unsplit(
        node, [node.op.step(row, REPLICATE) for row in rows or [wholes]]
    )


def leads(
    node: Node, wholes: tuple[Layout, ...], inputs: Sequence[Lies], k: int
) -> list[Step | None]:
    """By how input ``k`` lies: how the operator runs if this input leads it, or None if
    it does not.
    """
    steps = (
        node.op.step((*wholes[:k], x, *wholes[k + 1 :]), REPLICATE)
        for x in inputs[k].layouts
    )
    return [s if s.output.kind != "replicated" else None for s in steps]


@dataclass(frozen=True)
class Said:
    """What inputs say of how the result lies: as one of them leads it, or nothing.

    A concatenation along its cut is cut by what each rank has ``held`` of all inputs,
    which lie as in ``example``. Of an input that leads, ``example`` is its layout, and
    ``lead`` its position.
    """

    step: Step | None
    held: tuple[int, ...] = ()
    example: tuple[Layout, ...] = field(default=(), compare=False)
    lead: int = field(default=0, compare=False)

    def then(self, other: Said) -> Said:
        if self.step is not None or other.step is not None:
            return self if self.step is not None else other
        held = (
            tuple(map(sum, zip(self.held, other.held, strict=True)))
            if self.held and other.held
            else ()
        )
        return Said(None, held or self.held or other.held, self.example + other.example)


def retold(
    states: Sequence[Said], node: Node, wholes: tuple[Layout, ...]
) -> list[Said]:
    """The same states, of another concatenation that begins with these inputs."""
    steps: dict[Layout, Step] = {}  # by how the result of the one before lies
    found = []
    for said in states:
        if said.step is None:
            found.append(said)
            continue
        if said.step.output not in steps:
            inputs = (*wholes[: said.lead], *said.example, *wholes[said.lead + 1 :])
            steps[said.step.output] = node.op.step(inputs, REPLICATE)
        found.append(replace(said, step=steps[said.step.output]))
    return found


def joined(
    node: Node, wholes: tuple[Layout, ...], inputs: Sequence[Lies]
) -> tuple[list[Link], Ways]:
    """A join has a state for each input after the first: what was said before, and what
    this input says, if it counts.

    Gives `linked` for each of these inputs, and how the operator runs by the last state.
    """
    for adds in (True, False):
        before, links = says(node, wholes, inputs, 0, adds), []
        for k in range(1, len(inputs)):
            link, before = linked(before, says(node, wholes, inputs, k, adds), before)
            links.append(link)
            if adds and len(before) > MOST_STATES:
                break
        else:
            break
    return links, ended(node, wholes, before)


def linked(
    before: Sequence[Said], own: Sequence[Said], marks: Sequence[Hashable]
) -> tuple[Link, list[Said]]:
    """(states before, states) and (ways in which an input lies, states): 0 where they
    fit, else inf; the states.

    A state goes on from those before that have the same of ``marks``.
    """
    states: list[tuple[Hashable, Said, Said | None]] = []
    for mark, said in dict(zip(marks, before, strict=True)).items():
        states += (
            [(mark, said, now) for now in dict.fromkeys(own)]
            if said.step is None
            else [(mark, said, None)]
        )
    goes_on = [[mark == m for mark, _, _ in states] for m in marks]
    agrees = [[now is None or now == o for _, _, now in states] for o in own]
    link = np.where(goes_on, 0.0, np.inf), np.where(agrees, 0.0, np.inf)
    return link, [
        said.then(now) if now is not None else said for _, said, now in states
    ]


def ended(node: Node, wholes: tuple[Layout, ...], states: Sequence[Said]) -> Ways:
    """How the operator runs, by what all inputs together say."""
    gathered = node.op.step(wholes, REPLICATE)
    steps = (
        s.step or (node.op.step(s.example, REPLICATE) if s.held else gathered)
        for s in states
    )
    return Ways.unsplit(node, list(steps))


def says(
    node: Node, wholes: tuple[Layout, ...], inputs: Sequence[Lies], k: int, adds: bool
) -> list[Said]:
    """By how input ``k`` lies. ``adds``: whether a concatenation along the cut counts
    what each input holds.
    """
    found = []
    for x, step in zip(inputs[k].layouts, leads(node, wholes, inputs, k), strict=True):
        along = (
            adds and isinstance(node.op, Cat) and on_parts(x).dim == node.op.dim != 1
        )
        found.append(
            Said(None, on_parts(x).sizes, (x,)) if along else Said(step, (), (x,), k)
        )
    return found


def nested(graph: Graph) -> set[Node]:
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
