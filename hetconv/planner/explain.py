"""Why a layer is split as it is: what every other choice would cost, with all other layers as chosen. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hetconv.cost.network import Array
from hetconv.schemas.plan import Considered
from hetconv.sharding.layer_rules import Split

from .cost_tables import Tables

Ints = npt.NDArray[np.intp]
DIGITS = 4  # significant ones, that a plan keeps


def considered(
    tables: Tables, choices: Mapping[str, tuple[Split, ...]], chosen: Mapping[str, int]
) -> dict[str, tuple[Considered, ...]]:
    """Of each layer of ``choices``, every choice that the tables do not forbid, the least costly first.

    ``chosen``: the choice of each layer; how joins lie follows. Seconds are rounded to four significant digits.
    """
    around = _Around(tables, choices, chosen)
    return {name: _listed(*around.seconds(name), splits, chosen[name]) for name, splits in choices.items() if splits}


def _listed(total: Array, computing: Array, splits: tuple[Split, ...], chosen: int) -> tuple[Considered, ...]:
    slower = total - total[chosen]
    slower[np.abs(slower) < 1e-12 * total[chosen]] = 0.0  # left over from rounding
    order = sorted(np.flatnonzero(np.isfinite(total)).tolist(), key=lambda k: (slower[k], k != chosen, k))
    seconds = np.stack([computing, total - computing, slower], 1)
    return tuple(Considered(splits[k], *(float(f"{s:.{DIGITS}g}") for s in seconds[k])) for k in order)


class _Around:
    """The tables by node: what is between it and each neighbour, with its own choices first."""

    def __init__(self, tables: Tables, layers: Mapping[str, Any], chosen: Mapping[str, int]):
        self.tables = tables
        self.edges: dict[str, dict[str, Array]] = {node: {} for node in tables.unary}
        for (u, v), table in tables.pairwise.items():
            self.edges[u][v], self.edges[v][u] = table, table.T
        self.joins: dict[str, tuple[str, ...]] = {}  # in the order of the model, each with the nodes that decide it
        self.chosen = {name: np.array([chosen[name]]) for name, splits in layers.items() if splits}
        for node in tables.unary:
            if node not in self.chosen:
                self.joins[node] = tuple(u for u in self.edges[node] if u in self.chosen)
                self.chosen[node] = self._state(node, {})

    def _state(self, join: str, moved: Mapping[str, Ints]) -> Ints:
        """(choices,): the one that its tables with what comes before it allow."""
        at = {u: moved.get(u, self.chosen[u]) for u in self.joins[join]}
        state: Ints = (self.tables.unary[join] + sum(self.edges[join][u].T[k] for u, k in at.items())).argmin(-1)
        return state

    def seconds(self, name: str) -> tuple[Array, Array]:
        """Over the choices of a layer, of all that goes by them: what it costs, and of this what computing does."""
        count = len(self.tables.unary[name])
        moved = {name: np.arange(count)}
        for join, before in self.joins.items():
            if any(u in moved for u in before):
                state = self._state(join, moved)
                if (state != self.chosen[join]).any():
                    moved[join] = state
        total, computing = np.zeros((2, count))
        for node, state in moved.items():
            total += self.tables.unary[node][state]
            if node in self.tables.computing:
                computing += self.tables.computing[node][state]
            for other, table in self.edges[node].items():
                if other not in moved:
                    total += table[state, self.chosen[other]]
                elif node < other:
                    total += table[state, moved[other]]
        return total, computing
