"""Minima by HiGHS, against elimination."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import scipy.optimize

from hetconv.errors import PlanError
from hetconv.solver.elimination import Solution, solve
from hetconv.solver.factor_graph import FactorGraph
from hetconv.solver.milp import minimize_tables
from tests.random_tables import (
    CLIQUE,
    Array,
    brute,
    check,
    drawn,
    forbidding,
    minimize,
    minimize_milp,
    price,
    tables,
)


def test_fifty_larger_graphs_as_by_highs() -> None:
    leasts = []
    for seed in range(50):
        large = drawn(seed, nodes=24, choices=8, density=0.1)
        try:
            found, cost, gap = minimize_milp(*large)
        except PlanError:
            leasts.append(np.inf)
        else:
            leasts.append(price(found, *large))
            assert cost == pytest.approx(leasts[-1], rel=1e-12, abs=1e-12)
            assert gap < 1e-9
        check(large, leasts[-1])
    assert 0 < np.isinf(leasts).sum() < 17


def test_what_is_too_wide_goes_to_highs() -> None:
    unary, pairs = tables(
        np.random.default_rng(5), [6] * 5 + [2], combinations(range(6), 2)
    )
    found, cost = minimize(unary, pairs)
    assert solve(unary, pairs) == Solution(found, cost, 0.0, "elimination")
    solution = solve(unary, pairs, memory_bytes=10)
    assert (solution.choice, solution.cost, solution.method) == (found, cost, "milp")
    assert solution.gap < 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_tables_over_three_nodes(seed: int) -> None:
    """Elimination may leave such ones to HiGHS."""
    rng = np.random.default_rng(seed)
    shapes = {
        (0,): (2, 1, 1, 1),
        (1,): (3, 1, 1),
        (2,): (4, 1),
        (3,): (3,),
        (0, 1, 2): (2, 3, 4, 1),
        (1, 3): (3, 1, 3),
    }
    summands = {scope: forbidding(rng, shape) for scope, shape in shapes.items()}
    for table in summands.values():
        table.flat[0] = 3  # not all is forbidden
    found, slack = minimize_tables(
        {scope: table.squeeze() for scope, table in summands.items()}, 60
    )
    joint = sum(summands.values())
    assert joint[tuple(found[v] for v in range(4))] == joint.min()
    assert slack < 1e-9


def test_elimination_goes_as_far_as_it_can_before_highs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chains and branches between the nodes of a clique leave nothing of them in what
    HiGHS is given.
    """
    edges = [*combinations(range(4), 2), (0, 4), (4, 5), (5, 1), (5, 6)]
    unary, pairs = tables(np.random.default_rng(6), [5] * 7, edges)
    given_sizes = []

    def noted(c: Array, **options: Any) -> Any:
        given_sizes.append(len(c))
        return milp(c, **options)

    milp = scipy.optimize.milp
    monkeypatch.setattr(scipy.optimize, "milp", noted)
    assert solve(unary, pairs, memory_bytes=10).cost == pytest.approx(
        brute(unary, pairs), rel=1e-12
    )
    assert given_sizes[0] <= 4 * 5 + 6 * 25


@pytest.mark.parametrize("seed", range(4))
def test_highs_leaves_no_gap_where_it_branches(seed: int) -> None:
    unary, pairs = tables(
        np.random.default_rng(seed), [4] * 7, combinations(range(7), 2)
    )
    found, cost, gap = minimize_milp(unary, pairs)
    assert (found, cost) == minimize(unary, pairs)
    assert gap < 1e-9


def test_the_gap_is_what_the_bound_leaves_open(monkeypatch: pytest.MonkeyPatch) -> None:
    unary, pairs = {"u": [1.0, 2], "v": [3.0, 5]}, {("u", "v"): [[4.0, 0], [0, 0]]}
    clique = tables(np.random.default_rng(1), [4] * 7, combinations(range(7), 2))
    milp = scipy.optimize.milp

    def stopped(*args: Any, **options: Any) -> Any:
        result = milp(*args, **options)
        result.mip_dual_bound /= (
            2  # of what the choice costs beyond the least of each table
        )
        return result

    assert minimize_milp(unary, pairs) == ({"u": 1, "v": 0}, 5.0, 0.0)
    monkeypatch.setattr(scipy.optimize, "milp", stopped)
    assert minimize_milp(unary, pairs) == ({"u": 1, "v": 0}, 5.0, pytest.approx(0.1))
    assert solve(*clique, memory_bytes=0).gap > 0.01


@pytest.mark.parametrize("seed", range(20))
def test_what_highs_does_not_find_in_time_is_found_by_descent(seed: int) -> None:
    """A choice, and a gap that the least lies within."""
    pairs = list(combinations(range(7), 2))[:: 1 + seed % 2]
    large = tables(np.random.default_rng(seed), [4] * 7, pairs)
    found, cost, gap = minimize_milp(*large, time_limit=0)
    assert cost == pytest.approx(price(found, *large), rel=1e-12, abs=1e-12)
    assert cost - gap * abs(cost) - 1e-12 <= minimize(*large)[1] <= cost + 1e-12


def test_a_plan_is_found_where_highs_has_no_time() -> None:
    solution = solve(*CLIQUE, memory_bytes=0, time_limit=0)
    assert solution.method == "milp"
    assert price(solution.choice, *CLIQUE) == pytest.approx(solution.cost)
    assert solution.cost <= 1.2 * minimize(*CLIQUE)[1]


def test_highs_out_of_time_says_so_where_resources_are_short() -> None:
    cap = {(0,): np.arange(9.0)[:, None]}, np.array([1.5])
    with pytest.raises(PlanError, match=r"HiGHS found no choice within 0 s.*more time"):
        minimize_tables(FactorGraph.of(*CLIQUE).tables, 0, cap)
