"""Merges nodes whose choice another node's choice decides, where their table forbids all others. Pure.

To eliminate such a node would tie all its neighbours to each other; merged, each is tied to the one that decides, and
every table is still over two nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .factor_graph import Array, Indices, Potentials, Scope


class Merge(NamedTuple):
    """A node, the one that decides it, and its choice by that one's."""

    node: int
    by: int
    choice: Indices


@dataclass(frozen=True)
class Contraction:
    """What is left, the numbers that its nodes had, and what was merged, in order."""

    potentials: Potentials
    left: tuple[int, ...]
    merges: tuple[Merge, ...]

    def restored(self, found: Mapping[int, int]) -> dict[int, int]:
        """A choice for each node as there were, of one for each that is left."""
        choice = {v: found[i] for i, v in enumerate(self.left)}
        for merge in reversed(self.merges):
            choice[merge.node] = int(merge.choice[choice[merge.by]])
        return choice


def contracted(potentials: Potentials) -> Contraction:
    """To a fixed point; the least sum stays."""
    merging = _Merging(potentials)
    queue = dict.fromkeys(range(len(potentials.names)))
    while queue:
        v = next(iter(queue))
        decided = next((u for u in sorted(merging.around[v]) if merging.decides(v, u)), None)
        if decided is None:
            del queue[v]
            continue
        queue |= dict.fromkeys(merging.around[decided])
        queue.pop(decided, None)
        merging.merge(decided, v)
    left = tuple(merging.around)
    index = {v: i for i, v in enumerate(left)}
    tables = {tuple(index[v] for v in scope): table for scope, table in merging.tables.items()}
    names = tuple(potentials.names[v] for v in left)
    return Contraction(Potentials(names, tables), left, tuple(merging.merges))


class _Merging:
    def __init__(self, potentials: Potentials):
        self.tables: dict[Scope, Array] = dict(potentials.tables)
        self.around = {v: set(neighbours) for v, neighbours in enumerate(potentials.neighbours)}
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
        own = self.tables[u,][choice] + self.between(u, v)[choice, np.arange(len(choice))]
        self.tables[v,] = self.tables[v,] + own
        for w in self.around.pop(u):
            table = self.between(u, w)[choice]
            del self.tables[min(u, w), max(u, w)]
            self.around[w].discard(u)
            if w != v:
                scope, table = ((v, w), table) if v < w else ((w, v), table.T)
                self.tables[scope] = self.tables[scope] + table if scope in self.tables else table
                self.around[v].add(w)
                self.around[w].add(v)
        del self.tables[u,]
