"""Seconds and bytes by the choices of nodes: what `table_builder` fills and `search`
minimizes. Pure.
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

Scope = tuple[str, ...]  # no node, one, or two in the order of their names


class Copies(NamedTuple):
    """Of what ``reader`` reads of ``node``: (choices, choices, P) bytes, when they are
    asked for; it takes a while.
    """

    node: str | None
    reader: str | None
    counted: Callable[[], Array]


@dataclass
class CostTables:
    """Seconds over the choices of nodes. ``constant``: those that no choice changes.

    ``held``: (choices, P) bytes of what stays in memory on each device: inputs and
    parameters, in training every result too, and ``copies``; in inference the results
    that are there when most is. ``computing``: what of ``unary`` is it.
    """

    constant: float = 0.0
    unary: dict[str, Array] = field(default_factory=dict)
    pairwise: dict[tuple[str, str], Array] = field(default_factory=dict)
    bytes: dict[Scope, Array] = field(default_factory=dict)
    copies: list[Copies] = field(default_factory=list)
    computing: dict[str | None, Array] = field(default_factory=dict)

    def add(self, node: str | None, seconds: Array) -> None:
        """(choices,) of a node, or one number that is the same whatever is chosen."""
        if node is None:
            self.constant += float(seconds[0])
        else:
            self.unary[node] = (
                self.unary[node] + seconds if node in self.unary else seconds
            )

    def add_bytes(self, node: str | None, held: Array) -> None:
        """(choices, P) bytes."""
        scope = () if node is None else (node,)
        _add(self.bytes, scope, held[0] if node is None else held)

    def add_pair(self, u: str | None, v: str | None, seconds: Array) -> None:
        """(choices of u, choices of v); of no node there is one choice."""
        scope, table = table_of_scope(u, v, seconds)
        if len(scope) == 2:
            _add(self.pairwise, scope, table)
        else:
            self.add(scope[0] if scope else None, np.atleast_1d(table))

    def all_bytes(self) -> dict[Scope, Array]:
        """``held`` with ``copies``: (choices of each node of the scope, ..., P) bytes."""
        found, known = dict(self.bytes), dict[int, Array]()
        for node, reader, counted in self.copies:
            if id(counted) not in known:
                known[id(counted)] = counted()
            _add(found, *table_of_scope(node, reader, known[id(counted)]))
        return found


def table_of_scope(u: str | None, v: str | None, table: Array) -> tuple[Scope, Array]:
    """(choices of u, choices of v, ...) as a table of the nodes that there are, in order."""
    if u == v:
        return (() if u is None else (u,)), (
            table[0, 0] if u is None else _diagonal(table)
        )
    if u is None or v is None:
        return (str(v if u is None else u),), (table[0] if u is None else table[:, 0])
    return ((u, v), table) if u < v else ((v, u), table.swapaxes(0, 1))


def _diagonal(table: Array) -> Array:
    at = np.arange(len(table))
    found: Array = table[at, at]
    return found


def _add(tables: dict[Any, Array], scope: Scope, table: Array) -> None:
    tables[scope] = tables[scope] + table if scope in tables else table


Mask = npt.NDArray[np.bool_]
EARLIER, NOW, NEVER = np.eye(3, dtype=bool)  # when a parameter was first used on parts


class GradientSumTables:
    """Which choices use which parameters on parts. A parameter's gradient is summed
    once, however many do.
    """

    def __init__(
        self, graph: Graph, network: Network, choices: Mapping[str, tuple[Split, ...]]
    ):
        self.graph, self.network, self.choices = graph, network, choices
        self._used: dict[int, dict[str | None, Mask]] = {}
        self._costs: dict[tuple[int, int, str], Array] = {}

    def note(self, node: Node, name: str | None, steps: Sequence[OpSharding]) -> None:
        """An operator runs in one of these ways by the choice of a node of the tables."""
        contributes = np.array([s.partial_grads for s in steps])
        for i in (
            dict.fromkeys((*node.params, *node.inputs)) if contributes.any() else ()
        ):
            if (
                self.graph.values[i].param is not None
                and self.graph.values[i].requires_grad
            ):
                by_node = self._used.setdefault(i, {})
                by_node[name] = (
                    by_node.get(name, np.zeros_like(contributes)) | contributes
                )

    def charge(self, tables: CostTables) -> None:
        """Of a parameter that operators under different nodes use, more nodes say where
        it is used first.
        """
        for i, by_node in self._used.items():
            owner, cost = self._cost(i)
            (last, used), *others = by_node.items()
            tables.add_pair(owner, last, np.outer(cost, used))
            for k, (name, uses) in enumerate(others, 1):
                state = f"{self.graph.values[i].param}: {k}"
                tables.add(state, np.zeros(3))
                tables.add_pair(
                    last,
                    state,
                    _forbidden([EARLIER if u else NOW | NEVER for u in used]),
                )
                tables.add_pair(
                    name,
                    state,
                    _forbidden([EARLIER | NOW if u else EARLIER | NEVER for u in uses]),
                )
                tables.add_pair(owner, state, np.outer(cost, NOW))
                last, used = state, EARLIER | NOW

    def _cost(self, param: int) -> tuple[str | None, Array]:
        """The layer whose split says who holds a parameter, and by that the seconds of
        summing its gradient.
        """
        value, world = self.graph.values[param], self.network.world
        layer, _, own = str(value.param).rpartition(".")
        if not self.choices.get(layer) or layer not in self.graph.layers:
            return None, np.array([self._seconds(param, {}, world)])
        splits = self.choices[layer]
        key = id(self.graph.layers[layer]), id(splits), f"{own} {value.itemsize}"
        if key not in self._costs:
            self._costs[key] = np.array(
                [self._seconds(param, {layer: split}, world) for split in splits]
            )
        return layer, self._costs[key]

    def _seconds(self, param: int, splits: Mapping[str, Split], world: int) -> float:
        value = self.graph.values[param]
        held = param_shards_of(self.graph, param, splits, world)
        atoms = (
            held.cells
            if held is not None
            else (OverlapCell(Box.whole(value.shape), tuple(range(world))),)
        )
        return value.itemsize * sum(
            box.numel * self.network.s_per_summed_byte(holders)
            for box, holders in atoms
        )


def _forbidden(allowed: Sequence[Mask]) -> Array:
    return np.where(allowed, 0.0, np.inf)
