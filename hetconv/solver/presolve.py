"""Presolve: removes choices and nodes of a factor graph that cannot change its minimum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hetconv.errors import PlanError

from .factor_graph import Array, FactorGraph, Indices, Scope


def prune(graph: FactorGraph) -> tuple[FactorGraph, list[Indices]]:
    """Removes forbidden and dominated choices, to a fixed point.

    The minimum stays, and so does a choice that attains it. Where one choice is left
    for a node, its tables with neighbours are added to the neighbours' own tables, so
    that no table over several nodes has a dimension for it.

    Args:
        graph: Costs to minimize.

    Returns:
        The smaller graph, and for each node the indices of the choices that are left.

    Raises:
        PlanError: If no choice is left for a node.
    """
    tables = dict(graph.tables)
    adjacent = [set(nodes) for nodes in graph.neighbours]
    kept = [np.arange(n) for n in graph.sizes]
    queue = dict.fromkeys(range(len(kept)))
    while queue:
        v = next(iter(queue))
        del queue[v]
        neighbours = sorted(adjacent[v])
        pairs = [(u, v) if u < v else (v, u) for u in neighbours]
        joint = [tables[u, w] if u == v else tables[u, w].T for u, w in pairs]
        keep = undominated(tables[v,], joint)
        if not len(keep):
            raise PlanError(
                f"every choice of {graph.names[v]!r} is forbidden, by its own table or "
                "beside what its neighbours may choose; give a finite cost to one"
            )
        if len(keep) < len(kept[v]):
            kept[v] = kept[v][keep]
            for scope in [(v,), *pairs]:
                tables[scope] = tables[scope].take(keep, axis=scope.index(v))
            queue |= dict.fromkeys(neighbours)
        if len(keep) == 1:
            for u, scope in zip(neighbours, pairs, strict=True):
                tables[u,] = tables[u,] + tables.pop(scope).squeeze(scope.index(v))
                adjacent[u].discard(v)
            queue |= dict.fromkeys(neighbours)
            adjacent[v].clear()
    return FactorGraph(graph.names, tables), kept


def undominated(own: Array, joint: Sequence[Array]) -> Indices:
    """Finds the choices of a node that no other choice is as good as.

    Choice b dominates choice a where own[b] - own[a], plus the sum over neighbours of
    max(joint[b] - joint[a]), is at most 0: whatever the neighbours choose.

    Each choice is compared with the rival that may yet be best. If it survives, the
    neighbours' choices that refute this rival (its witness) refute most other rivals
    too, so that few of all pairs are ever compared over all choices of the neighbours.

    Args:
        own: Costs of shape (choices,).
        joint: Costs of shape (choices, choices of the neighbour), for each neighbour.

    Returns:
        Indices of the choices to keep, ascending: one of several equal choices, and
        none if all are forbidden.
    """
    feasible = np.isfinite(own)
    for table in joint:
        feasible &= np.isfinite(table).any(axis=1)
    indices = np.flatnonzero(feasible)
    own, joint = own[indices], [table[indices] for table in joint]
    # bound[a, b]: lower bound on the most that b may lose against a
    bound = np.where(np.eye(len(indices), dtype=bool), np.inf, -np.inf)
    own_loss = own - own[:, None]
    left = np.ones(len(indices), dtype=bool)
    rows = np.arange(len(indices))
    witness = [table.argmin(axis=1) for table in joint]
    while len(rows):
        loss = own_loss[rows]
        for table, at in zip(joint, witness, strict=True):
            loss = loss + table[:, at].T - table[rows, at][:, None]
        bound[rows] = np.maximum(bound[rows], loss)
        rivals = bound[rows].argmin(axis=1)
        may_dominate = bound[rows, rivals] <= 0
        rows, rivals = rows[may_dominate], rivals[may_dominate]
        max_loss, witness = _max_loss(own, joint, rows, rivals)
        bound[rows, rivals] = np.inf  # compared
        for i in np.flatnonzero(max_loss <= 0)[::-1]:
            # Equal choices are each other's rivals, and one of them must stay.
            if left[rivals[i]]:
                left[rows[i]] = False
        bound[:, ~left] = np.inf
        witness = [at[left[rows]] for at in witness]
        rows = rows[left[rows]]
    return indices[left]


def _max_loss(
    own: Array, joint: Sequence[Array], rows: Indices, rivals: Indices
) -> tuple[Array, list[Indices]]:
    """Compares each rival with its row over all choices of the neighbours.

    Returns:
        The most that the rival loses, and the neighbours' choices where it does.
    """
    loss, witness = own[rivals] - own[rows], []
    for table in joint:
        # What is forbidden beside the row does not count, nor does its inf - inf.
        with np.errstate(invalid="ignore"):
            difference = table[rivals] - table[rows]
        difference = np.where(np.isfinite(table[rows]), difference, -np.inf)
        witness.append(difference.argmax(axis=1))
        loss = loss + difference.max(axis=1)
    return loss, witness


class Merge(NamedTuple):
    """A node that another node decides.

    Attributes:
        node: Node that is merged into another one.
        by: Node that decides it.
        choice: Choice of ``node`` for each choice of ``by``.
    """

    node: int
    by: int
    choice: Indices


@dataclass(frozen=True)
class Contraction:
    """A factor graph with fewer nodes, and how to recover the choices of the others.

    Attributes:
        graph: Costs over the nodes that are left.
        left: Number of each of these nodes in the graph before.
        merges: Nodes that were merged, in order.
    """

    graph: FactorGraph
    left: tuple[int, ...]
    merges: tuple[Merge, ...]

    def restored(self, choice: Mapping[int, int]) -> dict[int, int]:
        """Returns the choice of each node of the graph before.

        Args:
            choice: Choice of each node that is left.
        """
        found = {v: choice[i] for i, v in enumerate(self.left)}
        for merge in reversed(self.merges):
            found[merge.node] = int(merge.choice[found[merge.by]])
        return found


def contract(graph: FactorGraph) -> Contraction:
    """Merges nodes into neighbours that decide them, to a fixed point.

    A node decides a neighbour if each of its choices allows at most one choice there.
    The minimum stays.
    """
    contraction = _ContractionInProgress(graph)
    queue = dict.fromkeys(range(len(graph.names)))
    while queue:
        v = next(iter(queue))
        decided = contraction.decided_neighbour(v)
        if decided is None:
            del queue[v]
            continue
        queue |= dict.fromkeys(contraction.adjacent[decided])
        queue.pop(decided, None)
        contraction.merge(decided, v)
    left = tuple(contraction.adjacent)
    index = {v: i for i, v in enumerate(left)}
    tables = {
        tuple(index[v] for v in scope): table
        for scope, table in contraction.tables.items()
    }
    names = tuple(graph.names[v] for v in left)
    return Contraction(FactorGraph(names, tables), left, tuple(contraction.merges))


class _ContractionInProgress:
    """Tables and neighbours by node, while nodes are merged."""

    def __init__(self, graph: FactorGraph):
        self.tables: dict[Scope, Array] = dict(graph.tables)
        self.adjacent = {v: set(nodes) for v, nodes in enumerate(graph.neighbours)}
        self.merges: list[Merge] = []

    def _joint(self, u: int, v: int) -> Array:
        """(choices of u, choices of v)."""
        return self.tables[u, v] if u < v else self.tables[v, u].T

    def decided_neighbour(self, v: int) -> int | None:
        """Returns the first neighbour that each choice of ``v`` leaves one choice at most."""
        for u in sorted(self.adjacent[v]):
            if (np.isfinite(self._joint(u, v)).sum(0) <= 1).all():
                return u
        return None

    def merge(self, u: int, v: int) -> None:
        """Adds the tables of ``u`` to those of ``v``, which decides it."""
        joint = self._joint(u, v)
        choice = np.isfinite(joint).argmax(0)
        self.merges.append(Merge(u, v, choice))
        own = self.tables[u,][choice] + joint[choice, np.arange(len(choice))]
        self.tables[v,] = self.tables[v,] + own
        for w in self.adjacent.pop(u):
            table = self._joint(u, w)[choice]
            del self.tables[min(u, w), max(u, w)]
            self.adjacent[w].discard(u)
            if w != v:
                scope, table = ((v, w), table) if v < w else ((w, v), table.T)
                self.tables[scope] = self.tables.get(scope, 0.0) + table
                self.adjacent[v].add(w)
                self.adjacent[w].add(v)
        del self.tables[u,]
