"""Who holds what of a parameter: a box per rank, the whole of it, a slice, or nothing.
Pure integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

from .layout import Box, Boxes, Exchange, Layout, Shape, exchanges

Ranks = tuple[int, ...]


class OverlapCell(NamedTuple):
    """A slice of a parameter, and the ranks that hold it, in ascending order."""

    box: Box
    holders: Ranks


@dataclass(frozen=True)
class ParamShards:
    """Which ranks hold what of a parameter of global ``shape``: one box each.

    Boxes may overlap, be the whole, or be empty. They differ in one dimension alone,
    and together cover the parameter.
    """

    shape: Shape
    boxes: Boxes

    @staticmethod
    def on_ranks(shape: Sequence[int], shares: Sequence[int]) -> ParamShards:
        """The whole on every rank with a share, nothing on the others."""
        whole = Box.whole(tuple(shape))
        return ParamShards(
            whole.hi,
            tuple(whole if share else whole.along(0, 0, 0) for share in shares),
        )

    @staticmethod
    def sharded(shape: Sequence[int], dim: int, sizes: Sequence[int]) -> ParamShards:
        """A slice per rank. Raises `LayoutError` if the sizes do not add up to the extent."""
        return ParamShards(tuple(shape), Layout.sharded(shape, dim, sizes).boxes)

    @cached_property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole."""
        return all(box == Box.whole(self.shape) for box in self.boxes)

    @cached_property
    def has_overlap(self) -> bool:
        """Whether several ranks hold the same elements."""
        return any(len(holders) > 1 for holders in self.cell_holders)

    @cached_property
    def cell_holders(self) -> tuple[Ranks, ...]:
        """The holders of each atom: gradients of parameters that are shared alike are
        summed together.
        """
        return tuple(atom.holders for atom in self.cells)

    @cached_property
    def numel(self) -> int:
        """Of the whole parameter."""
        return prod(self.shape)

    @cached_property
    def _dim(self) -> int:
        """In which the boxes differ."""
        cut = (
            d
            for d, n in enumerate(self.shape)
            if any((b.lo[d], b.hi[d]) != (0, n) for b in self.boxes)
        )
        return next(cut, 0)

    @cached_property
    def cells(self) -> tuple[OverlapCell, ...]:
        """The parameter cut wherever a rank's box begins or ends."""
        dim, held = self._dim, {r: box for r, box in enumerate(self.boxes) if box.numel}
        edges = sorted(
            {end for box in held.values() for end in (box.lo[dim], box.hi[dim])}
        )
        slices = (
            Box.whole(self.shape).along(dim, lo, hi) for lo, hi in pairwise(edges)
        )
        return tuple(
            OverlapCell(s, tuple(r for r, box in held.items() if box.intersect(s) == s))
            for s in slices
        )

    @cached_property
    def primary(self) -> Layout:
        """Every element once: from the first element on, each run is the first rank's
        that holds it, to its box's end.

        What is counted or written once for all ranks is counted and written so.
        """
        dim, at, mine = self._dim, 0, {}
        while at < self.shape[dim]:
            rank = next(
                r
                for r, box in enumerate(self.boxes)
                if box.numel and box.lo[dim] <= at < box.hi[dim]
            )
            mine[rank] = at, self.boxes[rank].hi[dim]
            at = mine[rank][1]
        boxes, past = [], 0
        for rank in range(len(self.boxes)):
            lo, hi = mine.get(
                rank, (past, past)
            )  # nothing lies after what the ranks before own
            past = max(past, hi)
            boxes.append(Box.whole(self.shape).along(dim, lo, hi))
        return Layout(self.shape, "sharded", tuple(boxes))


@lru_cache(maxsize=4096)
def all_reduce_among(holders: Ranks, numel: int, world: int) -> tuple[Exchange, ...]:
    """The rounds in which so many numbers on each of these ranks become their sum on
    each of them.
    """
    if len(holders) < 2:
        return ()
    flat = ParamShards.on_ranks(
        (numel,), [rank in holders for rank in range(world)]
    ).boxes
    return exchanges(flat, flat)
