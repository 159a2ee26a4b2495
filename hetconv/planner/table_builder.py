"""Builds the cost tables of a graph: seconds and bytes over the choices of its layers.

The layout of a tensor depends on one variable: a layer that a plan names, or the state
of an operator that joins tensors of different layers. The tables add up to what
`StepEstimator` predicts as ``operator_sum_s``, operator by operator.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from hetconv.cost.memory import input_bytes, parameter_bytes, result_bytes
from hetconv.cost.memory_timeline import held_copies, kept_results
from hetconv.cost.network import Array, Network
from hetconv.cost.operator_cost import Operators
from hetconv.operators.shapes import Reshape
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import Mode
from hetconv.sharding.layer_rules import exchanges_halos
from hetconv.sharding.layout import Layout, ReadRegion, Shape
from hetconv.sharding.rule import Gather
from hetconv.sharding.split import REPLICATE, Split
from hetconv.tracing.graph import AliasGroups, Graph, Node

from .cost_tables import CostTables, GradientSumTables
from .joins import (
    JoinState,
    LayoutByChoice,
    Link,
    Strategies,
    extend,
    finalize,
    following_strategies,
    input_states,
    join_states,
    led_by,
    nested_concats,
    rebased,
)
from .movement_costs import IdentityCache, MovementCosts, Overlap


def build_tables(
    graph: Graph,
    profile: ClusterProfile,
    choices: Mapping[str, tuple[Split, ...]],
    mode: Mode,
) -> CostTables:
    """Builds the cost tables of a model whose layers may be split in several ways.

    Args:
        graph: Model.
        profile: Devices and links.
        choices: Candidate splits by layer; a layer without any is replicated. Equal
            operators should have the same object, so that what they have in common is
            computed once.
        mode: Whether a step trains.
    """
    builder = _TableBuilder(graph, profile, mode, choices)
    for node in graph.nodes:
        builder.add(node)
    for i in graph.outputs:
        builder.move(i, (builder.replicated(i),), None, gradient=False)
    builder.add_parameters(mode)
    builder.movements.charge()
    builder.gradient_sums.charge(builder.tables)
    return builder.tables


class _TableBuilder:
    """Follows a graph as `propagate` does, for all choices at once.

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
        self.passes = (False, True) if mode == "train" else (False,)
        self.operators = Operators(graph, profile.devices)
        self.tables = CostTables()
        self.cache = IdentityCache()
        network = Network.of(profile)
        self.movements = MovementCosts(self.tables, network, self.passes, self.cache)
        self.gradient_sums = GradientSumTables(graph, network, choices)
        self.kept = kept_results(graph, mode)
        self._replicated: dict[Shape, tuple[Layout, ...]] = {}
        self._equal_layouts: dict[tuple[Layout, ...], tuple[Layout, ...]] = {}
        self.layouts = {
            i: LayoutByChoice(None, (self.replicated(i),))
            for i in range(len(graph.values))
        }
        self.aliases = AliasGroups({})  # whatever may be a view of a sharded value
        self._maybe_copies: set[int] = set()  # results of reshapes that may copy
        self._nested = nested_concats(graph)
        # Chains of nested concatenations, by their inputs and the inputs' layouts.
        self._chains: dict[Hashable, tuple[str, list[JoinState]]] = {}

    def replicated(self, value: int) -> Layout:
        """Returns the replicated layout of a value."""
        return self._replicated_shape(self.graph.values[value].shape)[0]

    def _replicated_shape(self, shape: Shape) -> tuple[Layout, ...]:
        layout = Layout.replicated(shape, self.world)
        return self._replicated.setdefault(shape, (layout,))

    def _replicated_inputs(self, node: Node) -> tuple[Layout, ...]:
        return tuple(map(self.replicated, node.inputs)) or self._replicated_shape(())

    def add(self, node: Node) -> None:
        """Adds an operator, and what is moved for it."""
        inputs = [self.layouts[i] for i in node.inputs]
        variables = [x.variable for x in inputs if x.variable is not None]
        if node.layer is not None and self.choices.get(node.layer):
            self._add_layer(node, node.layer)
        elif isinstance(node.op, Gather):
            gathered = node.op.sharding(self._replicated_inputs(node), REPLICATE)
            self._add_strategies(node, None, Strategies.unsplit(node, [gathered]))
        elif len(set(variables)) > 1 and not node.writes:
            self._add_join(node, inputs)
        elif node.writes and inputs and node.views[:1] == node.inputs[:1]:
            strategies = self._in_place_strategies(node, inputs)
            self._gather_aliases(node, inputs[0].variable, strategies.replicates)
            self._add_strategies(node, inputs[0].variable, strategies)
        else:
            replicated = self._replicated_inputs(node)
            strategies = self.cache.get(
                (node.op, *(x.layouts for x in inputs)),
                lambda: following_strategies(node, replicated, inputs),
            )
            self._add_strategies(node, variables[0] if variables else None, strategies)

    def _in_place_strategies(
        self, node: Node, inputs: Sequence[LayoutByChoice]
    ) -> Strategies:
        """Runs a call in place on shards where the layout that it writes to stays."""
        replicated = self._replicated_inputs(node)
        gathered = node.op.sharding(replicated, REPLICATE)
        leading = led_by(node, replicated, inputs, 0)
        shardings = []
        for k, (layout, sharding) in enumerate(
            zip(inputs[0].layouts, leading, strict=True)
        ):
            group = self._alias_group(node.views[0], k)
            if sharding is not None and group:
                writable = self._maybe_copies.isdisjoint(group)
                if sharding.output != layout or not writable:
                    sharding = None
            shardings.append(sharding if sharding is not None else gathered)
        return Strategies.unsplit(node, shardings)

    def _add_layer(self, node: Node, name: str) -> None:
        """Adds a layer with candidate splits, which alone decide what it reads."""
        splits, i = self.choices[name], node.inputs[0]
        strategies = self.cache.get(
            (node.op, splits),
            lambda: Strategies.of(
                node,
                splits,
                tuple(node.op.sharding((self.replicated(i),), s) for s in splits),
            ),
        )
        overlaps = [
            [exchanges_halos(node.op, layout, split) for split in splits]
            for layout in self.layouts[i].layouts
        ]
        compute_s = self._charge_operator(node, name, strategies)
        self.move(
            i,
            strategies.input_layouts[0],
            name,
            overlap=Overlap(np.array(overlaps), compute_s),
            gradient=self._differentiable(node),
        )

    def _differentiable(self, node: Node) -> bool:
        return any(self.graph.values[i].requires_grad for i in node.outputs)

    def _add_strategies(
        self, node: Node, variable: str | None, strategies: Strategies
    ) -> None:
        """Adds an operator that runs as a variable decides."""
        self._charge_operator(node, variable, strategies)
        for i, reads in zip(node.inputs, strategies.input_layouts, strict=False):
            if self.graph.values[i].param is None:
                self.move(i, reads, variable, gradient=self._differentiable(node))
        replicates = strategies.replicates
        if any(replicates):
            self._replicate_views(node, variable, replicates)
        if not all(replicates):
            self.aliases.add(node)
            if isinstance(node.op, Reshape):
                self._maybe_copies |= set(node.outputs)

    def _add_join(self, node: Node, inputs: Sequence[LayoutByChoice]) -> None:
        """Adds an operator whose inputs different variables decide.

        The first sharded input that the operator can follow leads it.
        """
        if node in self._nested:
            self._add_nested_concat(node, inputs)
            return
        replicated, layouts = self._replicated_inputs(node), [x.layouts for x in inputs]
        links, strategies = self.cache.get(
            (node.op, "joins", *layouts), lambda: join_states(node, replicated, inputs)
        )
        last = inputs[0].variable
        for k, link in enumerate(links, 1):
            last = self._add_link(node, k, last, inputs[k].variable, link)
        self._add_strategies(node, last, strategies)

    def _add_nested_concat(self, node: Node, inputs: Sequence[LayoutByChoice]) -> None:
        """Adds a concatenation that shares variables with others that begin alike."""
        replicated = self._replicated_inputs(node)
        last = inputs[0].variable
        states = input_states(node, replicated, inputs, 0, add_sizes=False)
        keys: Sequence[Hashable] = states
        layout_ids = [id(x.layouts) for x in inputs]
        for k in range(1, len(inputs)):
            begin = node.inputs[: k + 1], tuple(layout_ids[: k + 1])
            if begin not in self._chains:
                own = input_states(node, replicated, inputs, k, add_sizes=False)
                link, states = extend(states, own, keys)
                last = self._add_link(node, k, last, inputs[k].variable, link)
                self._chains[begin] = last, states
            last, known = self._chains[begin]
            states = rebased(known, node, replicated)
            keys = range(len(states))
        self._add_strategies(node, last, finalize(node, replicated, states))

    def _add_link(
        self, node: Node, k: int, last: str | None, other: str | None, link: Link
    ) -> str:
        """Adds a variable for the states of a join's inputs up to the ``k``-th."""
        name = f"{node.name}: {node.outputs[0]}: {k}"
        follows, agrees = link
        self.tables.add(name, np.zeros(follows.shape[1]))
        self.tables.add_pair(last, name, follows)
        self.tables.add_pair(other, name, agrees)
        return name

    def _charge_operator(
        self, node: Node, variable: str | None, strategies: Strategies
    ) -> list[Array]:
        """Adds costs that do not depend on the layouts of the inputs; notes the outputs.

        Returns:
            Seconds of each pass, each of shape (choices,).
        """
        compute_s = [self._compute_s(node, strategies, b) for b in self.passes]
        total = sum(compute_s, np.zeros(len(strategies.shardings)))
        self.tables.add_compute(variable, total)
        if node.outputs:
            out = self.graph.values[node.outputs[0]]
            self.movements.add_operator_moves(
                variable,
                strategies,
                out.itemsize,
                backward=True in self.passes and out.requires_grad,
            )
        if True in self.passes:
            self.gradient_sums.note(node, variable, strategies.shardings)
        if node in self.kept:
            held = [result_bytes(self.graph, node, s) for s in strategies.shardings]
            self.tables.add_bytes(variable, np.array(held, dtype=float))
        for i, layouts in zip(node.outputs, strategies.outputs, strict=False):
            self.layouts[i] = LayoutByChoice(variable, self._shared(layouts))
        return compute_s

    def _shared(self, layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
        """Returns one object for all equal tuples of layouts."""
        return self.cache.get(
            ("shared", layouts),
            lambda: self._equal_layouts.setdefault(layouts, layouts),
        )

    def _compute_s(self, node: Node, strategies: Strategies, backward: bool) -> Array:
        """(choices,): seconds of the slowest device."""
        out: tuple[Hashable, ...] = ()
        if node.outputs:
            value = self.graph.values[node.outputs[0]]
            forks = self.graph.extra_gradients.get(node.outputs[0])
            out = value.dtype, value.requires_grad, forks
        return self.cache.get(
            ("compute", strategies, backward, *out),
            partial(self._slowest_s, node, strategies, backward),
        )

    def _slowest_s(self, node: Node, strategies: Strategies, backward: bool) -> Array:
        splits, shardings = strategies.splits, strategies.shardings
        seconds = self.operators.table(node, splits, shardings, backward)
        seconds = seconds + self.operators.forks(node, shardings, backward)
        slowest: Array = seconds.max(-1)
        return slowest

    def _replicate_views(
        self, node: Node, variable: str | None, replicates: Sequence[bool]
    ) -> None:
        """Replicates what shares memory with a result that is replicated."""
        self._gather_aliases(node, variable, replicates)
        for i in node.views:
            if all(replicates):
                layouts = self._replicated_shape(self.graph.values[i].shape)
                self.layouts[i] = LayoutByChoice(None, layouts)
            elif self.layouts[i].variable == variable:
                self._replicate(i, replicates)

    def _gather_aliases(
        self, node: Node, variable: str | None, replicates: Sequence[bool]
    ) -> None:
        """Gathers the first value of an alias group, and replicates all views of it.

        This is `AliasGroups.replicate`, for all choices at once.
        """
        for i in node.views:
            decided_by, layouts = self.layouts[i]
            if decided_by is None or (decided_by != variable and not all(replicates)):
                continue
            gathers = replicates if decided_by == variable else [True] * len(layouts)
            groups = [
                self._alias_group(i, k) if g else [] for k, g in enumerate(gathers)
            ]
            if any(groups):
                first = self.aliases.groups[i][0]
                reads = self._replicated_where(groups, first)
                self.move(first, reads, decided_by, gradient=False)
                for j in set(chain(*groups)):
                    self._replicate(j, [j in group for group in groups])

    def _alias_group(self, value: int, choice: int) -> list[int]:
        """Returns the sharded values that share memory with one, itself included.

        Args:
            value: Index of the value.
            choice: Choice of the variable that decides its layout.
        """
        variable = self.layouts[value].variable
        group = [
            i
            for i in self.aliases.groups.get(value, ())
            if self.layouts[i].variable == variable
            and self.layouts[i].layouts[choice].kind != "replicated"
        ]
        return group if value in group and len(group) > 1 else []

    def _replicate(self, value: int, where: Sequence[bool]) -> None:
        """Replicates a value at some choices of the variable that decides its layout."""
        layouts = self._shared(self._replicated_where(where, value))
        self.layouts[value] = self.layouts[value]._replace(layouts=layouts)

    def _replicated_where(self, where: Sequence[Any], value: int) -> tuple[Layout, ...]:
        whole = self.replicated(value)
        layouts = self.layouts[value].layouts
        return tuple(whole if w else x for w, x in zip(where, layouts, strict=True))

    def move(
        self,
        value: int,
        reads: tuple[Layout | ReadRegion, ...],
        reader: str | None,
        *,
        overlap: Overlap | None = None,
        gradient: bool,
    ) -> None:
        """Moves a value to what a reader reads; see `MovementCosts.add`."""
        self.movements.add(
            self.graph.values[value],
            self.layouts[value],
            reads,
            reader,
            overlap=overlap,
            gradient=gradient,
        )

    def add_parameters(self, mode: Mode) -> None:
        """Adds the bytes of parameters and inputs."""
        copies = held_copies(mode)
        for name in self.graph.layers:
            own_choices = self.choices.get(name)
            held = [
                parameter_bytes(self.graph, {name: split}, self.world, name)
                for split in own_choices or (REPLICATE,)
            ]
            of_choices = copies * np.array(held)
            self.tables.add_bytes(name if own_choices else None, of_choices)
        unowned = copies * np.array(parameter_bytes(self.graph, {}, self.world, None))
        self.tables.add_bytes(None, (unowned + input_bytes(self.graph))[None])
