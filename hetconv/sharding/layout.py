"""Layouts: which box of a global tensor each rank holds. Integers only.

The planner predicts the bytes of a redistribution and the runtime sends them from the
same boxes, so that predicted bytes are the bytes sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from math import inf, prod
from typing import Literal

from hetconv.errors import LayoutError

Shape = tuple[int, ...]
Boxes = tuple["Box", ...]
Layouts = tuple["Layout", ...]
Kind = Literal["replicated", "sharded", "partial"]


@dataclass(frozen=True)
class Box:
    """A half-open range of indices in every dimension of a global tensor.

    Attributes:
        lo: First index, per dimension.
        hi: Index after the last, per dimension.
    """

    lo: Shape
    hi: Shape

    @staticmethod
    def whole(shape: Shape) -> Box:
        """Returns the box that covers a tensor of ``shape``."""
        return Box((0,) * len(shape), shape)

    @cached_property
    def shape(self) -> Shape:
        """Extents of the box."""
        return tuple(max(hi - lo, 0) for lo, hi in zip(self.lo, self.hi, strict=True))

    @cached_property
    def numel(self) -> int:
        """Number of elements in the box."""
        return prod(self.shape)

    def intersect(self, other: Box) -> Box:
        """Returns the elements that are in both boxes."""
        lo = tuple(map(max, self.lo, other.lo))
        return Box(lo, tuple(map(max, lo, map(min, self.hi, other.hi))))

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Returns the index of this box in a tensor that holds the box ``outer``."""
        return tuple(
            slice(lo - start, hi - start)
            for lo, hi, start in zip(self.lo, self.hi, outer.lo, strict=True)
        )

    def with_range(self, dim: int, lo: int, hi: int) -> Box:
        """Returns the same box with the range [lo, hi) in dimension ``dim``."""
        return Box(
            (*self.lo[:dim], lo, *self.lo[dim + 1 :]),
            (*self.hi[:dim], hi, *self.hi[dim + 1 :]),
        )


@dataclass(frozen=True)
class ReadRegion:
    """The box of a tensor that each rank reads; boxes may overlap, as with halos.

    Attributes:
        shape: Shape of the global tensor.
        boxes: One box per rank.
    """

    shape: Shape
    boxes: Boxes

    @staticmethod
    def everything(shape: Shape, world: int) -> ReadRegion:
        """Returns the region in which each of ``world`` ranks reads the whole tensor."""
        return ReadRegion(shape, (Box.whole(shape),) * world)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.boxes)


@dataclass(frozen=True)
class Layout:
    """Where the elements of a global tensor are, and what the local values mean.

    Attributes:
        shape: Shape of the global tensor.
        kind: "replicated": every rank holds the whole tensor. "sharded": the boxes are
            disjoint and cover the tensor; they may be empty. "partial": every rank
            holds a tensor of the global shape, and their sum is the value.
        boxes: The box that each rank holds, in rank order.
        shares: Of a partial layout, the proportions in which a consumer that works on
            shards reduce-scatters it. Without any it all-reduces.
    """

    shape: Shape
    kind: Kind
    boxes: Boxes
    shares: tuple[int, ...] = ()

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.boxes)

    @staticmethod
    def replicated(shape: Sequence[int], world: int) -> Layout:
        """Returns the layout in which each of ``world`` ranks holds the whole tensor."""
        return _replicated(tuple(shape), world)

    @staticmethod
    def partial(
        shape: Sequence[int], world: int, shares: Sequence[int] | None = None
    ) -> Layout:
        """Returns the layout in which each of ``world`` ranks holds a summand.

        Args:
            shape: Shape of the global tensor.
            world: Number of ranks.
            shares: Proportions for a reduce-scatter, even ones by default.
        """
        shares = (1,) * world if shares is None else tuple(shares)
        whole = Box.whole(tuple(shape))
        return Layout(whole.hi, "partial", (whole,) * world, shares)

    @staticmethod
    def sharded(shape: Sequence[int], dim: int, sizes: Sequence[int]) -> Layout:
        """Returns the layout in which each rank holds a slice along one dimension.

        Args:
            shape: Shape of the global tensor.
            dim: The dimension that is split; negative ones count from the end.
            sizes: Extent of each rank's slice, in rank order.

        Raises:
            LayoutError: The sizes do not add up to the extent of the dimension.

        Examples:
            >>> Layout.sharded((8, 64, 32, 32), 1, (48, 16)).boxes[1].lo
            (0, 48, 0, 0)
        """
        return _sharded(tuple(shape), dim, tuple(sizes))

    @cached_property
    def dim(self) -> int | None:
        """The one dimension that a sharded layout splits in rank order, or None."""
        if self.kind != "sharded":
            return None
        dims = sharded_dims(self.shape, self.boxes)
        if not dims:
            return 0
        ranges = [(b.lo[dims[0]], b.hi[dims[0]]) for b in self.boxes]
        in_order = ranges == spans([b.shape[dims[0]] for b in self.boxes])
        return dims[0] if len(dims) == 1 and in_order else None

    @property
    def inner_dim(self) -> int | None:
        """The dimension that is split among `peers` in rank order, or None."""
        return self.dim

    def peers(self, rank: int) -> range:
        """Returns the ranks that hold shards of the same samples as ``rank``.

        These are all ranks, unless the layout is a `HierarchicalLayout`.
        """
        return range(self.world)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Extent of each rank's box along `dim`; empty if that is None."""
        dim = self.dim
        return () if dim is None else tuple(b.shape[dim] for b in self.boxes)


# The planner and the runtime ask for the same few layouts again and again.
@lru_cache(maxsize=4096)
def _replicated(shape: Shape, world: int) -> Layout:
    return Layout(shape, "replicated", (Box.whole(shape),) * world)


@lru_cache(maxsize=4096)
def _sharded(shape: Shape, dim: int, sizes: tuple[int, ...]) -> Layout:
    if not -len(shape) <= dim < len(shape):
        raise LayoutError(
            f"a layout of shape {shape} has no dimension {dim} to split; give one from "
            f"{-len(shape)} to {len(shape) - 1}"
        )
    dim %= len(shape)
    if any(size < 0 for size in sizes) or sum(sizes) != shape[dim]:
        raise LayoutError(
            f"sizes {sizes} add up to {sum(sizes)}, but dimension {dim} of {shape} has "
            f"{shape[dim]}; give one non-negative size per rank that add up to it "
            "(hetconv.apportion does so for proportions)"
        )
    whole = Box.whole(shape)
    boxes = tuple(whole.with_range(dim, lo, hi) for lo, hi in spans(sizes))
    return Layout(shape, "sharded", boxes)


def sharded_dims(shape: Shape, boxes: Boxes) -> list[int]:
    """Returns the dimensions of ``shape`` that some box does not span entirely."""
    return [
        dim
        for dim, extent in enumerate(shape)
        if any((box.lo[dim], box.hi[dim]) != (0, extent) for box in boxes)
    ]


def spans(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the half-open ranges that consecutive pieces of these sizes cover.

    Examples:
        >>> spans([3, 0, 2])
        [(0, 3), (3, 3), (3, 5)]
    """
    ends = list(accumulate(sizes))
    return list(zip([0, *ends[:-1]], ends, strict=True))


@lru_cache(maxsize=4096)
def apportion(
    total: int, weights: tuple[float, ...], granularity: int = 1
) -> tuple[int, ...]:
    """Divides units among ranks in proportion to weights, by largest remainder.

    Args:
        total: Number of units, such as rows or channels.
        weights: Proportion of each rank; one of 0 gets nothing.
        granularity: Units come in blocks of this size. What whole blocks leave over
            goes to the last rank with a weight.

    Returns:
        The units of each rank, which add up to ``total``.

    Raises:
        LayoutError: A weight is negative or infinite, or none is positive.

    Examples:
        >>> apportion(64, (2.0, 1.0))
        (43, 21)
    """
    if not weights or min(weights) < 0 or not 0 < sum(weights) < inf:
        raise LayoutError(
            f"cannot apportion {total} by {weights}: give finite proportions >= 0, at least "
            "one positive"
        )
    blocks = total // granularity
    exact = [blocks * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    working = [rank for rank, weight in enumerate(weights) if weight > 0]
    by_remainder = sorted(working, key=lambda rank: (counts[rank] - exact[rank], rank))
    for rank in by_remainder[: blocks - sum(counts)]:
        counts[rank] += 1
    sizes = [count * granularity for count in counts]
    sizes[working[-1]] += total - sum(sizes)
    return tuple(sizes)
