"""Search for the best combination of the layers' splits, and what other splits would cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hetconv.cost.estimator import StepEstimator
from hetconv.cost.network import Array
from hetconv.schemas.plan import Alternative
from hetconv.sharding.split import SPATIAL_KINDS, Split
from hetconv.solver.elimination import solve

from .candidates import Candidates
from .cost_tables import CostTables
from .memory_limits import Choice, Limits, fits, solve_within
from .partition import Splits, Weights, has_dimension
from .table_builder import build_tables

# Rounds of moving work away from devices with too little memory.
MAX_MEMORY_ROUNDS = 24
SIGNIFICANT_DIGITS = 4  # of seconds that a plan file keeps
ROUNDING_ERROR = 1e-12  # of a difference, as a fraction of the seconds
Ints = npt.NDArray[np.intp]
Choices = Mapping[str, tuple[Split, ...]]


class Search:
    """Search among candidate splits of each layer.

    Args:
        candidates: Candidates of the model.
        estimator: Predicts steps of the model.
        choices: Candidate splits by layer.
    """

    def __init__(
        self, candidates: Candidates, estimator: StepEstimator, choices: Choices
    ):
        self.candidates, self.estimator = candidates, estimator
        self.choices = choices
        self.tables = build_tables(
            candidates.graph, candidates.profile, choices, candidates.mode
        )
        self.lean_models: list[Splits] = []  # that fit the memory

    @classmethod
    def within(
        cls, candidates: Candidates, estimator: StepEstimator, limits: Limits
    ) -> Search:
        """Builds a search with candidates for limited memory.

        Where the fastest combination does not fit, there are further candidates, in
        proportions that fit.

        Args:
            candidates: Candidates of the model.
            estimator: Predicts steps of the model.
            limits: Bytes of memory of each device.
        """
        proportions = candidates.shared_proportions()
        search = cls(candidates, estimator, candidates.choices(proportions))
        if fits(search.memory(search.fastest), limits):
            return search
        lean = list(_lean_models(candidates, estimator, limits))
        lean_proportions = dict.fromkeys(weights for weights, _ in lean)
        choices = candidates.choices([*lean_proportions, *proportions])
        search = cls(candidates, estimator, choices)
        search.lean_models = [splits for _, splits in lean]
        return search

    @cached_property
    def fastest(self) -> Choice:
        """Choice of the fewest seconds, whatever memory it takes."""
        return solve(self.tables.unary, self.tables.pairwise).choice

    def splits(self, choice: Mapping[str, int]) -> Splits:
        """Returns the split of each layer at a choice."""
        return {name: splits[choice[name]] for name, splits in self.choices.items()}

    def memory(self, choice: Mapping[str, int]) -> tuple[int, ...]:
        """Returns the bytes on each device at a choice."""
        return self.estimator.memory(self.splits(choice))

    def best(self, limits: Limits) -> Splits | None:
        """Finds the best combination that fits the memory, or None.

        Args:
            limits: Bytes of memory of each device.
        """
        if fits(self.memory(self.fastest), limits):
            return self.splits(self.fastest)
        found = [*self.lean_models]
        within = solve_within(self.tables, limits, self.memory)
        if within is not None:
            found.append(self.splits(within))
        return min(
            found,
            default=None,
            key=lambda splits: self.estimator.estimate(splits)[0].step_s,
        )

    def alternatives(self, chosen: Splits) -> dict[str, tuple[Alternative, ...]]:
        """Lists all candidates of each layer, with the other layers as chosen.

        Args:
            chosen: Split of each layer.
        """
        search = self
        if any(chosen[name] not in splits for name, splits in self.choices.items()):
            shared: dict[tuple[Split, ...], tuple[Split, ...]] = {}
            choices = {}
            for name, splits in self.choices.items():
                extended = tuple(dict.fromkeys((*splits, chosen[name])))
                choices[name] = shared.setdefault(extended, extended)
            search = Search(self.candidates, self.estimator, choices)
        indices = {n: splits.index(chosen[n]) for n, splits in search.choices.items()}
        return alternatives(search.tables, search.choices, indices)


def _lean_models(
    candidates: Candidates, estimator: StepEstimator, limits: Limits
) -> Iterator[tuple[Weights, Splits]]:
    """Finds proportions near the balanced ones with which a whole model fits."""
    for kind in (*SPATIAL_KINDS, "sample"):
        if kind not in candidates.kinds or not has_dimension(candidates.graph, kind):
            continue
        weights = candidates.balance(kind)
        for _ in range(MAX_MEMORY_ROUNDS):
            splits = candidates.whole(kind, weights)
            used = estimator.memory(splits)
            excess = [max(m / c, 1.0) for m, c in zip(used, limits, strict=True)]
            if max(excess) == 1:
                yield weights, splits
                break
            weights = tuple(w / e for w, e in zip(weights, excess, strict=True))


def alternatives(
    tables: CostTables, choices: Choices, chosen: Mapping[str, int]
) -> dict[str, tuple[Alternative, ...]]:
    """Lists all choices of each layer that the tables allow, the cheapest first.

    Args:
        tables: Seconds by choice.
        choices: Candidate splits by layer.
        chosen: Choice of each layer. The states of joins follow from it.

    Returns:
        Alternatives by layer, with seconds rounded to four significant digits.
    """
    costs = _ChoiceCosts(tables, choices, chosen)
    return {
        name: _ranked(*costs.seconds(name), splits, chosen[name])
        for name, splits in choices.items()
        if splits
    }


def _ranked(
    total: Array, compute: Array, splits: tuple[Split, ...], chosen: int
) -> tuple[Alternative, ...]:
    slower = total - total[chosen]
    slower[np.abs(slower) < ROUNDING_ERROR * total[chosen]] = 0.0
    order = sorted(
        np.flatnonzero(np.isfinite(total)).tolist(),
        key=lambda k: (slower[k], k != chosen, k),
    )
    columns = np.stack([compute, total - compute, slower], 1)
    return tuple(Alternative(splits[k], *map(_rounded, columns[k])) for k in order)


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.{SIGNIFICANT_DIGITS}g}")


class _ChoiceCosts:
    """Seconds of each choice of a layer, with the other layers as chosen."""

    def __init__(self, tables: CostTables, choices: Choices, chosen: Mapping[str, int]):
        self.tables = tables
        # Table between a variable and each neighbour, the variable's own choices first.
        self.edges: dict[str, dict[str, Array]] = {name: {} for name in tables.unary}
        for (u, v), table in tables.pairwise.items():
            self.edges[u][v], self.edges[v][u] = table, table.T
        self.chosen = {
            name: np.array([chosen[name]]) for name, splits in choices.items() if splits
        }
        # Variables before each join that decide it; joins in the order of the model.
        self.deciding: dict[str, tuple[str, ...]] = {}
        for name in tables.unary:
            if name not in self.chosen:
                before = (u for u in self.edges[name] if u in self.chosen)
                self.deciding[name] = tuple(before)
                self.chosen[name] = self._state(name, {})

    def _state(self, join: str, changed: Mapping[str, Ints]) -> Ints:
        """(choices,): the state that the variables before a join allow."""
        costs = self.tables.unary[join]
        total = sum(
            self.edges[join][u].T[changed.get(u, self.chosen[u])]
            for u in self.deciding[join]
        )
        state: Ints = (costs + total).argmin(-1)
        return state

    def seconds(self, name: str) -> tuple[Array, Array]:
        """Adds up all tables that depend on a layer.

        Returns:
            Seconds of each choice, (choices,), and the part that operators compute.
        """
        count = len(self.tables.unary[name])
        changed = {name: np.arange(count)}
        for join, deciding in self.deciding.items():
            if not changed.keys().isdisjoint(deciding):
                state = self._state(join, changed)
                if (state != self.chosen[join]).any():
                    changed[join] = state
        total, compute = np.zeros((2, count))
        for variable, state in changed.items():
            total += self.tables.unary[variable][state]
            if variable in self.tables.compute:
                compute += self.tables.compute[variable][state]
            for neighbour, table in self.edges[variable].items():
                if neighbour not in changed:
                    total += table[state, self.chosen[neighbour]]
                elif variable < neighbour:
                    total += table[state, changed[neighbour]]
        return total, compute
