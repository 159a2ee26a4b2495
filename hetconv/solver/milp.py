"""The same minimum by HiGHS, for graphs that are too wide to eliminate: the local
polytope with integer choices.

Each choice of a node is a 0/1 variable, and these add up to 1. Each entry of a table
over several nodes is a variable >= 0, and over the entries with one choice of one node
these add up to that choice's variable. With integer choices they are products, so the
minimum is exact; relaxed, it is a bound (Schlesinger, 1976; Wainwright & Jordan, 2008).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from hetconv.errors import PlanError

from .factor_graph import Array, FactorGraph, Indices, Scope, total_cost

FORBIDDEN = "every choice is forbidden; give a finite cost to one"
INFEASIBLE = 2  # scipy's status
TIME_LIMIT = 60.0  # seconds
SPAN = (
    1e3  # of the costs that HiGHS is given: it takes sums that differ by 1e-6 for equal
)


def minimize_milp(
    unary: Mapping[str, npt.ArrayLike],
    pairwise: Mapping[tuple[str, str], npt.ArrayLike],
    *,
    time_limit: float = TIME_LIMIT,
) -> tuple[dict[str, int], float, float]:
    """As `elimination.minimize`; and the gap: how far below the cost the least may lie,
    as a fraction of it.

    Where HiGHS finds no choice within ``time_limit`` seconds, it is that of
    `coordinate_descent`. Raises `PlanError` where all is forbidden, or nothing else was found.
    """
    potentials = FactorGraph.of(unary, pairwise)
    found, slack = minimize_tables(potentials.tables, time_limit)
    cost = total_cost(potentials.tables, found)
    return (
        {name: found[v] for v, name in enumerate(potentials.names)},
        cost,
        gap(slack, cost),
    )


def gap(slack: float, cost: float) -> float:
    """``slack`` as a fraction of ``cost``."""
    return slack / abs(cost) if cost else (np.inf if slack else 0.0)


def minimize_tables(
    tables: Mapping[Scope, Array],
    time_limit: float,
    caps: tuple[Mapping[Scope, Array], Array] | None = None,
) -> tuple[dict[int, int], float]:
    """A choice for each node, and by how much the sum of the tables may exceed its
    least. Raises as `minimize_milp`.

    ``build_tables``: one for each node, and any over several of them. ``caps``: what choices use,
    as tables of (..., P), and how much of each of P resources there is.
    """
    if not tables:
        return {}, 0.0
    from scipy.optimize import (
        LinearConstraint,
        milp,
    )  # takes long to import, and is seldom needed

    scopes = sorted(tables, key=lambda scope: (len(scope), scope))  # single nodes first
    allowed = {scope: np.nonzero(np.isfinite(tables[scope])) for scope in scopes}
    costs = [tables[scope][allowed[scope]] for scope in scopes]
    if not all(map(len, costs)):
        raise PlanError(FORBIDDEN)
    lowest, scale = [c.min() for c in costs], max(map(np.ptp, costs)) / SPAN or 1.0
    nodes = [v for v, *others in scopes if not others]
    ends = np.cumsum([len(c) for c in costs])
    constraints = [
        LinearConstraint(*_constraints(allowed, {v: len(tables[v,]) for v in nodes}))
    ]
    if caps is not None:
        used, room = caps
        each = [
            used[at][allowed[at]]
            if at in used
            else np.zeros((len(allowed[at][0]), len(room)))
            for at in scopes
        ]
        whole = np.concatenate(each)
        constraints.append(
            LinearConstraint((whole / np.abs(room)).T, -np.inf, np.sign(room))
        )
    result = milp(
        np.concatenate(
            [(c - low) / scale for c, low in zip(costs, lowest, strict=True)]
        ),
        integrality=np.arange(ends[-1]) < ends[len(nodes) - 1],
        constraints=constraints,
        options={"time_limit": time_limit, "mip_rel_gap": 0.0},
    )
    if result.x is None and result.status != INFEASIBLE and caps is None:
        choice = coordinate_descent(tables)
        if np.isfinite(cost := total_cost(tables, choice)):
            return choice, cost - float(sum(lowest))
    if result.x is None:
        message = (
            f"HiGHS found no choice within {time_limit:g} s: {result.message} Give it "
            "more time, or fewer choices"
        )
        raise PlanError(FORBIDDEN if result.status == INFEASIBLE else message)
    values = np.split(result.x, ends[: len(nodes)])
    choice = {
        v: int(allowed[v,][0][x.argmax()]) for v, x in zip(nodes, values, strict=False)
    }
    bound = float(result.mip_dual_bound * scale + sum(lowest))
    return choice, max(total_cost(tables, choice) - bound, 0.0)


def coordinate_descent(tables: Mapping[Scope, Array]) -> dict[int, int]:
    """A choice for each node that no change of a single one makes cheaper: of several
    descents the cheapest.

    Iterated conditional modes (Besag, 1986), from the least of each node's own table
    and from each choice's number. For where HiGHS finds nothing in its time: no bound
    comes with it but the sum of the tables' least entries.
    """
    nodes = [v for v, *others in tables if not others]
    own: dict[int, list[Scope]] = {
        v: [scope for scope in tables if v in scope] for v in nodes
    }
    starts = [{v: int(tables[v,].argmin()) for v in nodes}]
    most = max(len(tables[v,]) for v in nodes)
    starts += [{v: min(k, len(tables[v,]) - 1) for v in nodes} for k in range(most)]
    for choice in starts:
        changed = True
        while changed:
            changed = False
            for v in nodes:
                costs = np.sum(
                    [_along(tables[scope], scope, v, choice) for scope in own[v]],
                    axis=0,
                )
                if costs[best := int(costs.argmin())] < costs[choice[v]]:
                    choice[v], changed = best, True
    return min(starts, key=lambda choice: total_cost(tables, choice))


def _along(table: Array, scope: Scope, v: int, choice: Mapping[int, int]) -> Array:
    """What a table says of each choice of one of its nodes, beside the choices of the others."""
    along: Array = table[tuple(slice(None) if u == v else choice[u] for u in scope)]
    return along


def _constraints(
    allowed: Mapping[Scope, tuple[Indices, ...]], sizes: Mapping[int, int]
) -> tuple[Any, Array, Array]:
    """Matrix, lower and upper sums of its rows: one row for each node, then one for
    each choice in each joint table.

    ``allowed``: the entries that are variables, in this order, single nodes first;
    ``sizes``: choices of each node.
    """
    from scipy.sparse import coo_array

    ends = list(accumulate((len(at[0]) for at in allowed.values()), initial=0))
    variables = {
        scope: np.arange(lo, hi)
        for scope, (lo, hi) in zip(allowed, pairwise(ends), strict=True)
    }
    row, parts = 0, []  # rows, columns, value
    for scope, at in allowed.items():
        if len(scope) == 1:
            parts.append((np.full(len(at[0]), row), variables[scope], 1.0))
            row += 1
            continue
        for v, picked in zip(scope, at, strict=True):
            parts += [
                (row + picked, variables[scope], 1.0),
                (row + allowed[v,][0], variables[v,], -1.0),
            ]
            row += sizes[v]
    values = np.repeat(
        [value for *_, value in parts], [len(rows) for rows, *_ in parts]
    )
    where = tuple(
        np.concatenate(indices) for indices in list(zip(*parts, strict=True))[:2]
    )
    sums = (np.arange(row) < len(sizes)).astype(float)
    return coo_array((values, where), shape=(row, ends[-1])), sums, sums
