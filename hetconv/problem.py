"""How a model may be split, as tables of seconds over the choices of one layer and of two: what `elimination` takes.

Where a tensor lies follows from the choice of one node: of a layer that a plan names, or of a join of tensors that
follow different layers. The tables hold what `Pricer` adds up as ``summed_s``, operator by operator. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from .cost import Operators, parameter_bytes, result_bytes
from .following import Pieces
from .graph import Graph, Node
from .layout import Layout, Move, Need, Shape
from .ledger import Tables
from .network import Array, Network
from .plan import Mode
from .profile import ClusterProfile
from .rules import REPLICATE, SPACE, Conv, Gather, Split, Step
from .tables import movement

T = TypeVar("T")
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Ways:
    """How an operator may run, by a node's choice. ``reads`` of each input, and ``outputs``, by choice."""

    splits: tuple[Split, ...]
    steps: tuple[Step, ...]
    reads: tuple[tuple[Layout | Need, ...], ...]
    outputs: tuple[tuple[Layout, ...], ...]

    @staticmethod
    def of(node: Node, splits: tuple[Split, ...], steps: tuple[Step, ...]) -> Ways:
        reads = tuple(zip(*(s.reads for s in steps), strict=True))
        outputs = [tuple(s.output for s in steps)] * len(node.outputs)
        if isinstance(node.op, Pieces):
            outputs = list(zip(*([y.output for y in node.op.steps(s.reads)] for s in steps), strict=True))  # type: ignore[arg-type]
        return Ways(splits, steps, reads, tuple(outputs))


class Lies(NamedTuple):
    """Where a value lies, by the choice of ``node``; what lies in one way whatever is chosen has no node."""

    node: str | None
    layouts: tuple[Layout, ...]


def tables(graph: Graph, profile: ClusterProfile, choices: Mapping[str, tuple[Split, ...]], mode: Mode) -> Tables:
    """Of a model whose layers may be split in these ways; a layer without choices is replicated.

    ``choices`` of equal operators should be the same object: what they have in common is then computed once.
    """
    builder = _Builder(graph, profile, mode, choices)
    for node in graph.nodes:
        builder.add(node)
    for i in graph.outputs:
        builder.move(i, (builder.whole(i),), None, gradient=False)
    for name in graph.layers:
        cuts = [{name: split} for split in choices.get(name) or (REPLICATE,)]
        held = np.array([parameter_bytes(graph, cut, profile.world, mode, name) for cut in cuts])
        builder.tables.hold(name if choices.get(name) else None, held)
    builder.tables.hold(None, np.array([parameter_bytes(graph, {}, profile.world, mode, None)]))
    return builder.tables


class _Builder:
    """Goes through a graph as `walk` does, for all choices at once. Equal operators on equal layouts share objects."""

    def __init__(self, graph: Graph, profile: ClusterProfile, mode: Mode, choices: Mapping[str, tuple[Split, ...]]):
        self.graph, self.choices, self.world = graph, choices, profile.world
        self.network, self.operators = Network.of(profile), Operators(graph, profile.devices)
        self.passes = (False, True) if mode == "train" else (False,)
        self.tables = Tables()
        self._wholes: dict[Shape, tuple[Layout, ...]] = {}
        self._once: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}
        self._contributed: dict[tuple[str | None, int], Mask] = {}
        self._equal: dict[tuple[Layout, ...], tuple[Layout, ...]] = {}  # an object for all equal ones
        self.lies = {i: Lies(None, (self.whole(i),)) for i in range(len(graph.values))}

    def once(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """What was made for an equal key. Tuples of layouts count as equal if they are the same object."""
        said = tuple(id(k) if isinstance(k, tuple | Ways) else k for k in key)
        if said not in self._once:
            self._once[said] = make(), key  # the key is kept, so that ids stay what they are
        found: T = self._once[said][0]
        return found

    def whole(self, value: int) -> Layout:
        return self._whole(self.graph.values[value].shape)[0]

    def _whole(self, shape: Shape) -> tuple[Layout, ...]:
        return self._wholes.setdefault(shape, (Layout.replicated(shape, self.world),))

    def add(self, node: Node) -> None:
        inputs = [self.lies[i] for i in node.inputs]
        free = list(dict.fromkeys(x.node for x in inputs if x.node is not None))
        if node.layer is not None and self.choices.get(node.layer):
            self._add_layer(node, node.layer)
        elif isinstance(node.op, Gather):
            self._add_ways(node, None, Ways.of(node, (REPLICATE,), (node.op.step(self._wholes_of(node), REPLICATE),)))
        elif len(free) > 1 and not node.writes:
            self._add_join(node, inputs)
        elif node.writes and inputs and node.views[:1] == node.inputs[:1]:
            others = (self._whole(self.graph.values[i].shape) for i in node.inputs[1:])
            ways = self.once((node.op, "writes", inputs[0].layouts, *others), lambda: self._written(node, inputs))
            self._add_ways(node, inputs[0].node, ways)
        else:
            ways = self.once((node.op, *(x.layouts for x in inputs)), lambda: self._followed(node, inputs))
            self._add_ways(node, free[0] if free else None, ways)

    def _wholes_of(self, node: Node) -> tuple[Layout, ...]:
        return tuple(map(self.whole, node.inputs)) or self._whole(())

    def _followed(self, node: Node, inputs: Sequence[Lies]) -> Ways:
        count = max((len(x.layouts) for x in inputs), default=1)
        rows = list(zip(*(x.layouts if x.node is not None else x.layouts * count for x in inputs), strict=True))
        steps = tuple(node.op.step(row, REPLICATE) for row in rows or [self._wholes_of(node)])
        return Ways.of(node, (REPLICATE,) * len(steps), steps)

    def _written(self, node: Node, inputs: Sequence[Lies]) -> Ways:
        """A call in place runs on parts where what it writes to lies on parts, and lies as that."""
        gathered = node.op.step(self._wholes_of(node), REPLICATE)
        steps = tuple(s if s is not None else gathered for s in self._leads(node, inputs, 0))
        return Ways.of(node, (REPLICATE,) * len(steps), steps)

    def _add_layer(self, node: Node, name: str) -> None:
        """What a layer reads and how its result lies goes by its split alone."""
        splits, i = self.choices[name], node.inputs[0]
        ways = self.once(
            (node.op, splits),
            lambda: Ways.of(node, splits, tuple(node.op.step((self.whole(i),), split) for split in splits)),
        )
        dims = [node.op.dim(s.kind) if isinstance(node.op, Conv) and s.kind in SPACE else None for s in splits]
        hides = np.array([[d is not None and x.dim == d for d in dims] for x in self.lies[i].layouts])
        computing = self._own(node, name, ways)
        self.move(i, ways.reads[0], name, hides=hides, computing=computing, gradient=self._differentiable(node))

    def _differentiable(self, node: Node) -> bool:
        return any(self.graph.values[i].requires_grad for i in node.outputs)

    def _add_ways(self, node: Node, name: str | None, ways: Ways) -> None:
        """An operator that runs in one of these ways by the choice of a node."""
        self._own(node, name, ways)
        for i, reads in zip(node.inputs, ways.reads, strict=False):
            if self.graph.values[i].param is None:
                self.move(i, reads, name, gradient=self._differentiable(node))
        self._share(node, name, [s.output.kind == "replicated" for s in ways.steps])

    def _add_join(self, node: Node, inputs: Sequence[Lies]) -> None:
        """The result lies as the first input suggests that is cut so that the operator can follow it.

        For each input after the first there is a node of the tables, whose state says which way of running the inputs
        so far lead to, if any, and whether it was an earlier one.
        """
        links, ways = self.once((node.op, "joins", *(x.layouts for x in inputs)), lambda: self._joined(node, inputs))
        last = inputs[0].node
        for k, (goes_on, agrees) in enumerate(links, 1):
            name = f"{node.name}: {node.outputs[0]}: {k}"
            self.tables.charge(name, np.zeros(goes_on.shape[1]))
            self.tables.relate(last, name, goes_on)
            self.tables.relate(inputs[k].node, name, agrees)
            last = name
        self._add_ways(node, last, ways)

    def _joined(self, node: Node, inputs: Sequence[Lies]) -> tuple[list[tuple[Array, Array]], Ways]:
        """Of every input after the first, which states fit those before and which fit how it lies; the last states."""
        links, before = [], self._leads(node, inputs, 0)
        for k in range(1, len(inputs)):
            leads = self._leads(node, inputs, k)
            earlier, own = ([s for s in dict.fromkeys(ways) if s is not None] for ways in (before, leads))
            states = [*((True, s) for s in earlier), *((False, s) for s in (*own, None))]
            goes_on = [[(early, t) == (True, s) if s is not None else not early for early, t in states] for s in before]
            agrees = [[early or s == t for early, t in states] for s in leads]
            links.append((np.where(goes_on, 0.0, np.inf), np.where(agrees, 0.0, np.inf)))
            before = [s for _, s in states]
        gathered = node.op.step(self._wholes_of(node), REPLICATE)
        steps = tuple(s if s is not None else gathered for s in before)
        return links, Ways.of(node, (REPLICATE,) * len(steps), steps)

    def _leads(self, node: Node, inputs: Sequence[Lies], k: int) -> list[Step | None]:
        """By how input ``k`` lies: how the operator runs if this input leads it, or None if it does not."""
        wholes = self._wholes_of(node)
        steps = (node.op.step((*wholes[:k], x, *wholes[k + 1 :]), REPLICATE) for x in inputs[k].layouts)
        return [s if s.output.kind == "sharded" else None for s in steps]

    def _own(self, node: Node, name: str | None, ways: Ways) -> tuple[Array, ...]:
        """Charges what does not depend on how the inputs lie; places the results. Seconds of each pass, (choices,)."""
        values, train = self.graph.values, True in self.passes
        out = values[node.outputs[0]] if node.outputs else None
        asked = (out.dtype, out.requires_grad) if out is not None else None
        computing = tuple(self.once((ways, str(asked), b), partial(self._seconds, node, ways, b)) for b in self.passes)
        cost = sum(computing, np.zeros(len(ways.steps)))
        self.tables.computing[name] = self.tables.computing.get(name, 0.0) + cost
        if out is not None and any(s.forward or s.backward for s in ways.steps):
            back = train and out.requires_grad
            cost = cost + self.once((ways, out.itemsize, back), lambda: self._further(ways, out.itemsize, back))
        if train:
            cost = cost + self._sums_s(node, name, np.array([s.contributes for s in ways.steps]))
        self.tables.charge(name, cost)
        if train:
            self.tables.hold(name, np.array([result_bytes(self.graph, node, s) for s in ways.steps], dtype=float))
        for i, outputs in zip(node.outputs, ways.outputs, strict=False):
            self.lies[i] = Lies(name, self.once((outputs,), partial(self._equal.setdefault, outputs, outputs)))
        return computing

    def _seconds(self, node: Node, ways: Ways, backward: bool) -> Array:
        """(choices,): of the slowest device."""
        both = zip(ways.splits, ways.steps, strict=True)
        return np.array([self.operators.seconds(node, split, s, backward).max() for split, s in both])

    def _sums_s(self, node: Node, name: str | None, contributes: Mask) -> Array:
        """(choices,): of summing the gradients of parameters over ranks, once for all that this node's choice runs."""
        cost = np.zeros(len(contributes))
        for i in dict.fromkeys((*node.params, *node.inputs)):
            value = self.graph.values[i]
            if value.param is not None and value.requires_grad:
                before = self._contributed.get((name, i), np.zeros_like(contributes))
                self._contributed[name, i] = before | contributes
                cost = cost + prod(value.shape) * value.itemsize * (contributes & ~before)
        return cost * self.network.s_per_summed_byte

    def _further(self, ways: Ways, itemsize: int, backward: bool) -> Array:
        """(choices,): of the further movements of an operator, such as sums of statistics."""
        exact = max(itemsize, 4)
        moves = [(*s.forward, *(s.backward if backward else ())) for s in ways.steps]

        def seconds(move: Move) -> float:
            return self.once((move, exact), lambda: self.network.rounds_s(move.forward, exact))

        return np.array([sum(map(seconds, ms)) for ms in moves])

    def _share(self, node: Node, name: str | None, whole: Sequence[bool]) -> None:
        """What shares memory with a result that every rank has whole is whole from then on."""
        for i in node.views if any(whole) else ():
            lies = self.lies[i]
            if all(whole):
                self.lies[i] = Lies(None, self._whole(self.graph.values[i].shape))
            elif lies.node == name:
                now = (self.whole(i) if w else x for w, x in zip(whole, lies.layouts, strict=True))
                self.lies[i] = Lies(name, tuple(now))

    def move(
        self, value: int, reads: tuple[Layout | Need, ...], reader: str | None, *,
        hides: Mask | None = None, computing: Sequence[Array] = (), gradient: bool = True,
    ) -> None:  # fmt: skip
        """Charges bringing a value to the reads, by the reader's choice, and its gradient back."""
        (node, layouts), known = self.lies[value], self.graph.values[value]
        if node == reader and all(x is r for x, r in zip(layouts, reads, strict=True)):
            return
        for k, backward in enumerate(self.passes if gradient and known.requires_grad else (False,)):
            moving = partial(movement, layouts, reads, known.itemsize, self.network, backward)
            seconds = self.once((layouts, reads, known.itemsize, backward), moving)
            if hides is not None and hides.any():
                seconds = seconds - hides * np.minimum(seconds, computing[k])
            self.tables.relate(node, reader, seconds)
