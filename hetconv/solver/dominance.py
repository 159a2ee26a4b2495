"""Leaves out choices that another one is as good as, whatever the neighbours choose. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetconv.errors import PlanError

from .factor_graph import Array, Indices, Potentials


def pruned(potentials: Potentials) -> tuple[Potentials, list[Indices]]:
    """Without choices that are forbidden or dominated, to a fixed point; and for each node the choices that are left.

    A node with one choice left has no table with a neighbour: what it says is added to the neighbour's own, so that no
    table over several nodes has a dimension for it.
    The least cost stays, and so does a choice of that cost. Raises `PlanError` by name where none is left for a node.
    """
    tables = dict(potentials.tables)
    around = [set(nodes) for nodes in potentials.neighbours]
    kept = [np.arange(n) for n in potentials.sizes]
    queue = dict.fromkeys(range(len(kept)))
    while queue:
        v = next(iter(queue))
        del queue[v]
        pairs = [(u, v) if u < v else (v, u) for u in sorted(around[v])]
        keep = undominated(tables[v,], [tables[u, w] if u == v else tables[u, w].T for u, w in pairs])
        if not len(keep):
            raise PlanError(
                f"every choice of {potentials.names[v]!r} is forbidden, by its own table or beside what its neighbours "
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
    return Potentials(potentials.names, tables), kept


def undominated(own: Array, beside: Sequence[Array]) -> Indices:
    """The choices to keep, ascending: none where all are forbidden. Of equal ones a single one is kept.

    ``own``: (choices,); ``beside``: (choices, choices of the neighbour), for each neighbour. Choice b dominates a where
    own[b] - own[a] + the sum over neighbours of max(beside[b] - beside[a]) <= 0.

    Each choice is compared with the rival that may yet be best. Where it survives, the neighbours' choices that refute
    this rival, its witness, refute most others too: few of all pairs are ever compared over all choices of neighbours.
    """
    feasible = np.isfinite(own)
    for table in beside:
        feasible &= np.isfinite(table).any(axis=1)
    kept = np.flatnonzero(feasible)
    own, beside = own[kept], [table[kept] for table in beside]
    margin = own - own[:, None]
    bound = np.where(np.eye(len(kept), dtype=bool), np.inf, -np.inf)  # [a, b]: at its worst b loses no less against a
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
            if left[rival[i]]:  # equal ones are each other's rivals, and must not both go
                left[rows[i]] = False
        bound[:, ~left] = np.inf
        rows, witness = rows[left[rows]], [w[left[rows]] for w in witness]
    return kept[left]


def _worst(own: Array, beside: Sequence[Array], rows: Indices, rivals: Indices) -> tuple[Array, list[Indices]]:
    """The most by which each rival loses against its row, and which choices of the neighbours make it lose that."""
    loss, witness = own[rivals] - own[rows], []
    for table in beside:
        with np.errstate(invalid="ignore"):  # inf - inf: what is forbidden with the row does not count
            more = np.where(np.isfinite(table[rows]), table[rivals] - table[rows], -np.inf)
        witness.append(more.argmax(axis=1))
        loss = loss + more.max(axis=1)
    return loss, witness
