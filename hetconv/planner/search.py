"""The search for the best combination of the layers' choices, and what every other
choice would have cost. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from hetconv.cost.estimator import StepEstimator
from hetconv.cost.network import Array
from hetconv.schemas.plan import Alternative
from hetconv.sharding.split import SPATIAL_KINDS, Split
from hetconv.solver.elimination import solve

from .candidates import Candidates
from .cost_tables import CostTables
from .memory_limits import Choice, Limits, solve_within
from .partition import Splits, Weights, has_dimension
from .table_builder import build_tables

TURNS = 24  # of taking from who has too little memory, until all have enough
Choices = Mapping[str, tuple[Split, ...]]


class Search:
    """The layers' choices, what they cost, and what they mean."""

    def __init__(self, ways: Candidates, pricer: StepEstimator, choices: Choices):
        self.ways, self.pricer, self.choices = ways, pricer, choices
        self.tables = build_tables(ways.graph, ways.profile, choices, ways.mode)
        self.roomy: list[
            Splits
        ] = []  # whole models that fit, where what is fastest does not

    @classmethod
    def within(cls, ways: Candidates, pricer: StepEstimator, limits: Limits) -> Search:
        """With proportions for which there is room among the choices, where what would
        be fastest does not fit.
        """
        pool = ways.shared_proportions()
        search = cls(ways, pricer, ways.choices(pool))
        if search.fits(search.fastest, limits):
            return search
        roomy = _with_room(ways, pricer, limits)
        search = cls(
            ways,
            pricer,
            ways.choices([*dict.fromkeys(weights for weights, _ in roomy), *pool]),
        )
        search.roomy = [splits for _, splits in roomy]
        return search

    @cached_property
    def fastest(self) -> Choice:
        """Whatever memory it takes."""
        return solve(self.tables.unary, self.tables.pairwise).choice

    def fits(self, choice: Choice, limits: Limits) -> bool:
        return all(m <= c for m, c in zip(self.memory(choice), limits, strict=True))

    def splits(self, choice: Mapping[str, int]) -> Splits:
        return {name: of_layer[choice[name]] for name, of_layer in self.choices.items()}

    def memory(self, choice: Mapping[str, int]) -> tuple[int, ...]:
        return self.pricer.memory(self.splits(choice))

    def best(self, limits: Limits) -> Splits | None:
        """The best combination; None if none was found that fits the memory."""
        if self.fits(self.fastest, limits):
            return self.splits(self.fastest)
        within = solve_within(self.tables, limits, self.memory)
        found = [*self.roomy, *([self.splits(within)] if within is not None else [])]
        return min(
            found,
            default=None,
            key=lambda splits: self.pricer.estimate(splits)[0].step_s,
        )

    def alternatives(self, chosen: Splits) -> dict[str, tuple[Alternative, ...]]:
        """Of each layer, all its choices beside the chosen one, with the other layers as chosen."""
        if any(chosen[name] not in of_layer for name, of_layer in self.choices.items()):
            more: dict[
                tuple[Split, ...], tuple[Split, ...]
            ] = {}  # equal layers go on having the same object
            added = {
                n: tuple(dict.fromkeys((*c, chosen[n])))
                for n, c in self.choices.items()
            }
            return Search(
                self.ways,
                self.pricer,
                {n: more.setdefault(c, c) for n, c in added.items()},
            ).alternatives(chosen)
        return alternatives(
            self.tables,
            self.choices,
            {n: c.index(chosen[n]) for n, c in self.choices.items()},
        )


def _with_room(
    ways: Candidates, pricer: StepEstimator, limits: Limits
) -> list[tuple[Weights, Splits]]:
    """Whole models, each cut in one way, that fit: in proportions as near to the
    balanced ones as that goes.
    """
    found = []
    for kind in (
        kind
        for kind in (*SPATIAL_KINDS, "sample")
        if kind in ways.kinds and has_dimension(ways.graph, kind)
    ):
        weights = ways.balance(kind)
        for _ in range(TURNS):
            splits = ways.whole(kind, weights)
            over = [
                max(m / c, 1.0)
                for m, c in zip(pricer.memory(splits), limits, strict=True)
            ]
            if max(over) == 1:
                found.append((weights, splits))
                break
            weights = tuple(w / o for w, o in zip(weights, over, strict=True))
    return found


Ints = npt.NDArray[np.intp]
DIGITS = 4  # significant ones, that a plan keeps


def alternatives(
    tables: CostTables,
    choices: Mapping[str, tuple[Split, ...]],
    chosen: Mapping[str, int],
) -> dict[str, tuple[Alternative, ...]]:
    """Of each layer of ``choices``, every choice that the tables do not forbid, the
    least costly first.

    ``chosen``: the choice of each layer; how joins lie follows. Seconds are rounded to
    four significant digits.
    """
    around = _Around(tables, choices, chosen)
    return {
        name: _listed(*around.seconds(name), splits, chosen[name])
        for name, splits in choices.items()
        if splits
    }


def _listed(
    total: Array, computing: Array, splits: tuple[Split, ...], chosen: int
) -> tuple[Alternative, ...]:
    slower = total - total[chosen]
    slower[np.abs(slower) < 1e-12 * total[chosen]] = 0.0  # left over from rounding
    order = sorted(
        np.flatnonzero(np.isfinite(total)).tolist(),
        key=lambda k: (slower[k], k != chosen, k),
    )
    seconds = np.stack([computing, total - computing, slower], 1)
    return tuple(
        Alternative(splits[k], *(float(f"{s:.{DIGITS}g}") for s in seconds[k]))
        for k in order
    )


class _Around:
    """The tables by node: what is between it and each neighbour, with its own choices first."""

    def __init__(
        self, tables: CostTables, layers: Mapping[str, Any], chosen: Mapping[str, int]
    ):
        self.tables = tables
        self.edges: dict[str, dict[str, Array]] = {node: {} for node in tables.unary}
        for (u, v), table in tables.pairwise.items():
            self.edges[u][v], self.edges[v][u] = table, table.T
        self.joins: dict[
            str, tuple[str, ...]
        ] = {}  # in the order of the model, each with the nodes that decide it
        self.chosen = {
            name: np.array([chosen[name]]) for name, splits in layers.items() if splits
        }
        for node in tables.unary:
            if node not in self.chosen:
                self.joins[node] = tuple(
                    u for u in self.edges[node] if u in self.chosen
                )
                self.chosen[node] = self._state(node, {})

    def _state(self, join: str, moved: Mapping[str, Ints]) -> Ints:
        """(choices,): the one that its tables with what comes before it allow."""
        at = {u: moved.get(u, self.chosen[u]) for u in self.joins[join]}
        state: Ints = (
            self.tables.unary[join]
            + sum(self.edges[join][u].T[k] for u, k in at.items())
        ).argmin(-1)
        return state

    def seconds(self, name: str) -> tuple[Array, Array]:
        """Over the choices of a layer, of all that goes by them: what it costs, and of
        this what computing does.
        """
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
