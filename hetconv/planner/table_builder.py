"""How a model may be split, as tables of seconds over the choices of one layer and of
two: what `elimination` takes.

Where a tensor lies follows from the choice of one node: of a layer that a plan names,
or of a join of tensors that follow different layers. The tables hold what `StepEstimator` adds
up as ``summed_s``, operator by operator. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from hetconv.cost.memory import (
    input_bytes,
    kept_results,
    parameter_bytes,
    receive_buffer_table,
    result_bytes,
)
from hetconv.cost.network import Array, Network
from hetconv.cost.operator_cost import Operators
from hetconv.cost.redistribution import MovedValue, movement_tables
from hetconv.operators.shapes import Reshape
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import Mode
from hetconv.sharding.layer_rules import exchanges_halos
from hetconv.sharding.layout import Layout, ReadRegion, Shape
from hetconv.sharding.rule import Gather
from hetconv.sharding.split import REPLICATE, Split
from hetconv.tracing.graph import AliasGroups, Graph, Node

from .cost_tables import Copies, CostTables, GradientSumTables
from .joins import (
    JoinState,
    Link,
    PlacementByChoice,
    Strategies,
    extend,
    finalize,
    following_strategies,
    join_states,
    led_by,
    nested_concats,
    rebased,
    votes,
)

T = TypeVar("T")
Mask = npt.NDArray[np.bool_]


class _Movement(NamedTuple):
    """Between the choices of two nodes. ``hidden``: where, (sources, reads), computing
    of these seconds hides it.
    """

    node: str | None
    reader: str | None
    moved: MovedValue
    hidden: tuple[Mask, Array] | None


def build_tables(
    graph: Graph,
    profile: ClusterProfile,
    choices: Mapping[str, tuple[Split, ...]],
    mode: Mode,
) -> CostTables:
    """Of a model whose layers may be split in these ways; a layer without choices is replicated.

    ``choices`` of equal operators should be the same object: what they have in common
    is then computed once.
    """
    builder = _Builder(graph, profile, mode, choices)
    for node in graph.nodes:
        builder.add(node)
    for i in graph.outputs:
        builder.move(i, (builder.whole(i),), None, gradient=False)
    for name in graph.layers:
        cuts = [{name: split} for split in choices.get(name) or (REPLICATE,)]
        held = np.array(
            [parameter_bytes(graph, cut, profile.world, mode, name) for cut in cuts]
        )
        builder.tables.add_bytes(name if choices.get(name) else None, held)
    always = np.array(
        parameter_bytes(graph, {}, profile.world, mode, None)
    ) + input_bytes(graph)
    builder.tables.add_bytes(None, always[None])
    builder.charge_moves()
    builder.contributions.charge(builder.tables)
    return builder.tables


class _Builder:
    """Goes through a graph as `propagate` does, for all choices at once.

    Equal operators on equal layouts share objects.
    """

    def __init__(
        self,
        graph: Graph,
        profile: ClusterProfile,
        mode: Mode,
        choices: Mapping[str, tuple[Split, ...]],
    ):
        self.graph, self.choices, self.world = graph, choices, profile.world
        self.network, self.operators = (
            Network.of(profile),
            Operators(graph, profile.devices),
        )
        self.passes = (False, True) if mode == "train" else (False,)
        self.tables, self.contributions = (
            CostTables(),
            GradientSumTables(graph, self.network, choices),
        )
        self._wholes: dict[Shape, tuple[Layout, ...]] = {}
        self._once: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}
        self._equal: dict[
            tuple[Layout, ...], tuple[Layout, ...]
        ] = {}  # an object for all equal ones
        self._movements: list[_Movement] = []
        self._statistics: list[
            tuple[str | None, list[list[MovedValue]]]
        ] = []  # by choice of a node
        self.placements = {
            i: PlacementByChoice(None, (self.whole(i),))
            for i in range(len(graph.values))
        }
        self.memory = AliasGroups({})  # families of all that may be views on parts
        self._nested = nested_concats(graph)
        self._begun: dict[
            Hashable, tuple[str, list[JoinState]]
        ] = {}  # by values and how they lie
        self._copies: set[int] = set()  # what may be a copy of what it is a view of
        self._stays = kept_results(graph, mode)

    def once(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """What was made for an equal key. Layouts, and tuples of them, count as equal
        if they are the same object.
        """
        said = tuple(
            id(k) if isinstance(k, tuple | Strategies | Layout | ReadRegion) else k
            for k in key
        )
        if said not in self._once:
            self._once[said] = (
                make(),
                key,
            )  # the key is kept, so that ids stay what they are
        found: T = self._once[said][0]
        return found

    def whole(self, value: int) -> Layout:
        return self._whole(self.graph.values[value].shape)[0]

    def _whole(self, shape: Shape) -> tuple[Layout, ...]:
        return self._wholes.setdefault(shape, (Layout.replicated(shape, self.world),))

    def add(self, node: Node) -> None:
        inputs = [self.placements[i] for i in node.inputs]
        free = list(dict.fromkeys(x.node for x in inputs if x.node is not None))
        if node.layer is not None and self.choices.get(node.layer):
            self._add_layer(node, node.layer)
        elif isinstance(node.op, Gather):
            self._add_ways(
                node,
                None,
                Strategies.unsplit(
                    node, [node.op.sharding(self._wholes_of(node), REPLICATE)]
                ),
            )
        elif len(free) > 1 and not node.writes:
            self._add_join(node, inputs)
        elif node.writes and inputs and node.views[:1] == node.inputs[:1]:
            ways = self._written(node, inputs)
            self._gather_families(
                node,
                inputs[0].node,
                [s.output.kind == "replicated" for s in ways.shardings],
            )
            self._add_ways(node, inputs[0].node, ways)
        else:
            wholes = self._wholes_of(node)
            ways = self.once(
                (node.op, *(x.layouts for x in inputs)),
                lambda: following_strategies(node, wholes, inputs),
            )
            self._add_ways(node, free[0] if free else None, ways)

    def _wholes_of(self, node: Node) -> tuple[Layout, ...]:
        return tuple(map(self.whole, node.inputs)) or self._whole(())

    def _written(self, node: Node, inputs: Sequence[PlacementByChoice]) -> Strategies:
        """A call in place runs on parts where what it writes to lies on parts, and lies
        as that; see `Memory`.
        """
        wholes, (i, *_) = self._wholes_of(node), node.views
        gathered, steps = node.op.sharding(wholes, REPLICATE), []
        for k, (x, step) in enumerate(
            zip(inputs[0].layouts, led_by(node, wholes, inputs, 0), strict=True)
        ):
            family = self._family(i, k)
            alike = (
                step is not None
                and step.output == x
                and self._copies.isdisjoint(family)
            )
            steps.append(
                step if step is not None and (alike or not family) else gathered
            )
        return Strategies.unsplit(node, steps)

    def _add_layer(self, node: Node, name: str) -> None:
        """What a layer reads and how its result lies goes by its split alone."""
        splits, i = self.choices[name], node.inputs[0]
        ways = self.once(
            (node.op, splits),
            lambda: Strategies.of(
                node,
                splits,
                tuple(node.op.sharding((self.whole(i),), split) for split in splits),
            ),
        )
        hides = np.array(
            [
                [exchanges_halos(node.op, x, split) for split in splits]
                for x in self.placements[i].layouts
            ]
        )
        computing = self._own(node, name, ways)
        self.move(
            i,
            ways.input_layouts[0],
            name,
            hides=hides,
            computing=computing,
            gradient=self._differentiable(node),
        )

    def _differentiable(self, node: Node) -> bool:
        return any(self.graph.values[i].requires_grad for i in node.outputs)

    def _add_ways(self, node: Node, name: str | None, ways: Strategies) -> None:
        """An operator that runs in one of these ways by the choice of a node."""
        self._own(node, name, ways)
        for i, reads in zip(node.inputs, ways.input_layouts, strict=False):
            if self.graph.values[i].param is None:
                self.move(i, reads, name, gradient=self._differentiable(node))
        whole = [s.output.kind == "replicated" for s in ways.shardings]
        self._share(node, name, whole)
        if not all(whole):
            self.memory.add(node)
            self._copies |= set(node.outputs) if isinstance(node.op, Reshape) else set()

    def _add_join(self, node: Node, inputs: Sequence[PlacementByChoice]) -> None:
        """The result lies as the first input suggests that is cut so that the operator
        can follow it.

        For each input after the first there is a node of the tables, whose state says
        which way of running the inputs so far lead to, if any, and whether it was an
        earlier one.
        """
        if node in self._nested:
            self._add_nested(node, inputs)
            return
        wholes, layouts = self._wholes_of(node), [x.layouts for x in inputs]
        links, ways = self.once(
            (node.op, "joins", *layouts), lambda: join_states(node, wholes, inputs)
        )
        last = inputs[0].node
        for k, link in enumerate(links, 1):
            last = self._link(
                f"{node.name}: {node.outputs[0]}: {k}", last, inputs[k].node, link
            )
        self._add_ways(node, last, ways)

    def _add_nested(self, node: Node, inputs: Sequence[PlacementByChoice]) -> None:
        """Concatenations that begin alike share nodes, each state of which says from
        which one it goes on.
        """
        wholes = self._wholes_of(node)
        last, before = inputs[0].node, votes(node, wholes, inputs, 0, False)
        marks: Sequence[Hashable] = before
        for k in range(1, len(inputs)):
            begun = tuple(
                zip(node.inputs, (id(x.layouts) for x in inputs[: k + 1]), strict=False)
            )
            if begun not in self._begun:
                link, before = extend(
                    before, votes(node, wholes, inputs, k, False), marks
                )
                last = self._link(
                    f"{node.name}: {node.outputs[0]}: {k}", last, inputs[k].node, link
                )
                self._begun[begun] = last, before
            last, known = self._begun[begun]
            before = rebased(known, node, wholes)
            marks = range(len(before))
        self._add_ways(node, last, finalize(node, wholes, before))

    def _link(self, name: str, last: str | None, other: str | None, link: Link) -> str:
        """A state of a join, by the one before and by how another input lies."""
        goes_on, agrees = link
        self.tables.add(name, np.zeros(goes_on.shape[1]))
        self.tables.add_pair(last, name, goes_on)
        self.tables.add_pair(other, name, agrees)
        return name

    def _own(self, node: Node, name: str | None, ways: Strategies) -> tuple[Array, ...]:
        """Charges what does not depend on how the inputs lie; places the results.
        Seconds of each pass, (choices,).
        """
        values, train = self.graph.values, True in self.passes
        out = values[node.outputs[0]] if node.outputs else None
        asked = (
            (
                out.dtype,
                out.requires_grad,
                self.graph.extra_gradients.get(node.outputs[0]),
            )
            if out is not None
            else None
        )
        computing = tuple(
            self.once((ways, str(asked), b), partial(self._seconds, node, ways, b))
            for b in self.passes
        )
        cost = sum(computing, np.zeros(len(ways.shardings)))
        self.tables.computing[name] = self.tables.computing.get(name, 0.0) + cost
        if out is not None and any(
            s.forward_moves or s.backward_moves for s in ways.shardings
        ):
            back = train and out.requires_grad
            further = self.once(
                (ways, out.itemsize, back),
                lambda: self._further(ways, out.itemsize, back),
            )
            self._statistics.append((name, further))
        self.tables.add(name, cost)
        if train:
            self.contributions.note(node, name, ways.shardings)
        if node in self._stays:
            self.tables.add_bytes(
                name,
                np.array(
                    [result_bytes(self.graph, node, s) for s in ways.shardings],
                    dtype=float,
                ),
            )
        for i, outputs in zip(node.outputs, ways.outputs, strict=False):
            self.placements[i] = PlacementByChoice(
                name,
                self.once(
                    (outputs,), partial(self._equal.setdefault, outputs, outputs)
                ),
            )
        return computing

    def _seconds(self, node: Node, ways: Strategies, backward: bool) -> Array:
        """(choices,): of the slowest device."""
        seconds = self.operators.table(node, ways.splits, ways.shardings, backward)
        slowest: Array = (
            seconds + self.operators.forks(node, ways.shardings, backward)
        ).max(-1)
        return slowest

    def _further(
        self, ways: Strategies, itemsize: int, backward: bool
    ) -> list[list[MovedValue]]:
        """By choice, the further movements of an operator, such as sums of statistics."""
        exact = max(itemsize, 4)
        moves = [
            (*s.forward_moves, *(s.backward_moves if backward else ()))
            for s in ways.shardings
        ]
        own = partial(MovedValue, itemsize=exact, adjoint=False)
        return [
            [
                self.once((m.src, m.dst, exact), partial(own, (m.src,), (m.dst,)))
                for m in ms
            ]
            for ms in moves
        ]

    def _share(self, node: Node, name: str | None, whole: Sequence[bool]) -> None:
        """What shares memory with a result that every rank has whole is whole from then on."""
        if not any(whole):
            return
        self._gather_families(node, name, whole)
        for i in node.views:
            if all(whole):
                self.placements[i] = PlacementByChoice(
                    None, self._whole(self.graph.values[i].shape)
                )
            elif self.placements[i].node == name:
                self._make_whole(i, whole)

    def _gather_families(
        self, node: Node, name: str | None, whole: Sequence[bool]
    ) -> None:
        """As `Memory.make_whole`: where a view is made whole, the first value is
        gathered, and all views with it.
        """
        for i in node.views:
            by, layouts = self.placements[i]
            if by is None or (by != name and not all(whole)):
                continue
            chosen = whole if by == name else [True] * len(layouts)
            families = [self._family(i, k) if w else [] for k, w in enumerate(chosen)]
            if any(families):
                first = self.memory.groups[i][0]
                lay = zip(families, self.placements[first].layouts, strict=True)
                self.move(
                    first,
                    tuple(self.whole(first) if f else x for f, x in lay),
                    by,
                    gradient=False,
                )
                for j in set(chain(*families)):
                    self._make_whole(j, [j in f for f in families])

    def _family(self, value: int, choice: int) -> list[int]:
        """By a choice of the node that it lies by: what is on parts and shares memory
        with a value, itself included.
        """
        by = self.placements[value].node
        lie = ((j, self.placements[j]) for j in self.memory.groups.get(value, ()))
        family = [
            j
            for j, (node, layouts) in lie
            if node == by and layouts[choice].kind != "replicated"
        ]
        return family if value in family and len(family) > 1 else []

    def _make_whole(self, value: int, where: Sequence[bool]) -> None:
        node, layouts = self.placements[value]
        now = tuple(
            self.whole(value) if w else x for w, x in zip(where, layouts, strict=True)
        )
        self.placements[value] = PlacementByChoice(
            node, self._equal.setdefault(now, now)
        )

    def move(
        self,
        value: int,
        reads: tuple[Layout | ReadRegion, ...],
        reader: str | None,
        *,
        hides: Mask | None = None,
        computing: Sequence[Array] = (),
        gradient: bool = True,
    ) -> None:
        """Notes bringing a value to the reads, by the reader's choice, and its gradient
        back; see `charge_moves`.
        """
        (node, layouts), known = self.placements[value], self.graph.values[value]
        if node == reader and all(x is r for x, r in zip(layouts, reads, strict=True)):
            return
        for k, backward in enumerate(
            self.passes if gradient and known.requires_grad else (False,)
        ):
            apart = hides if hides is not None and hides.any() else None
            key = layouts, reads, known.itemsize, backward
            moved = self.once(
                (*key, apart.tobytes() if apart is not None else b""),
                partial(MovedValue, *key, apart),
            )
            hidden = (apart, computing[k]) if apart is not None else None
            self._movements.append(_Movement(node, reader, moved, hidden))
            if not backward and True in self.passes:
                counted = self.once(
                    ("copies", moved), partial(partial, receive_buffer_table, moved)
                )
                self.tables.copies.append(Copies(node, reader, counted))

    def charge_moves(self) -> None:
        """All at once, which takes a fraction of what it takes one by one."""
        further = (
            moved for _, by_choice in self._statistics for moved in chain(*by_choice)
        )
        values = list(
            {
                id(moved): moved
                for moved in chain((one.moved for one in self._movements), further)
            }.values()
        )
        seconds = dict(
            zip(map(id, values), movement_tables(values, self.network), strict=True)
        )
        for name, by_choice in self._statistics:
            each = (
                sum(float(seconds[id(moved)][0, 0]) for moved in some)
                for some in by_choice
            )
            self.tables.add(name, np.array([*each]))
        for node, reader, moved, hidden in self._movements:
            moving = seconds[id(moved)]
            if hidden is not None:
                where, computing = hidden
                moving = moving - self.network.overlap * where * np.minimum(
                    moving, computing
                )
            self.tables.add_pair(node, reader, moving)
