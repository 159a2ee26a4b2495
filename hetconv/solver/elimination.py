"""Least sums of tables over nodes and pairs of nodes: exact, by min-plus variable
elimination. Pure.

Bertele & Brioschi, Nonserial Dynamic Programming, 1972; Dechter, Bucket elimination,
1999. Eliminating a node replaces the tables it is in by one over its neighbours: the
least that the node adds, for each of their joint choices.
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

MEMORY_BYTES = 1 << 28
MAX_NEIGHBOURS = 30  # dimensions of a table, which numpy limits to 32 in some functions
BLOCK = 1 << 15  # numbers of an intermediate result, so that it stays in a core's cache

Unary = Mapping[str, npt.ArrayLike]
Pairwise = Mapping[tuple[str, str], npt.ArrayLike]


@dataclass(frozen=True)
class Solution:
    """``gap``: how far below ``cost`` the least one may lie, as a fraction of it; 0
    where elimination found it.
    """

    choice: dict[str, int]
    cost: float
    gap: float
    how: Literal["elimination", "milp"]


class EliminationStep(NamedTuple):
    """A node to eliminate, its neighbours by then, ascending, and the bytes of the
    table over them.
    """

    node: int
    neighbours: Scope
    table_bytes: int


def minimize(
    unary: Unary, pairwise: Pairwise, *, memory_bytes: int = MEMORY_BYTES
) -> tuple[dict[str, int], float]:
    """The choice of each node for which all unary[v][c_v] and pairwise[u, v][c_u, c_v]
    add up to the least; that cost.

    Exact for any graph, up to rounding. Shapes and what is refused: `FactorGraph.of`.
    Neither depends on the order of the mappings, nor the cost on the names; which one
    of several equally good choices is found goes by sorted names.

    Raises `PlanError` where all is forbidden, and where tables of more than
    ``memory_bytes`` would have to be made, with the width: the most neighbours that a
    node has when it is eliminated. Time and memory are exponential in it.
    """
    potentials = FactorGraph.of(unary, pairwise)
    small, kept = prune(potentials)
    narrow, steps = _narrow(small, memory_bytes)
    if not _fit(steps, memory_bytes):
        raise PlanError(_too_wide(narrow.potentials, steps, memory_bytes))
    found, _ = _least(narrow.potentials, steps)
    return _as_given(potentials, kept, narrow.restored(found))


def solve(
    unary: Unary,
    pairwise: Pairwise,
    *,
    memory_bytes: int = MEMORY_BYTES,
    time_limit: float = milp.TIME_LIMIT,
) -> Solution:
    """As `minimize`; where that refuses the width, by HiGHS within ``time_limit``
    seconds, and with its gap.
    """
    potentials = FactorGraph.of(unary, pairwise)
    small, kept = prune(potentials)
    narrow, steps = _narrow(small, memory_bytes)
    exact = _fit(steps, memory_bytes)
    if not exact:  # what can be eliminated without making more of it
        largest = max(table.nbytes for table in narrow.potentials.tables.values())
        steps = list(takewhile(lambda step: _fit([step], largest), steps))
    found, slack = _least(narrow.potentials, steps, time_limit)
    choice, cost = _as_given(potentials, kept, narrow.restored(found))
    return Solution(
        choice, cost, milp.gap(slack, cost), "elimination" if exact else "milp"
    )


def _narrow(
    potentials: FactorGraph, memory_bytes: int
) -> tuple[Contraction, list[EliminationStep]]:
    """What to eliminate, in order: with nodes merged only where that is too wide without."""
    as_given = Contraction(potentials, tuple(range(len(potentials.names))), ())
    steps = elimination_order(potentials)
    if _fit(steps, memory_bytes):
        return as_given, steps
    merged = contract(potentials)
    fewer = elimination_order(merged.potentials)
    return (merged, fewer) if _bytes(fewer) < _bytes(steps) else (as_given, steps)


def elimination_order(potentials: FactorGraph) -> list[EliminationStep]:
    """Always the node that leaves the smallest table, the first by name of several."""
    sizes, steps = potentials.sizes, []
    around = {v: set(neighbours) for v, neighbours in enumerate(potentials.neighbours)}
    table_bytes = {
        v: 8 * prod(sizes[u] for u in neighbours) for v, neighbours in around.items()
    }
    while around:
        v = min(around, key=lambda v: (table_bytes[v], v))
        neighbours = around.pop(v)
        steps.append(EliminationStep(v, tuple(sorted(neighbours)), table_bytes[v]))
        for u in neighbours:
            around[u] = (around[u] | neighbours) - {u, v}
            table_bytes[u] = 8 * prod(sizes[w] for w in around[u])
    return steps


def _fit(steps: Sequence[EliminationStep], memory_bytes: int) -> bool:
    return _bytes(steps) <= memory_bytes and all(
        len(step.neighbours) <= MAX_NEIGHBOURS for step in steps
    )


def _bytes(steps: Sequence[EliminationStep]) -> int:
    return sum(step.table_bytes for step in steps)


def _too_wide(
    potentials: FactorGraph, steps: Sequence[EliminationStep], memory_bytes: int
) -> str:
    """What is refused, by the step that makes the largest table."""
    names, worst = potentials.names, max(steps, key=lambda step: step.table_bytes)
    return (
        f"elimination would make tables of {_bytes(steps):.3g} bytes, but {memory_bytes:.3g} "
        "are allowed: the width is "
        f"{max(len(step.neighbours) for step in steps)}, and {names[worst.node]!r} leaves a "
        "table of "
        f"{worst.table_bytes:.3g} bytes over {_listed(names, worst.neighbours)}; allow more "
        "memory, give fewer "
        f"choices, or use solve"
    )


def _listed(names: Sequence[str], nodes: Scope) -> str:
    return ", ".join(
        repr(names[v]) for v in nodes[:8]
    ) + f" and {len(nodes) - 8} more" * (len(nodes) > 8)


def _least(
    potentials: FactorGraph,
    steps: Sequence[EliminationStep],
    time_limit: float = milp.TIME_LIMIT,
) -> tuple[dict[int, int], float]:
    """A choice for each node, and by how much its cost may exceed the least. HiGHS gets
    what ``steps`` leave.
    """
    tables = dict(potentials.tables)
    taken = [_eliminate(tables, step, potentials.names) for step in steps]
    choice, slack = milp.minimize_tables(tables, time_limit)
    for step, summands in zip(reversed(steps), reversed(taken), strict=True):
        at: tuple[slice | int, ...] = (
            slice(None),
            *(choice[u] for u in step.neighbours),
        )
        choice[step.node] = int(
            reduce(np.add, [t[at] for t in np.broadcast_arrays(*summands)]).argmin()
        )
    return choice, slack


def _eliminate(
    tables: dict[Scope, Array], sharding: EliminationStep, names: Sequence[str]
) -> list[Array]:
    """Takes out the tables that the node is in, puts in the least of their sum, and returns them.

    All have a dimension for the node, then one for each neighbour: of its choices, or 1
    where the table is not over it.
    """
    target = (sharding.node, *sharding.neighbours)
    own = [scope for scope in tables if sharding.node in scope]
    summands = sorted(
        (_spread(tables.pop(scope), scope, target) for scope in own),
        key=lambda table: table.size,
    )
    least = np.empty(np.broadcast_shapes(*(table.shape for table in summands))[1:])
    min_plus(summands, least)
    if np.isposinf(least).all():
        beside = _listed(names, sharding.neighbours) or "the nodes it is tied to"
        raise PlanError(
            f"every choice of {names[sharding.node]!r} is forbidden beside every choice of "
            f"{beside}, by their tables or by "
            f"those of nodes between them; give a finite cost to one"
        )
    if sharding.neighbours:
        tables[sharding.neighbours] = (
            least + tables[sharding.neighbours]
            if sharding.neighbours in tables
            else least
        )
    return summands


def _spread(table: Array, scope: Scope, target: Scope) -> Array:
    """With dimensions for ``target``, whose first node is in ``scope`` and whose others
    ascend as in ``scope``.
    """
    ordered = np.moveaxis(table, scope.index(target[0]), 0)
    absent = [axis for axis, v in enumerate(target) if v not in scope]
    return np.expand_dims(np.ascontiguousarray(ordered), absent)


def min_plus(summands: Sequence[Array], out: Array) -> None:
    """Puts into ``out`` the least, over their first dimension, of the sum of
    ``summands``, small ones first.
    """
    if out.size > BLOCK:
        axis = int(np.argmax(out.shape))
        half = out.shape[axis] // 2
        for part in (slice(half), slice(half, None)):
            at = (slice(None),) * axis + (part,)
            min_plus(
                [
                    t if t.shape[axis + 1] == 1 else t[(slice(None), *at)]
                    for t in summands
                ],
                out[at],
            )
        return
    out[...] = np.inf
    step = max(BLOCK // out.size, 1)
    for i in range(0, len(summands[0]), step):
        np.minimum(
            out,
            reduce(np.add, [t[i : i + step] for t in summands]).min(axis=0),
            out=out,
        )


def _as_given(
    potentials: FactorGraph, kept: Sequence[Indices], found: Mapping[int, int]
) -> tuple[dict[str, int], float]:
    """Names and choices as they were before some were left out, and what they cost."""
    choice = {v: int(left[found[v]]) for v, left in enumerate(kept)}
    return {name: choice[v] for v, name in enumerate(potentials.names)}, total_cost(
        potentials.tables, choice
    )
