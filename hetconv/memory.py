"""Choices that fit each device's memory: bytes get a price on every device, raised until the optimum fits. Pure.

These are Lagrange multipliers of the caps (Everett, 1963). What lies between two of their optima HiGHS finds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from . import milp
from .elimination import solve
from .errors import PlanError
from .ledger import Tables
from .network import Array
from .potentials import Potentials

Limits = tuple[float, ...]
Choice = dict[str, int]
Memory = Callable[[Choice], Sequence[float]]  # bytes that a choice takes on each device
ROUNDS = 40
GAP = 0.01  # of the least cost, for which it is worth asking HiGHS
MOST_ENTRIES = 100_000  # of tables that HiGHS is given


def solve_within(tables: Tables, limits: Limits, memory: Memory) -> Choice | None:
    """The cheapest choice that was found to fit, or None. Deterministic, unless HiGHS runs out of time."""
    best: tuple[float, Choice] | None = None
    caps, prices, bound = np.array(limits), np.zeros(len(limits)), -np.inf
    for turn in range(ROUNDS):
        choice, cost, over = _priced(tables, caps, prices, memory)
        if np.all(over <= 0) and (best is None or cost < best[0]):
            best = cost, choice
        bound = max(bound, cost + float(prices @ (over * caps)))
        if best is not None and best[0] <= bound * (1 + GAP / 10):
            break
        prices = np.maximum(prices + over * abs(cost) / caps / (1 + turn / 4), 0.0)
    if best is None or best[0] > bound * (1 + GAP):
        best = min(filter(None, (best, _by_highs(tables, caps, memory))), default=None, key=lambda found: found[0])
    return best[1] if best is not None else None


def least_memory(tables: Tables, limits: Limits, memory: Memory) -> tuple[float, ...]:
    """Bytes on each device of the choice, of those that were found, that exceeds the limits by the least factor."""
    caps, prices = np.array(limits), 1 / np.array(limits)
    free = Tables(unary={v: np.zeros_like(t) for v, t in tables.unary.items()}, held=tables.held)
    free.pairwise = {pair: np.where(np.isinf(t), np.inf, 0.0) for pair, t in tables.pairwise.items()}
    used = []
    for turn in range(ROUNDS):
        choice, _, over = _priced(free, caps, prices, memory)
        used.append(tuple(memory(choice)))
        ratio = (over + 1) / (over + 1).max()
        prices = prices * np.exp((ratio - 1) / (1 + turn / 4))  # what is exceeded most gets the highest price
        prices = prices / prices.sum()
    return min(used, key=lambda u: max(m / c for m, c in zip(u, limits, strict=True)))


def _priced(tables: Tables, caps: Array, prices: Array, memory: Memory) -> tuple[Choice, float, Array]:
    """The optimum at these seconds per byte, its seconds without them, and by what part it exceeds each cap."""
    unary = {v: t + tables.held[v] @ prices if v in tables.held else t for v, t in tables.unary.items()}
    choice = solve(unary, tables.pairwise).choice
    return choice, _cost(tables, choice), np.array(memory(choice)) / caps - 1


def _cost(tables: Tables, choice: Mapping[str, int]) -> float:
    own = sum(float(t[choice[v]]) for v, t in tables.unary.items())
    return own + sum(float(t[choice[u], choice[v]]) for (u, v), t in tables.pairwise.items())


def _by_highs(tables: Tables, caps: Array, memory: Memory) -> tuple[float, Choice] | None:
    if sum(t.size for t in tables.pairwise.values()) > MOST_ENTRIES:
        return None
    potentials = Potentials.of(tables.unary, tables.pairwise)
    held = {v: tables.held[name] for v, name in enumerate(potentials.names) if name in tables.held}
    room = caps - (tables.held[None][0] if None in tables.held else 0.0)
    try:
        found, _ = milp.least(potentials.tables, milp.TIME_LIMIT, (held, room))
    except PlanError:  # nothing fits, or nothing was found in time
        return None
    choice = {name: found[v] for v, name in enumerate(potentials.names)}
    fits = np.all(np.array(memory(choice)) <= caps)
    return (_cost(tables, choice), choice) if fits else None
