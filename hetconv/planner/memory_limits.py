"""Choices that fit each device's memory: bytes get a price on every device, raised
until the optimum fits. Pure.

These are Lagrange multipliers of the caps (Everett, 1963). What lies between two of
their optima HiGHS finds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hetconv.cost.network import Array
from hetconv.errors import PlanError
from hetconv.solver import milp
from hetconv.solver.elimination import solve
from hetconv.solver.factor_graph import FactorGraph

from .cost_tables import CostTables, Scope

Limits = tuple[float, ...]
Choice = dict[str, int]
Memory = Callable[[Choice], Sequence[float]]  # bytes that a choice takes on each device
Held = Mapping[Scope, Array]  # as `CostTables.all_bytes`
ROUNDS = 40
GAP = 0.01  # of the least cost, for which it is worth asking HiGHS
MOST_ENTRIES = 100_000  # of tables that HiGHS is given


def solve_within(tables: CostTables, limits: Limits, memory: Memory) -> Choice | None:
    """The cheapest choice that was found to fit, or None. Deterministic, unless HiGHS
    runs out of time.
    """
    best: tuple[float, Choice] | None = None
    caps, prices, bound, held = (
        np.array(limits),
        np.zeros(len(limits)),
        -np.inf,
        tables.all_bytes(),
    )
    for turn in range(ROUNDS):
        choice, cost, over = _priced(tables, held, caps, prices, memory)
        if np.all(over <= 0) and (best is None or cost < best[0]):
            best = cost, choice
        bound = max(bound, cost + float(prices @ (over * caps)))
        if best is not None and best[0] <= bound * (1 + GAP / 10):
            break
        prices = np.maximum(prices + over * abs(cost) / caps / (1 + turn / 4), 0.0)
    if best is None or best[0] > bound * (1 + GAP):
        found = filter(None, (best, _by_highs(tables, held, caps, memory)))
        best = min(found, default=None, key=lambda known: known[0])
    if best is None:  # what would be named as the least that would do must do
        lean = (
            choice
            for choice, used in _lean(tables, limits, memory)
            if np.all(np.array(used) <= caps)
        )
        best = min(
            ((_cost(tables, choice), choice) for choice in lean),
            default=None,
            key=lambda found: found[0],
        )
    return best[1] if best is not None else None


def least_memory(
    tables: CostTables, limits: Limits, memory: Memory
) -> tuple[float, ...]:
    """Bytes on each device of the choice, of those that were found, that exceeds the
    limits by the least factor.
    """
    used = (used for _, used in _lean(tables, limits, memory))
    return min(used, key=lambda u: max(m / c for m, c in zip(u, limits, strict=True)))


def _lean(
    tables: CostTables, limits: Limits, memory: Memory
) -> list[tuple[Choice, tuple[float, ...]]]:
    """Choices of little memory, whatever they cost, and the bytes of each."""
    caps, prices, held = np.array(limits), 1 / np.array(limits), tables.all_bytes()
    free = CostTables(unary={v: np.zeros_like(t) for v, t in tables.unary.items()})
    free.pairwise = {
        pair: np.where(np.isinf(t), np.inf, 0.0) for pair, t in tables.pairwise.items()
    }
    found = []
    for turn in range(ROUNDS):
        choice, _, over = _priced(free, held, caps, prices, memory)
        found.append((choice, tuple(memory(choice))))
        ratio = (over + 1) / (over + 1).max()
        prices = prices * np.exp(
            (ratio - 1) / (1 + turn / 4)
        )  # what is exceeded most gets the highest price
        prices = prices / prices.sum()
    return found


def _priced(
    tables: CostTables, held: Held, caps: Array, prices: Array, memory: Memory
) -> tuple[Choice, float, Array]:
    """The optimum at these seconds per byte, its seconds without them, and by what part
    it exceeds each cap.
    """
    unary = {
        v: t + held[v,] @ prices if (v,) in held else t for v, t in tables.unary.items()
    }
    pairwise = {
        pair: t + held[pair] @ prices if pair in held else t
        for pair, t in tables.pairwise.items()
    }
    choice = solve(unary, pairwise).choice
    return choice, _cost(tables, choice), np.array(memory(choice)) / caps - 1


def _cost(tables: CostTables, choice: Mapping[str, int]) -> float:
    own = sum(float(t[choice[v]]) for v, t in tables.unary.items())
    return own + sum(
        float(t[choice[u], choice[v]]) for (u, v), t in tables.pairwise.items()
    )


def _by_highs(
    tables: CostTables, held: Held, caps: Array, memory: Memory
) -> tuple[float, Choice] | None:
    if sum(t.size for t in tables.pairwise.values()) > MOST_ENTRIES:
        return None
    potentials = FactorGraph.of(tables.unary, tables.pairwise)
    index = {name: v for v, name in enumerate(potentials.names)}
    used = {
        tuple(index[name] for name in scope): table
        for scope, table in held.items()
        if scope
    }
    try:
        found, _ = milp.minimize_tables(
            potentials.tables, milp.TIME_LIMIT, (used, caps - held.get((), 0.0))
        )
    except PlanError:  # nothing fits, or nothing was found in time
        return None
    choice = {name: found[v] for name, v in index.items()}
    fits = np.all(np.array(memory(choice)) <= caps)
    return (_cost(tables, choice), choice) if fits else None
