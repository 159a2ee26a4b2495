"""Random cost tables of graphs, what a choice costs, and the minimum by brute force."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from hetconv.errors import PlanError
from hetconv.solver import milp
from hetconv.solver.elimination import Pairwise, Unary, solve
from hetconv.solver.factor_graph import FactorGraph, total_cost

Array = np.ndarray[Any, np.dtype[np.float64]]
Tables = tuple[dict[str, Array], dict[tuple[str, str], Array]]
Edges = Iterable[tuple[int, int]]


def uniform(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.random(shape)


def ties(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.integers(-2, 4, shape).astype(float)


def forbidding(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return np.where(rng.random(shape) < 0.3, np.inf, ties(rng, shape))


KINDS = [uniform, ties, forbidding]


def tables(
    rng: np.random.Generator,
    sizes: list[int],
    edges: Edges,
    kind: Callable[..., Array] = uniform,
) -> Tables:
    """Random ones for nodes v0, v1, ..., each pair in either direction."""
    ends = [(u, v) if rng.random() < 0.5 else (v, u) for u, v in edges]
    return (
        {f"v{v}": kind(rng, (n,)) for v, n in enumerate(sizes)},
        {(f"v{u}", f"v{v}"): kind(rng, (sizes[u], sizes[v])) for u, v in ends},
    )


def drawn(seed: int, nodes: int, choices: int, density: float | None = None) -> Tables:
    rng = np.random.default_rng(seed)
    n, p = int(rng.integers(1, nodes + 1)), rng.random() if density is None else density
    edges = [pair for pair in combinations(range(n), 2) if rng.random() < p]
    return tables(rng, rng.integers(1, choices + 1, n).tolist(), edges, KINDS[seed % 3])


def price(
    found: dict[str, int], unary: dict[str, Array], pairs: dict[tuple[str, str], Array]
) -> float:
    """The definition."""
    own = sum(table[found[v]] for v, table in unary.items())
    return float(
        own + sum(table[found[u], found[v]] for (u, v), table in pairs.items())
    )


def brute(unary: dict[str, Array], pairs: dict[tuple[str, str], Array]) -> float:
    """The least over all joint choices: one table over all nodes."""
    names, n = list(unary), len(unary)

    def over(table: Array, *axes: int) -> Array:
        if axes != tuple(sorted(axes)):
            table, axes = table.T, axes[::-1]
        return np.expand_dims(table, [axis for axis in range(n) if axis not in axes])

    summands = [over(table, names.index(v)) for v, table in unary.items()]
    summands += [
        over(table, names.index(u), names.index(v)) for (u, v), table in pairs.items()
    ]
    return float(reduce(np.add, summands).min())


def minimize(unary: Unary, pairwise: Pairwise) -> tuple[dict[str, int], float]:
    """Returns the choice and cost that elimination finds without HiGHS."""
    solution = solve(unary, pairwise)
    assert solution.method == "elimination"
    return solution.choice, solution.cost


def minimize_milp(
    unary: Unary, pairwise: Pairwise, *, time_limit: float = milp.TIME_LIMIT_S
) -> tuple[dict[str, int], float, float]:
    """Returns the choice, cost and gap that HiGHS finds without elimination."""
    graph = FactorGraph.of(unary, pairwise)
    choice, slack = milp.minimize_tables(graph.tables, time_limit)
    cost = total_cost(graph.tables, choice)
    named = {name: choice[v] for v, name in enumerate(graph.names)}
    return named, cost, milp.relative_gap(slack, cost)


def check(given_tables: Tables, least: float) -> None:
    """What is found costs what it says, and this is the least; or all is forbidden, and
    that is said.
    """
    if np.isinf(least):
        with pytest.raises(PlanError, match="forbidden"):
            minimize(*given_tables)
        return
    found, cost = minimize(*given_tables)
    assert cost == pytest.approx(price(found, *given_tables), rel=1e-12, abs=1e-12)
    assert cost == pytest.approx(least, rel=1e-12, abs=1e-12)


CLIQUE = tables(
    np.random.default_rng(4), [9] * 8, combinations(range(8), 2)
)  # of width 7
