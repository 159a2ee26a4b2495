"""Leaves out choices that another one is as good as, whatever the neighbours choose. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hetconv.errors import PlanError

from .factor_graph import Array, FactorGraph, Indices, Scope


def prune(potentials: FactorGraph) -> tuple[FactorGraph, list[Indices]]:
    """Without choices that are forbidden or dominated, to a fixed point; and for each
    node the choices that are left.

    A node with one choice left has no table with a neighbour: what it says is added to
    the neighbour's own, so that no table over several nodes has a dimension for it. The
    least cost stays, and so does a choice of that cost. Raises `PlanError` by name
    where none is left for a node.
    """
    tables = dict(potentials.tables)
    around = [set(nodes) for nodes in potentials.neighbours]
    kept = [np.arange(n) for n in potentials.sizes]
    queue = dict.fromkeys(range(len(kept)))
    while queue:
        v = next(iter(queue))
        del queue[v]
        pairs = [(u, v) if u < v else (v, u) for u in sorted(around[v])]
        keep = undominated(
            tables[v,], [tables[u, w] if u == v else tables[u, w].T for u, w in pairs]
        )
        if not len(keep):
            raise PlanError(
                f"every choice of {potentials.names[v]!r} is forbidden, by its own table or "
                "beside what its neighbours "
                f"may choose; give a finite cost to one"
            )
        if len(keep) < len(kept[v]):
            kept[v] = kept[v][keep]
            for scope in [(v,), *pairs]:
                tables[scope] = tables[scope].take(keep, axis=scope.index(v))
            queue |= dict.fromkeys(sorted(around[v]))
        if len(keep) == 1:
            for u, scope in zip(sorted(around[v]), pairs, strict=True):
                tables[u,] = tables[u,] + tables.pop(scope).squeeze(scope.index(v))
                around[u].discard(v)
            queue |= dict.fromkeys(sorted(around[v]))
            around[v].clear()
    return FactorGraph(potentials.names, tables), kept


def undominated(own: Array, beside: Sequence[Array]) -> Indices:
    """The choices to keep, ascending: none where all are forbidden. Of equal ones a
    single one is kept.

    ``own``: (choices,); ``beside``: (choices, choices of the neighbour), for each
    neighbour. Choice b dominates a where own[b] - own[a] + the sum over neighbours of
    max(beside[b] - beside[a]) <= 0.

    Each choice is compared with the rival that may yet be best. Where it survives, the
    neighbours' choices that refute this rival, its witness, refute most others too: few
    of all pairs are ever compared over all choices of neighbours.
    """
    feasible = np.isfinite(own)
    for table in beside:
        feasible &= np.isfinite(table).any(axis=1)
    kept = np.flatnonzero(feasible)
    own, beside = own[kept], [table[kept] for table in beside]
    margin = own - own[:, None]
    bound = np.where(
        np.eye(len(kept), dtype=bool), np.inf, -np.inf
    )  # [a, b]: at its worst b loses no less against a
    left = np.ones(len(kept), dtype=bool)
    rows, witness = np.arange(len(kept)), [table.argmin(axis=1) for table in beside]
    while len(rows):
        loss = margin[rows]
        for table, w in zip(beside, witness, strict=True):
            loss = loss + table[:, w].T - table[rows, w][:, None]
        bound[rows] = np.maximum(bound[rows], loss)
        rival = bound[rows].argmin(axis=1)
        hopeful = bound[rows, rival] <= 0
        rows, rival = rows[hopeful], rival[hopeful]
        worst, witness = _worst(own, beside, rows, rival)
        bound[rows, rival] = np.inf  # compared
        for i in np.flatnonzero(worst <= 0)[::-1]:
            if left[
                rival[i]
            ]:  # equal ones are each other's rivals, and must not both go
                left[rows[i]] = False
        bound[:, ~left] = np.inf
        rows, witness = rows[left[rows]], [w[left[rows]] for w in witness]
    return kept[left]


def _worst(
    own: Array, beside: Sequence[Array], rows: Indices, rivals: Indices
) -> tuple[Array, list[Indices]]:
    """The most by which each rival loses against its row, and which choices of the
    neighbours make it lose that.
    """
    loss, witness = own[rivals] - own[rows], []
    for table in beside:
        with np.errstate(
            invalid="ignore"
        ):  # inf - inf: what is forbidden with the row does not count
            more = np.where(
                np.isfinite(table[rows]), table[rivals] - table[rows], -np.inf
            )
        witness.append(more.argmax(axis=1))
        loss = loss + more.max(axis=1)
    return loss, witness


class Merge(NamedTuple):
    """A node, the one that decides it, and its choice by that one's."""

    node: int
    by: int
    choice: Indices


@dataclass(frozen=True)
class Contraction:
    """What is left, the numbers that its nodes had, and what was merged, in order."""

    potentials: FactorGraph
    left: tuple[int, ...]
    merges: tuple[Merge, ...]

    def restored(self, found: Mapping[int, int]) -> dict[int, int]:
        """A choice for each node as there were, of one for each that is left."""
        choice = {v: found[i] for i, v in enumerate(self.left)}
        for merge in reversed(self.merges):
            choice[merge.node] = int(merge.choice[choice[merge.by]])
        return choice


def contract(potentials: FactorGraph) -> Contraction:
    """To a fixed point; the least sum stays."""
    merging = _Merging(potentials)
    queue = dict.fromkeys(range(len(potentials.names)))
    while queue:
        v = next(iter(queue))
        decided = next(
            (u for u in sorted(merging.around[v]) if merging.decides(v, u)), None
        )
        if decided is None:
            del queue[v]
            continue
        queue |= dict.fromkeys(merging.around[decided])
        queue.pop(decided, None)
        merging.merge(decided, v)
    left = tuple(merging.around)
    index = {v: i for i, v in enumerate(left)}
    tables = {
        tuple(index[v] for v in scope): table for scope, table in merging.tables.items()
    }
    names = tuple(potentials.names[v] for v in left)
    return Contraction(FactorGraph(names, tables), left, tuple(merging.merges))


class _Merging:
    def __init__(self, potentials: FactorGraph):
        self.tables: dict[Scope, Array] = dict(potentials.tables)
        self.around = {
            v: set(neighbours) for v, neighbours in enumerate(potentials.neighbours)
        }
        self.merges: list[Merge] = []

    def between(self, u: int, v: int) -> Array:
        """(choices of u, choices of v)"""
        return self.tables[u, v] if u < v else self.tables[v, u].T

    def decides(self, v: int, u: int) -> bool:
        """Whether each choice of v leaves one of u, or none."""
        return bool((np.isfinite(self.between(u, v)).sum(0) <= 1).all())

    def merge(self, u: int, v: int) -> None:
        """u into v, which decides it."""
        choice = np.isfinite(self.between(u, v)).argmax(0)
        self.merges.append(Merge(u, v, choice))
        own = (
            self.tables[u,][choice] + self.between(u, v)[choice, np.arange(len(choice))]
        )
        self.tables[v,] = self.tables[v,] + own
        for w in self.around.pop(u):
            table = self.between(u, w)[choice]
            del self.tables[min(u, w), max(u, w)]
            self.around[w].discard(u)
            if w != v:
                scope, table = ((v, w), table) if v < w else ((w, v), table.T)
                self.tables[scope] = (
                    self.tables[scope] + table if scope in self.tables else table
                )
                self.around[v].add(w)
                self.around[w].add(v)
        del self.tables[u,]
