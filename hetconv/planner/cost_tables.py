"""Seconds and bytes by the choices of nodes: what `problem` fills, the search minimizes and `explain` reads. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from hetconv.cost.network import Array

Scope = tuple[str, ...]  # no node, one, or two in the order of their names


class Copies(NamedTuple):
    """Of what ``reader`` reads of ``node``: (choices, choices, P) bytes, when they are asked for; it takes a while."""

    node: str | None
    reader: str | None
    counted: Callable[[], Array]


@dataclass
class Tables:
    """Seconds over the choices of nodes. ``constant``: those that no choice changes.

    ``held``: (choices, P) bytes of what stays in memory on each device: inputs and parameters, in training every result
    too, and ``copies``; in inference the results that are there when most is. ``computing``: what of ``unary`` is it.
    """

    constant: float = 0.0
    unary: dict[str, Array] = field(default_factory=dict)
    pairwise: dict[tuple[str, str], Array] = field(default_factory=dict)
    held: dict[Scope, Array] = field(default_factory=dict)
    copies: list[Copies] = field(default_factory=list)
    computing: dict[str | None, Array] = field(default_factory=dict)

    def charge(self, node: str | None, seconds: Array) -> None:
        """(choices,) of a node, or one number that is the same whatever is chosen."""
        if node is None:
            self.constant += float(seconds[0])
        else:
            self.unary[node] = self.unary[node] + seconds if node in self.unary else seconds

    def hold(self, node: str | None, held: Array) -> None:
        """(choices, P) bytes."""
        scope = () if node is None else (node,)
        _add(self.held, scope, held[0] if node is None else held)

    def relate(self, u: str | None, v: str | None, seconds: Array) -> None:
        """(choices of u, choices of v); of no node there is one choice."""
        scope, table = related(u, v, seconds)
        if len(scope) == 2:
            _add(self.pairwise, scope, table)
        else:
            self.charge(scope[0] if scope else None, np.atleast_1d(table))

    def all_held(self) -> dict[Scope, Array]:
        """``held`` with ``copies``: (choices of each node of the scope, ..., P) bytes."""
        found, known = dict(self.held), dict[int, Array]()
        for node, reader, counted in self.copies:
            if id(counted) not in known:
                known[id(counted)] = counted()
            _add(found, *related(node, reader, known[id(counted)]))
        return found


def related(u: str | None, v: str | None, table: Array) -> tuple[Scope, Array]:
    """(choices of u, choices of v, ...) as a table of the nodes that there are, in order."""
    if u == v:
        return (() if u is None else (u,)), (table[0, 0] if u is None else _diagonal(table))
    if u is None or v is None:
        return (str(v if u is None else u),), (table[0] if u is None else table[:, 0])
    return ((u, v), table) if u < v else ((v, u), table.swapaxes(0, 1))


def _diagonal(table: Array) -> Array:
    at = np.arange(len(table))
    found: Array = table[at, at]
    return found


def _add(tables: dict[Any, Array], scope: Scope, table: Array) -> None:
    tables[scope] = tables[scope] + table if scope in tables else table
