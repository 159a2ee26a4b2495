"""Sums of parameters' gradients over ranks, as tables over the choices that use them on parts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from hetconv.cost.network import Array, Network
from hetconv.cost.propagate import held_of
from hetconv.sharding.layer_rules import Split, Step
from hetconv.sharding.layout import Box
from hetconv.sharding.param_shards import Atom
from hetconv.tracing.graph import Graph, Node

from .cost_tables import Tables

Mask = npt.NDArray[np.bool_]
EARLIER, NOW, NEVER = np.eye(3, dtype=bool)  # when a parameter was first used on parts


class Contributions:
    """Which choices use which parameters on parts. A parameter's gradient is summed once, however many do."""

    def __init__(self, graph: Graph, network: Network, choices: Mapping[str, tuple[Split, ...]]):
        self.graph, self.network, self.choices = graph, network, choices
        self._used: dict[int, dict[str | None, Mask]] = {}
        self._costs: dict[tuple[int, int, str], Array] = {}

    def note(self, node: Node, name: str | None, steps: Sequence[Step]) -> None:
        """An operator runs in one of these ways by the choice of a node of the tables."""
        contributes = np.array([s.contributes for s in steps])
        for i in dict.fromkeys((*node.params, *node.inputs)) if contributes.any() else ():
            if self.graph.values[i].param is not None and self.graph.values[i].requires_grad:
                by_node = self._used.setdefault(i, {})
                by_node[name] = by_node.get(name, np.zeros_like(contributes)) | contributes

    def charge(self, tables: Tables) -> None:
        """Of a parameter that operators under different nodes use, more nodes say where it is used first."""
        for i, by_node in self._used.items():
            owner, cost = self._cost(i)
            (last, used), *others = by_node.items()
            tables.relate(owner, last, np.outer(cost, used))
            for k, (name, uses) in enumerate(others, 1):
                state = f"{self.graph.values[i].param}: {k}"
                tables.charge(state, np.zeros(3))
                tables.relate(last, state, _forbidden([EARLIER if u else NOW | NEVER for u in used]))
                tables.relate(name, state, _forbidden([EARLIER | NOW if u else EARLIER | NEVER for u in uses]))
                tables.relate(owner, state, np.outer(cost, NOW))
                last, used = state, EARLIER | NOW

    def _cost(self, param: int) -> tuple[str | None, Array]:
        """The layer whose split says who holds a parameter, and by that the seconds of summing its gradient."""
        value, world = self.graph.values[param], self.network.world
        layer, _, own = str(value.param).rpartition(".")
        if not self.choices.get(layer) or layer not in self.graph.layers:
            return None, np.array([self._seconds(param, {}, world)])
        splits = self.choices[layer]
        key = id(self.graph.layers[layer]), id(splits), f"{own} {value.itemsize}"
        if key not in self._costs:
            self._costs[key] = np.array([self._seconds(param, {layer: split}, world) for split in splits])
        return layer, self._costs[key]

    def _seconds(self, param: int, splits: Mapping[str, Split], world: int) -> float:
        value = self.graph.values[param]
        held = held_of(self.graph, param, splits, world)
        atoms = held.atoms if held is not None else (Atom(Box.whole(value.shape), tuple(range(world))),)
        return value.itemsize * sum(box.numel * self.network.s_per_summed_byte(holders) for box, holders in atoms)


def _forbidden(allowed: Sequence[Mask]) -> Array:
    return np.where(allowed, 0.0, np.inf)
