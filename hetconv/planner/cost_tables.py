"""Cost tables: seconds and bytes over the choices of variables.

A variable of the tables is a layer, whose choices are its candidate splits, or the state
of an operator that joins tensors. `table_builder` fills the tables, `search` minimizes
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hetconv.cost.network import Array, Network
from hetconv.cost.propagate import param_shards_of
from hetconv.sharding.layout import Box
from hetconv.sharding.param_shards import OverlapCell
from hetconv.sharding.rule import OpSharding
from hetconv.sharding.split import Split
from hetconv.tracing.graph import Graph, Node

Mask = npt.NDArray[np.bool_]
# Variables of a table: none, one, or two in the order of their names.
Scope = tuple[str, ...]


class ReceiveBuffers(NamedTuple):
    """Memory of what a reader receives of a value.

    Attributes:
        source: Variable that decides the layout of the value, if any does.
        reader: Variable that decides the layout that is read, if any does.
        count_bytes: Computes bytes of shape (choices, choices, P). It is called only
            where memory is short, for it takes long.
    """

    source: str | None
    reader: str | None
    count_bytes: Callable[[], Array]


@dataclass
class CostTables:
    """Seconds and bytes by the choices of variables.

    Attributes:
        constant: Seconds that no choice changes.
        unary: Seconds of shape (choices,), by variable.
        pairwise: Seconds of shape (choices, choices), by pair of variables.
        bytes: Bytes of shape (choices, ..., P), by scope, of what stays in memory on
            each device: inputs and parameters, and results (in inference those that are
            alive at the peak).
        receive_buffers: Bytes of buffers for what arrives, which stay in memory too.
        compute: Part of ``unary`` that operators compute.
    """

    constant: float = 0.0
    unary: dict[str, Array] = field(default_factory=dict)
    pairwise: dict[tuple[str, str], Array] = field(default_factory=dict)
    bytes: dict[Scope, Array] = field(default_factory=dict)
    receive_buffers: list[ReceiveBuffers] = field(default_factory=list)
    compute: dict[str | None, Array] = field(default_factory=dict)

    def add(self, variable: str | None, seconds: Array) -> None:
        """Adds seconds.

        Args:
            variable: Variable that decides them, if any does.
            seconds: Seconds of shape (choices,); (1,) without a variable.
        """
        if variable is None:
            self.constant += float(seconds[0])
        else:
            _add(self.unary, variable, seconds)

    def add_compute(self, variable: str | None, seconds: Array) -> None:
        """Adds seconds of computation, as `add` does."""
        _add(self.compute, variable, seconds)
        self.add(variable, seconds)

    def add_bytes(self, variable: str | None, held: Array) -> None:
        """Adds bytes that stay in memory.

        Args:
            variable: Variable that decides them, if any does.
            held: Bytes of shape (choices, P); (1, P) without a variable.
        """
        if variable is None:
            _add(self.bytes, (), held[0])
        else:
            _add(self.bytes, (variable,), held)

    def add_pair(self, u: str | None, v: str | None, seconds: Array) -> None:
        """Adds seconds that two variables decide together.

        Args:
            u: First variable; None has one choice.
            v: Second variable; None has one choice.
            seconds: Seconds of shape (choices of u, choices of v).
        """
        scope, table = table_of_scope(u, v, seconds)
        if len(scope) == 2:
            _add(self.pairwise, scope, table)
        else:
            self.add(scope[0] if scope else None, np.atleast_1d(table))

    def all_bytes(self) -> dict[Scope, Array]:
        """Sums ``bytes`` and ``receive_buffers``, as tables of shape (choices, ..., P)."""
        total, counted = dict(self.bytes), dict[int, Array]()
        for source, reader, count_bytes in self.receive_buffers:
            key = id(count_bytes)  # values that move alike share the function
            if key not in counted:
                counted[key] = count_bytes()
            _add(total, *table_of_scope(source, reader, counted[key]))
        return total


def table_of_scope(u: str | None, v: str | None, table: Array) -> tuple[Scope, Array]:
    """Rearranges a table of two variables to the sorted scope of those that exist.

    Args:
        u: First variable; None has one choice.
        v: Second variable; None has one choice. It may be equal to ``u``.
        table: Table of shape (choices of u, choices of v, ...).

    Returns:
        The scope, and the table with one dimension for each of its variables.
    """
    if u is None and v is None:
        return (), table[0, 0]
    if u is None or v is None:
        return ((str(v),), table[0]) if u is None else ((u,), table[:, 0])
    if u == v:
        diagonal = np.arange(len(table))
        return (u,), table[diagonal, diagonal]
    return ((u, v), table) if u < v else ((v, u), table.swapaxes(0, 1))


def _add(tables: dict[Any, Array], key: Any, table: Array) -> None:
    tables[key] = tables[key] + table if key in tables else table


# States of a chain of variables that says where a parameter's gradient is first partial.
EARLIER, HERE, NOT_YET = np.eye(3, dtype=bool)


class GradientSumTables:
    """Cost of summing the gradients of shared parameters.

    A gradient is summed once, however many operators make it partial.

    Args:
        graph: Model.
        network: Links between the devices.
        choices: Candidate splits of each layer.
    """

    def __init__(
        self, graph: Graph, network: Network, choices: Mapping[str, tuple[Split, ...]]
    ):
        self.graph, self.network, self.choices = graph, network, choices
        self._partial: dict[int, dict[str | None, Mask]] = {}
        self._costs: dict[tuple[int, int, str], Array] = {}

    def note(
        self, node: Node, variable: str | None, shardings: Sequence[OpSharding]
    ) -> None:
        """Notes the parameters whose gradients an operator makes partial.

        Args:
            node: Operator.
            variable: Variable that decides how it runs, if any does.
            shardings: How it runs, by choice of the variable.
        """
        partial = np.array([s.partial_grads for s in shardings])
        if not partial.any():
            return
        for i in dict.fromkeys((*node.params, *node.inputs)):
            value = self.graph.values[i]
            if value.param is not None and value.requires_grad:
                by_variable = self._partial.setdefault(i, {})
                before = by_variable.get(variable, np.zeros_like(partial))
                by_variable[variable] = before | partial

    def charge(self, tables: CostTables) -> None:
        """Adds the cost of all gradient sums to the tables.

        Where operators under several variables use a parameter, a chain of further
        variables finds the first one that makes its gradient partial, and only that
        one is charged.

        Args:
            tables: Receives the seconds.
        """
        for i, by_variable in self._partial.items():
            owner, cost = self._cost(i)
            (last, used), *rest = by_variable.items()
            tables.add_pair(owner, last, np.outer(cost, used))
            for k, (variable, uses) in enumerate(rest, 1):
                state = f"{self.graph.values[i].param}: {k}"
                after_last = [EARLIER if u else HERE | NOT_YET for u in used]
                here = [EARLIER | HERE if u else EARLIER | NOT_YET for u in uses]
                tables.add(state, np.zeros(3))
                tables.add_pair(last, state, zero_where(after_last))
                tables.add_pair(variable, state, zero_where(here))
                tables.add_pair(owner, state, np.outer(cost, HERE))
                last, used = state, EARLIER | HERE

    def _cost(self, param: int) -> tuple[str | None, Array]:
        """Finds the layer that owns a parameter, and seconds by its choice, (choices,)."""
        value = self.graph.values[param]
        layer, _, own_name = str(value.param).rpartition(".")
        if not self.choices.get(layer) or layer not in self.graph.layers:
            return None, np.array([self._seconds(param, {})])
        splits = self.choices[layer]
        key = id(self.graph.layers[layer]), id(splits), f"{own_name} {value.itemsize}"
        if key not in self._costs:
            seconds = [self._seconds(param, {layer: split}) for split in splits]
            self._costs[key] = np.array(seconds)
        return layer, self._costs[key]

    def _seconds(self, param: int, splits: Mapping[str, Split]) -> float:
        value, world = self.graph.values[param], self.network.world
        shards = param_shards_of(self.graph, param, splits, world)
        everywhere = OverlapCell(Box.whole(value.shape), tuple(range(world)))
        cells = shards.cells if shards is not None else (everywhere,)
        return value.itemsize * sum(
            box.numel * self.network.s_per_summed_byte(holders)
            for box, holders in cells
        )


def zero_where(allowed: npt.ArrayLike) -> Array:
    """Returns a table of 0 where a combination is allowed, and +inf elsewhere."""
    return np.where(allowed, 0.0, np.inf)
