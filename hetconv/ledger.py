"""Seconds and bytes by the choices of nodes: what `problem` fills, the search minimizes and `explain` reads. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from .network import Array


@dataclass
class Tables:
    """Seconds over the choices of nodes. ``constant``: those that no choice changes.

    ``held``: (choices, P) bytes of what stays in memory on each device: parameters, and in training every result.
    ``computing``: what of ``unary`` is computing.
    """

    constant: float = 0.0
    unary: dict[str, Array] = field(default_factory=dict)
    pairwise: dict[tuple[str, str], Array] = field(default_factory=dict)
    held: dict[str | None, Array] = field(default_factory=dict)
    computing: dict[str | None, Array] = field(default_factory=dict)

    def charge(self, node: str | None, seconds: Array) -> None:
        """(choices,) of a node, or one number that is the same whatever is chosen."""
        if node is None:
            self.constant += float(seconds[0])
        else:
            self.unary[node] = self.unary[node] + seconds if node in self.unary else seconds

    def hold(self, node: str | None, held: Array) -> None:
        """(choices, P) bytes."""
        self.held[node] = self.held[node] + held if node in self.held else held

    def relate(self, u: str | None, v: str | None, seconds: Array) -> None:
        """(choices of u, choices of v); of no node there is one choice."""
        if u == v:
            self.charge(u, seconds.diagonal())
        elif u is None or v is None:
            self.charge(v if u is None else u, seconds[0] if u is None else seconds[:, 0])
        else:
            (a, b), table = ((u, v), seconds) if u < v else ((v, u), seconds.T)
            self.pairwise[a, b] = self.pairwise[a, b] + table if (a, b) in self.pairwise else table
