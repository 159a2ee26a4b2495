"""Plans within each device's memory, by Lagrangian relaxation.

Bytes get a price on every device, which is raised until the optimum fits: the prices are
Lagrange multipliers of the limits. What lies between two of their optima HiGHS finds.

Source: Everett, Generalized Lagrange Multiplier Method, 1963.
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

Limits = tuple[float, ...]  # bytes of each device
Choice = dict[str, int]
MemoryOfChoice = Callable[[Choice], Sequence[float]]  # bytes on each device
BytesByScope = Mapping[Scope, Array]
PRICE_ROUNDS = 40
MAX_RELATIVE_GAP = 0.01  # above which HiGHS is asked for a cheaper choice
MAX_MILP_ENTRIES = 100_000


def fits(memory_bytes: Sequence[float], limits: Limits) -> bool:
    """Whether bytes are within the limit of each device."""
    return all(used <= limit for used, limit in zip(memory_bytes, limits, strict=True))


def solve_within(
    tables: CostTables, limits: Limits, memory: MemoryOfChoice
) -> Choice | None:
    """Searches the cheapest choice that fits each device's memory.

    The result is deterministic, unless HiGHS runs out of time.

    Args:
        tables: Seconds and bytes by choice.
        limits: Bytes of each device.
        memory: Exact bytes of a choice on each device.

    Returns:
        The choice, or None if none was found.
    """
    best: tuple[float, Choice] | None = None
    caps, prices = np.array(limits), np.zeros(len(limits))
    held, lower_bound = tables.all_bytes(), -np.inf
    for k in range(PRICE_ROUNDS):
        choice, cost, excess = _priced_optimum(tables, held, caps, prices, memory)
        if np.all(excess <= 0) and (best is None or cost < best[0]):
            best = cost, choice
        lower_bound = max(lower_bound, cost + float(prices @ (excess * caps)))
        if best is not None and best[0] <= lower_bound * (1 + MAX_RELATIVE_GAP / 10):
            break
        step = abs(cost) / caps / (1 + k / 4)
        prices = np.maximum(prices + excess * step, 0.0)
    if best is None or best[0] > lower_bound * (1 + MAX_RELATIVE_GAP):
        found = filter(None, (best, _by_highs(tables, held, limits, memory)))
        best = min(found, default=None, key=lambda cost_choice: cost_choice[0])
    if best is not None:
        return best[1]
    # Whatever the error message would name as the least memory is good enough.
    lean = [
        choice for choice, used in _lean(tables, limits, memory) if fits(used, limits)
    ]
    return min(lean, default=None, key=lambda choice: _cost(tables, choice))


def least_memory(
    tables: CostTables, limits: Limits, memory: MemoryOfChoice
) -> tuple[float, ...]:
    """Finds a choice that exceeds the limits by the least factor.

    Args:
        tables: Seconds and bytes by choice.
        limits: Bytes of each device.
        memory: Exact bytes of a choice on each device.

    Returns:
        Bytes of this choice on each device.
    """

    def factor(used: tuple[float, ...]) -> float:
        return max(m / limit for m, limit in zip(used, limits, strict=True))

    return min((used for _, used in _lean(tables, limits, memory)), key=factor)


def _lean(
    tables: CostTables, limits: Limits, memory: MemoryOfChoice
) -> list[tuple[Choice, tuple[float, ...]]]:
    """Finds choices of little memory, whatever they cost, and the bytes of each."""
    caps, prices, held = np.array(limits), 1 / np.array(limits), tables.all_bytes()
    free = CostTables(unary={v: np.zeros_like(t) for v, t in tables.unary.items()})
    for pair, table in tables.pairwise.items():
        free.pairwise[pair] = np.where(np.isinf(table), np.inf, 0.0)
    found = []
    for k in range(PRICE_ROUNDS):
        choice, _, excess = _priced_optimum(free, held, caps, prices, memory)
        found.append((choice, tuple(memory(choice))))
        # The device whose limit is exceeded most gets the highest price.
        relative = (excess + 1) / (excess + 1).max()
        prices = prices * np.exp((relative - 1) / (1 + k / 4))
        prices = prices / prices.sum()
    return found


def _priced_optimum(
    tables: CostTables,
    held: BytesByScope,
    caps: Array,
    prices: Array,
    memory: MemoryOfChoice,
) -> tuple[Choice, float, Array]:
    """Minimizes seconds plus bytes at a price.

    Returns:
        The choice, its seconds without the bytes, and the fraction by which it exceeds
        each limit, (P,).
    """
    unary = {
        v: table + held[v,] @ prices if (v,) in held else table
        for v, table in tables.unary.items()
    }
    pairwise = {
        pair: table + held[pair] @ prices if pair in held else table
        for pair, table in tables.pairwise.items()
    }
    choice = solve(unary, pairwise).choice
    return choice, _cost(tables, choice), np.array(memory(choice)) / caps - 1


def _cost(tables: CostTables, choice: Mapping[str, int]) -> float:
    unary = sum(float(t[choice[v]]) for v, t in tables.unary.items())
    pairs = tables.pairwise.items()
    return unary + sum(float(t[choice[u], choice[v]]) for (u, v), t in pairs)


def _by_highs(
    tables: CostTables, held: BytesByScope, limits: Limits, memory: MemoryOfChoice
) -> tuple[float, Choice] | None:
    if sum(table.size for table in tables.pairwise.values()) > MAX_MILP_ENTRIES:
        return None
    graph = FactorGraph.of(tables.unary, tables.pairwise)
    index = {name: v for v, name in enumerate(graph.names)}
    used = {
        tuple(index[name] for name in scope): table
        for scope, table in held.items()
        if scope
    }
    available = np.array(limits) - held.get((), 0.0)
    try:
        found, _ = milp.minimize_tables(
            graph.tables, milp.TIME_LIMIT_S, (used, available)
        )
    except PlanError:  # nothing fits, or nothing was found in time
        return None
    choice = {name: found[v] for name, v in index.items()}
    if not fits(memory(choice), limits):
        return None
    return _cost(tables, choice), choice
