"""Minimum of a factor graph by HiGHS, for graphs that are too wide to eliminate.

The integer program is the local polytope with integer choices. Each choice of a node is
a 0/1 variable, and those of a node add up to 1. Each entry of a table over several nodes
is a variable >= 0; the entries with a given choice of one node add up to the variable of
that choice. With integer choices these variables are products, so that the minimum is
exact. The relaxation is a lower bound.

Source: Schlesinger, 1976; Wainwright & Jordan, Graphical Models, Exponential Families,
and Variational Inference, 2008.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from hetconv.errors import PlanError

from .factor_graph import Array, Indices, Scope, total_cost

FORBIDDEN_MESSAGE = "every choice is forbidden; give a finite cost to one"
INFEASIBLE_STATUS = 2  # of scipy.optimize.milp
TIME_LIMIT_S = 60.0
# HiGHS takes sums that differ by 1e-6 for equal, so costs are scaled to this range.
COST_RANGE = 1e3


def relative_gap(slack: float, cost: float) -> float:
    """Returns ``slack`` as a fraction of ``cost``."""
    return slack / abs(cost) if cost else (np.inf if slack else 0.0)


def minimize_tables(
    tables: Mapping[Scope, Array],
    time_limit: float,
    limits: tuple[Mapping[Scope, Array], Array] | None = None,
) -> tuple[dict[int, int], float]:
    """Minimizes a sum of tables, under limits on resources if there are any.

    Args:
        tables: Costs by scope: one table for each node, and any over several nodes.
        time_limit: Seconds that HiGHS may take.
        limits: Resources that choices use, as tables of shape (..., P) by scope, and
            how much there is of each of the P resources, as an array of shape (P,).

    Returns:
        The choice of each node, and by how much its cost may exceed the minimum.

    Raises:
        PlanError: If every choice is forbidden, or none was found.
    """
    if not tables:
        return {}, 0.0
    from scipy.optimize import milp  # a slow import that most plans do not need

    scopes = sorted(tables, key=lambda scope: (len(scope), scope))  # single nodes first
    allowed = {scope: np.nonzero(np.isfinite(tables[scope])) for scope in scopes}
    costs = [tables[scope][allowed[scope]] for scope in scopes]
    if not all(map(len, costs)):
        raise PlanError(FORBIDDEN_MESSAGE)
    nodes = [scope[0] for scope in scopes if len(scope) == 1]
    ends = np.cumsum([len(c) for c in costs])
    lowest = [c.min() for c in costs]
    scale = max(map(np.ptp, costs)) / COST_RANGE or 1.0
    scaled = [(c - low) / scale for c, low in zip(costs, lowest, strict=True)]
    constraints = [_consistency(allowed, {v: len(tables[v,]) for v in nodes})]
    if limits is not None:
        constraints.append(_resources(allowed, *limits))
    result = milp(
        np.concatenate(scaled),
        integrality=np.arange(ends[-1]) < ends[len(nodes) - 1],
        constraints=constraints,
        options={"time_limit": time_limit, "mip_rel_gap": 0.0},
    )
    if result.x is not None:
        values = np.split(result.x, ends[: len(nodes)])
        choice = {
            v: int(allowed[v,][0][x.argmax()])
            for v, x in zip(nodes, values, strict=False)
        }
        bound = float(result.mip_dual_bound * scale + sum(lowest))
        return choice, max(total_cost(tables, choice) - bound, 0.0)
    if result.status == INFEASIBLE_STATUS:
        raise PlanError(FORBIDDEN_MESSAGE)
    if limits is None:
        choice = coordinate_descent(tables)
        if np.isfinite(cost := total_cost(tables, choice)):
            return choice, cost - float(sum(lowest))
    raise PlanError(
        f"HiGHS found no choice within {time_limit:g} s: {result.message} Give it more "
        "time, or fewer choices"
    )


def coordinate_descent(tables: Mapping[Scope, Array]) -> dict[int, int]:
    """Finds a choice that no change of a single node makes cheaper.

    Iterated conditional modes: descents start from the minimum of each node's own table
    and from each index of a choice, and the cheapest result is kept. The only bound on
    the minimum is the sum of the tables' least entries.

    Source: Besag, On the Statistical Analysis of Dirty Pictures, 1986.

    Args:
        tables: Costs by scope: one table for each node, and any over several nodes.

    Returns:
        The choice of each node.
    """
    nodes = [scope[0] for scope in tables if len(scope) == 1]
    scopes_of = {v: [scope for scope in tables if v in scope] for v in nodes}
    starts = [{v: int(tables[v,].argmin()) for v in nodes}]
    max_choices = max(len(tables[v,]) for v in nodes)
    starts += [
        {v: min(k, len(tables[v,]) - 1) for v in nodes} for k in range(max_choices)
    ]
    for choice in starts:
        changed = True
        while changed:
            changed = False
            for v in nodes:
                rows = [_row(tables[scope], scope, v, choice) for scope in scopes_of[v]]
                costs = np.sum(rows, axis=0)
                best = int(costs.argmin())
                if costs[best] < costs[choice[v]]:
                    choice[v], changed = best, True
    return min(starts, key=lambda choice: total_cost(tables, choice))


def _row(table: Array, scope: Scope, v: int, choice: Mapping[int, int]) -> Array:
    """(choices of v,): a table's costs beside the choices of the other nodes."""
    row: Array = table[tuple(slice(None) if u == v else choice[u] for u in scope)]
    return row


def _resources(
    allowed: Mapping[Scope, tuple[Indices, ...]],
    used: Mapping[Scope, Array],
    available: Array,
) -> Any:
    """Limits the sum of what the chosen entries use, scaled by what is available."""
    from scipy.optimize import LinearConstraint

    per_variable = np.concatenate(
        [
            used[scope][at] if scope in used else np.zeros((len(at[0]), len(available)))
            for scope, at in allowed.items()
        ]
    )
    matrix = (per_variable / np.abs(available)).T
    return LinearConstraint(matrix, -np.inf, np.sign(available))


def _consistency(
    allowed: Mapping[Scope, tuple[Indices, ...]], sizes: Mapping[int, int]
) -> Any:
    """Makes variables of choices and of table entries agree.

    The matrix has one row for each node, then one for each choice in each joint table.

    Args:
        allowed: Entries that are variables, in this order, single nodes first.
        sizes: Number of choices of each node.
    """
    from scipy.optimize import LinearConstraint
    from scipy.sparse import coo_array

    ends = list(accumulate((len(at[0]) for at in allowed.values()), initial=0))
    variables = {
        scope: np.arange(start, end)
        for scope, (start, end) in zip(allowed, pairwise(ends), strict=True)
    }
    row = 0
    entries: list[tuple[Indices, Indices, float]] = []  # rows, columns, value
    for scope, at in allowed.items():
        if len(scope) == 1:
            entries.append((np.full(len(at[0]), row), variables[scope], 1.0))
            row += 1
            continue
        for v, picked in zip(scope, at, strict=True):
            entries.append((row + picked, variables[scope], 1.0))
            entries.append((row + allowed[v,][0], variables[v,], -1.0))
            row += sizes[v]
    values = np.repeat([value for *_, value in entries], [len(e[0]) for e in entries])
    rows = np.concatenate([rows for rows, _, _ in entries])
    columns = np.concatenate([columns for _, columns, _ in entries])
    sums = (np.arange(row) < len(sizes)).astype(float)
    matrix = coo_array((values, (rows, columns)), shape=(row, ends[-1]))
    return LinearConstraint(matrix, sums, sums)
