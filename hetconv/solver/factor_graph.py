"""Factor graph: a sum of cost tables over the choices of one node and of two.

The literature calls these the unary and pairwise potentials of a graphical model, or a
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
# The nodes of a table, ascending: it has one dimension for each.
Scope = tuple[int, ...]


@dataclass(frozen=True)
class FactorGraph:
    """Sum of cost tables over nodes that each have a finite number of choices.

    Attributes:
        names: Names of the nodes, sorted; elsewhere a node is its index here.
        tables: Costs by scope: one table for each node, at most one for a pair.
    """

    names: tuple[str, ...]
    tables: Mapping[Scope, Array]

    @classmethod
    def of(
        cls,
        unary: Mapping[str, npt.ArrayLike],
        pairwise: Mapping[tuple[str, str], npt.ArrayLike],
    ) -> FactorGraph:
        """Builds a graph from tables by name.

        Args:
            unary: Costs of shape (choices,), by node; +inf forbids a choice.
            pairwise: Costs of shape (choices of u, choices of v), by pair of nodes
                (u, v). Tables for (u, v) and for (v, u) add up.

        Raises:
            PlanError: If a table of a pair is not over two different known nodes, has
                another shape, contains NaN or -inf, or has no entries.
        """
        names = tuple(sorted(unary))
        index = {name: v for v, name in enumerate(names)}
        tables: dict[Scope, Array] = {}
        for v, name in enumerate(names):
            table = _checked(unary[name], f"the table of {name!r}")
            if table.ndim != 1 or not table.size:
                raise PlanError(
                    f"the table of {name!r} has shape {table.shape}; give one cost for "
                    "each choice"
                )
            tables[v,] = table
        for (a, b), given in sorted(pairwise.items()):
            where = f"the table of the pair ({a!r}, {b!r})"
            if a == b or a not in index or b not in index:
                raise PlanError(
                    f"{where} is over no two nodes; give it for two different ones that "
                    "have a table each"
                )
            table, u, v = _checked(given, where), index[a], index[b]
            expected = len(tables[u,]), len(tables[v,])
            if table.shape != expected:
                raise PlanError(
                    f"{where} has shape {table.shape}; by their numbers of choices give "
                    f"it {expected}"
                )
            scope, table = ((u, v), table) if u < v else ((v, u), table.T)
            tables[scope] = tables[scope] + table if scope in tables else table
        return cls(names, tables)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of choices of each node."""
        return tuple(len(self.tables[v,]) for v in range(len(self.names)))

    @cached_property
    def neighbours(self) -> tuple[tuple[int, ...], ...]:
        """Nodes, ascending, that each node shares a table with."""
        found: list[set[int]] = [set() for _ in self.names]
        for u, v in (scope for scope in self.tables if len(scope) == 2):
            found[u].add(v)
            found[v].add(u)
        return tuple(tuple(sorted(nodes)) for nodes in found)


def total_cost(tables: Mapping[Scope, Array], choice: Mapping[int, int]) -> float:
    """Sums the tables at one choice of each node.

    The sum is rounded once, so that it does not depend on the order of the tables.
    """
    return fsum(
        float(table[tuple(choice[v] for v in scope)]) for scope, table in tables.items()
    )


def _checked(given: npt.ArrayLike, where: str) -> Array:
    """Returns the table as float64, or raises `PlanError` with ``where`` in it."""
    table = np.asarray(given)
    if table.dtype.kind not in "biuf":
        raise PlanError(f"{where} holds {table.dtype}; give real numbers")
    if np.isnan(table).any() or np.isneginf(table).any():
        raise PlanError(
            f"{where} holds NaN or -inf; give finite costs, and +inf for what is forbidden"
        )
    return table.astype(np.float64, copy=False)
