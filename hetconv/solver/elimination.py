"""Exact minimum of a factor graph by min-plus variable elimination.

Eliminating a node replaces the tables that contain it by one table over its neighbours:
for each of their joint choices, the least cost that the node adds.

Source: Bertele & Brioschi, Nonserial Dynamic Programming, 1972; Dechter, Bucket
elimination, 1999.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import takewhile
from math import prod
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from hetconv.errors import PlanError

from . import milp
from .factor_graph import Array, FactorGraph, Indices, Scope, total_cost
from .presolve import Contraction, contract, prune

MAX_TABLE_BYTES = 1 << 28
MAX_NEIGHBOURS = 30  # numpy limits a table to 32 dimensions in some functions
# Larger intermediate results do not fit a core's cache.
MAX_BLOCK_ELEMENTS = 1 << 15

Unary = Mapping[str, npt.ArrayLike]
Pairwise = Mapping[tuple[str, str], npt.ArrayLike]


@dataclass(frozen=True)
class Solution:
    """One choice for each node, and how good it is.

    Attributes:
        choice: Index of the chosen entry, by node.
        cost: Sum of the tables at this choice.
        gap: Bound on how far the minimum may lie below ``cost``, as a fraction of
            ``cost``; 0 where elimination found the choice.
        method: Algorithm that found the choice.
    """

    choice: dict[str, int]
    cost: float
    gap: float
    method: Literal["elimination", "milp"]


class EliminationStep(NamedTuple):
    """Elimination of one node.

    Attributes:
        node: Node to eliminate.
        neighbours: Neighbours that the node has by then, ascending.
        table_bytes: Size of the table over these neighbours.
    """

    node: int
    neighbours: Scope
    table_bytes: int


def solve(
    unary: Unary,
    pairwise: Pairwise,
    *,
    memory_bytes: int = MAX_TABLE_BYTES,
    time_limit: float = milp.TIME_LIMIT_S,
) -> Solution:
    """Finds the choice of each node that minimizes the sum of all tables.

    Elimination is exact for any graph, up to rounding. Its time and memory are
    exponential in the width: the most neighbours of any node when it is eliminated.
    HiGHS takes over what is too wide.

    The result does not depend on the order of the mappings. Among equally good choices,
    the order of the names decides.

    Args:
        unary: Costs of shape (choices,), by node; +inf forbids a choice.
        pairwise: Costs of shape (choices of u, choices of v), by pair of nodes (u, v).
        memory_bytes: Limit on all tables that elimination makes.
        time_limit: Seconds that HiGHS may take.

    Returns:
        The best choice that was found.

    Raises:
        PlanError: If every choice is forbidden, or as `FactorGraph.of` does.

    Examples:
        >>> solve({"a": [0, 1], "b": [0, 0]}, {("a", "b"): [[5, 5], [0, 2]]})
        Solution(choice={'a': 1, 'b': 0}, cost=1.0, gap=0.0, method='elimination')
    """
    graph = FactorGraph.of(unary, pairwise)
    pruned, kept = prune(graph)
    contraction, steps = _contract_if_wide(pruned, memory_bytes)
    exact = _fits(steps, memory_bytes)
    if not exact:  # eliminate only while no table grows beyond those that exist
        largest = max(table.nbytes for table in contraction.graph.tables.values())
        steps = list(takewhile(lambda step: _fits([step], largest), steps))
    choice, slack = _solve_by_steps(contraction.graph, steps, time_limit)
    named, cost = _named_choice(graph, kept, contraction.restored(choice))
    method: Literal["elimination", "milp"] = "elimination" if exact else "milp"
    return Solution(named, cost, milp.relative_gap(slack, cost), method)


def _contract_if_wide(
    graph: FactorGraph, memory_bytes: int
) -> tuple[Contraction, list[EliminationStep]]:
    """Orders the elimination; merges decided nodes only if it is too wide without."""
    unchanged = Contraction(graph, tuple(range(len(graph.names))), ())
    steps = elimination_order(graph)
    if _fits(steps, memory_bytes):
        return unchanged, steps
    contraction = contract(graph)
    contracted_steps = elimination_order(contraction.graph)
    if _total_bytes(contracted_steps) < _total_bytes(steps):
        return contraction, contracted_steps
    return unchanged, steps


def elimination_order(graph: FactorGraph) -> list[EliminationStep]:
    """Orders the nodes greedily by the size of the table that each leaves.

    Among several nodes that leave the smallest table, the first by name comes first.
    """
    sizes, steps = graph.sizes, []
    adjacent = {v: set(neighbours) for v, neighbours in enumerate(graph.neighbours)}
    table_bytes = {
        v: 8 * prod(sizes[u] for u in neighbours) for v, neighbours in adjacent.items()
    }
    while adjacent:
        v = min(adjacent, key=lambda v: (table_bytes[v], v))
        neighbours = adjacent.pop(v)
        steps.append(EliminationStep(v, tuple(sorted(neighbours)), table_bytes[v]))
        for u in neighbours:
            adjacent[u] = (adjacent[u] | neighbours) - {u, v}
            table_bytes[u] = 8 * prod(sizes[w] for w in adjacent[u])
    return steps


def _fits(steps: Sequence[EliminationStep], memory_bytes: int) -> bool:
    return _total_bytes(steps) <= memory_bytes and all(
        len(step.neighbours) <= MAX_NEIGHBOURS for step in steps
    )


def _total_bytes(steps: Sequence[EliminationStep]) -> int:
    return sum(step.table_bytes for step in steps)


def _quoted_names(names: Sequence[str], nodes: Scope) -> str:
    quoted = ", ".join(repr(names[v]) for v in nodes[:8])
    return f"{quoted} and {len(nodes) - 8} more" if len(nodes) > 8 else quoted


def _solve_by_steps(
    graph: FactorGraph,
    steps: Sequence[EliminationStep],
    time_limit: float,
) -> tuple[dict[int, int], float]:
    """Eliminates, solves what is left by HiGHS, and substitutes backwards.

    Returns:
        The choice of each node, and by how much its cost may exceed the minimum.
    """
    tables = dict(graph.tables)
    eliminated = [_eliminate(tables, step, graph.names) for step in steps]
    choice, slack = milp.minimize_tables(tables, time_limit)
    for step, summands in zip(reversed(steps), reversed(eliminated), strict=True):
        neighbours = (choice[u] for u in step.neighbours)
        at_neighbours: tuple[slice | int, ...] = (slice(None), *neighbours)
        costs = [table[at_neighbours] for table in np.broadcast_arrays(*summands)]
        choice[step.node] = int(reduce(np.add, costs).argmin())
    return choice, slack


def _eliminate(
    tables: dict[Scope, Array], step: EliminationStep, names: Sequence[str]
) -> list[Array]:
    """Replaces the tables that contain a node by their minimum over its choices.

    Returns:
        The tables that were taken out. The first dimension of each is the node's, then
        one for each neighbour follows; its extent is 1 where the table is not over it.
    """
    target = (step.node, *step.neighbours)
    scopes = [scope for scope in tables if step.node in scope]
    summands = [_expand_dims(tables.pop(scope), scope, target) for scope in scopes]
    summands.sort(key=lambda table: table.size)
    minimum = np.empty(np.broadcast_shapes(*(table.shape for table in summands))[1:])
    min_plus(summands, minimum)
    if np.isposinf(minimum).all():
        beside = _quoted_names(names, step.neighbours) or "the nodes it is tied to"
        raise PlanError(
            f"every choice of {names[step.node]!r} is forbidden beside every choice of "
            f"{beside}, by their tables or by those of nodes between them; give a finite "
            "cost to one"
        )
    if step.neighbours:
        tables[step.neighbours] = minimum + tables.get(step.neighbours, 0.0)
    return summands


def _expand_dims(table: Array, scope: Scope, target: Scope) -> Array:
    """Gives a table one dimension for each node of ``target``.

    The first node of ``target`` is in ``scope``; the others ascend, as in ``scope``.
    """
    node_first = np.moveaxis(table, scope.index(target[0]), 0)
    absent = [axis for axis, v in enumerate(target) if v not in scope]
    return np.expand_dims(np.ascontiguousarray(node_first), absent)


def min_plus(summands: Sequence[Array], out: Array) -> None:
    """Computes the minimum, over the first dimension, of a sum of tables.

    Args:
        summands: Tables that broadcast to (choices, *out.shape), small ones first.
        out: Receives the result.
    """
    if out.size > MAX_BLOCK_ELEMENTS:
        axis = int(np.argmax(out.shape))
        middle = out.shape[axis] // 2
        for half in (slice(middle), slice(middle, None)):
            at = (slice(None),) * axis + (half,)
            parts = [
                table if table.shape[axis + 1] == 1 else table[(slice(None), *at)]
                for table in summands
            ]
            min_plus(parts, out[at])
        return
    out[...] = np.inf
    block = max(MAX_BLOCK_ELEMENTS // out.size, 1)
    for start in range(0, len(summands[0]), block):
        total = reduce(np.add, [table[start : start + block] for table in summands])
        np.minimum(out, total.min(axis=0), out=out)


def _named_choice(
    graph: FactorGraph, kept: Sequence[Indices], choice: Mapping[int, int]
) -> tuple[dict[str, int], float]:
    """Translates a choice of the pruned graph to names and indices of the given one."""
    given = {v: int(indices[choice[v]]) for v, indices in enumerate(kept)}
    named = {name: given[v] for v, name in enumerate(graph.names)}
    return named, total_cost(graph.tables, given)
