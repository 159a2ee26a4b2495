"""A sum of tables over the choices of one node and of two: what `elimination` and
`milp` minimize. Pure.

In the literature these are the unary and pairwise potentials of a graphical model, or a
weighted constraint network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import fsum

import numpy as np
import numpy.typing as npt

from hetconv.errors import PlanError

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]
Scope = tuple[
    int, ...
]  # the nodes that a table is over, ascending: one dimension for each


@dataclass(frozen=True)
class FactorGraph:
    """``names`` of the nodes, sorted, and ``build_tables`` by scope: one for each node, at
    most one for a pair.
    """

    names: tuple[str, ...]
    tables: Mapping[Scope, Array]

    @classmethod
    def of(
        cls,
        unary: Mapping[str, npt.ArrayLike],
        pairwise: Mapping[tuple[str, str], npt.ArrayLike],
    ) -> FactorGraph:
        """``unary[v]``: (choices of v,); ``pairwise[u, v]``: (choices of u, choices of
        v). +inf forbids a choice.

        Tables for (u, v) and for (v, u) add up. Raises `PlanError` by name for a node
        that is unknown or its own neighbour, a table of another shape or without
        choices, NaN and -inf.
        """
        names = tuple(sorted(unary))
        index = {name: v for v, name in enumerate(names)}
        tables: dict[Scope, Array] = {
            (v,): _table(unary[name], f"the table of {name!r}")
            for name, v in index.items()
        }
        for (v, *_), table in tables.items():
            if table.ndim != 1 or not table.size:
                raise PlanError(
                    f"the table of {names[v]!r} has shape {table.shape}; give one cost for "
                    "each choice"
                )
        for (a, b), given in sorted(pairwise.items()):
            where = f"the table of the pair ({a!r}, {b!r})"
            if a == b or a not in index or b not in index:
                raise PlanError(
                    f"{where} is over no two nodes; give it for two different ones that have a "
                    "table each"
                )
            table, u, v = _table(given, where), index[a], index[b]
            expected = len(tables[u,]), len(tables[v,])
            if table.shape != expected:
                raise PlanError(
                    f"{where} has shape {table.shape}; by their numbers of choices give it "
                    f"{expected}"
                )
            scope, table = ((u, v), table) if u < v else ((v, u), table.T)
            tables[scope] = tables[scope] + table if scope in tables else table
        return cls(names, tables)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many choices each node has."""
        return tuple(len(self.tables[v,]) for v in range(len(self.names)))

    @cached_property
    def neighbours(self) -> tuple[tuple[int, ...], ...]:
        """Of each node, ascending: those that it has a table with."""
        found: list[set[int]] = [set() for _ in self.names]
        for u, v in (scope for scope in self.tables if len(scope) == 2):
            found[u].add(v)
            found[v].add(u)
        return tuple(tuple(sorted(nodes)) for nodes in found)


def total_cost(tables: Mapping[Scope, Array], choice: Mapping[int, int]) -> float:
    """What the tables say of one choice for each node; rounded once, so that no order
    of adding shows in it.
    """
    return fsum(
        float(table[tuple(choice[v] for v in scope)]) for scope, table in tables.items()
    )


def _table(given: npt.ArrayLike, where: str) -> Array:
    table = np.asarray(given)
    if table.dtype.kind not in "biuf":
        raise PlanError(f"{where} holds {table.dtype}; give real numbers")
    if np.isnan(table).any() or np.isneginf(table).any():
        raise PlanError(
            f"{where} holds NaN or -inf; give finite costs, and +inf for what is forbidden"
        )
    return table.astype(np.float64, copy=False)
