"""Parameter shards: which box of a parameter each rank holds. Integers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

from .layout import Box, Boxes, Layout, Shape, sharded_dims
from .moves import Exchange, exchanges

Ranks = tuple[int, ...]


class OverlapCell(NamedTuple):
    """A slice of a parameter that the same ranks hold.

    Attributes:
        box: The slice.
        holders: The ranks that hold it, in ascending order.
    """

    box: Box
    holders: Ranks


@dataclass(frozen=True)
class ParamShards:
    """The box of a parameter that each rank holds: the whole, a slice, or nothing.

    Boxes may overlap. They differ in one dimension only, and together cover the
    parameter.

    Attributes:
        shape: Shape of the whole parameter.
        boxes: One box per rank.
    """

    shape: Shape
    boxes: Boxes

    @staticmethod
    def on_ranks(shape: Sequence[int], shares: Sequence[int]) -> ParamShards:
        """Returns the whole parameter on every rank with a positive share."""
        whole = Box.whole(tuple(shape))
        empty = whole.with_range(0, 0, 0)
        return ParamShards(
            whole.hi, tuple(whole if share else empty for share in shares)
        )

    @staticmethod
    def sharded(shape: Sequence[int], dim: int, sizes: Sequence[int]) -> ParamShards:
        """Returns a slice along ``dim`` on every rank; see `Layout.sharded`."""
        return ParamShards(tuple(shape), Layout.sharded(shape, dim, sizes).boxes)

    @cached_property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole parameter."""
        return all(box == Box.whole(self.shape) for box in self.boxes)

    @cached_property
    def has_overlap(self) -> bool:
        """Whether some elements are on several ranks."""
        return any(len(holders) > 1 for holders in self.cell_holders)

    @cached_property
    def cell_holders(self) -> tuple[Ranks, ...]:
        """The holders of each cell; gradients of cells with equal holders share buckets."""
        return tuple(cell.holders for cell in self.cells)

    @cached_property
    def numel(self) -> int:
        """Number of elements of the whole parameter."""
        return prod(self.shape)

    @cached_property
    def _dim(self) -> int:
        """The dimension in which the boxes differ."""
        return next(iter(sharded_dims(self.shape, self.boxes)), 0)

    @cached_property
    def cells(self) -> tuple[OverlapCell, ...]:
        """The parameter, divided wherever the box of a rank begins or ends."""
        dim, whole = self._dim, Box.whole(self.shape)
        held = {rank: box for rank, box in enumerate(self.boxes) if box.numel}
        edges = {end for box in held.values() for end in (box.lo[dim], box.hi[dim])}
        cells = []
        for lo, hi in pairwise(sorted(edges)):
            cell = whole.with_range(dim, lo, hi)
            holders = (r for r, box in held.items() if box.intersect(cell) == cell)
            cells.append(OverlapCell(cell, tuple(holders)))
        return tuple(cells)

    @cached_property
    def primary(self) -> Layout:
        """A layout that assigns every element to one of the ranks that hold it.

        From the first element on, the lowest rank that holds an element gets all that
        follow up to the end of its box. Norms count, and checkpoints write, these.
        """
        dim, start = self._dim, 0
        ranges: dict[int, tuple[int, int]] = {}
        while start < self.shape[dim]:
            rank = next(
                rank
                for rank, box in enumerate(self.boxes)
                if box.numel and box.lo[dim] <= start < box.hi[dim]
            )
            ranges[rank] = start, self.boxes[rank].hi[dim]
            start = self.boxes[rank].hi[dim]
        whole = Box.whole(self.shape)
        boxes, last_end = [], 0
        for rank in range(len(self.boxes)):
            # An empty box is placed where the boxes of the ranks before it end.
            lo, hi = ranges.get(rank, (last_end, last_end))
            last_end = max(last_end, hi)
            boxes.append(whole.with_range(dim, lo, hi))
        return Layout(self.shape, "sharded", tuple(boxes))


@lru_cache(maxsize=4096)
def all_reduce_among(holders: Ranks, numel: int, world: int) -> tuple[Exchange, ...]:
    """Returns the rounds of an all-reduce among some of the ranks.

    Args:
        holders: The ranks that take part.
        numel: Number of elements.
        world: Number of all ranks.
    """
    if len(holders) < 2:
        return ()
    shards = ParamShards.on_ranks((numel,), [rank in holders for rank in range(world)])
    return exchanges(shards.boxes, shards.boxes)
