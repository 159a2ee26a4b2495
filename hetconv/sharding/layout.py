"""Where data is: boxes, layouts and the pieces that move between them. Pure integers:
no tensor, no rank, no clock.

The planner prices a data movement and the runtime performs it from the same functions,
so that predicted bytes are the bytes sent.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from math import inf, prod
from typing import Literal

from hetconv.errors import LayoutError

Shape = tuple[int, ...]
Boxes = tuple["Box", ...]
Kind = Literal["replicated", "sharded", "partial"]


@dataclass(frozen=True)
class Box:
    """A half-open range ``[lo, hi)`` per dimension of a global tensor."""

    lo: Shape
    hi: Shape

    @staticmethod
    def whole(shape: Shape) -> Box:
        return Box((0,) * len(shape), shape)

    @cached_property
    def shape(self) -> Shape:
        return tuple(max(h - low, 0) for low, h in zip(self.lo, self.hi, strict=True))

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    def intersect(self, other: Box) -> Box:
        lo = tuple(map(max, self.lo, other.lo))
        return Box(lo, tuple(map(max, lo, map(min, self.hi, other.hi))))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The slices of this box in a tensor that holds ``outer``."""
        return tuple(
            slice(a - o, b - o)
            for a, b, o in zip(self.lo, self.hi, outer.lo, strict=True)
        )

    def along(self, dim: int, lo: int, hi: int) -> Box:
        """The same box with another range in one dimension."""
        return Box(
            (*self.lo[:dim], lo, *self.lo[dim + 1 :]),
            (*self.hi[:dim], hi, *self.hi[dim + 1 :]),
        )


@dataclass(frozen=True)
class ReadRegion:
    """What each rank reads of a tensor of global ``shape``: one box per rank,
    overlapping as they like.
    """

    shape: Shape
    boxes: Boxes

    @staticmethod
    def everything(shape: Shape, world: int) -> ReadRegion:
        return ReadRegion(shape, (Box.whole(shape),) * world)

    @property
    def world(self) -> int:
        return len(self.boxes)


@dataclass(frozen=True)
class Layout:
    """A global shape, one box per rank, and what the local values mean.

    ``replicas``: every rank holds the whole. ``sharded``: the boxes are disjoint and
    cover the tensor; empty ones are allowed. ``partial``: every rank holds a summand of
    the whole; ``shares`` are the proportions in which a consumer that works on parts
    sums it, and without any it takes the whole.
    """

    shape: Shape
    kind: Kind
    boxes: Boxes
    shares: tuple[int, ...] = ()

    @property
    def world(self) -> int:
        return len(self.boxes)

    @staticmethod
    def replicated(shape: Sequence[int], world: int) -> Layout:
        return _replicated(tuple(shape), world)

    @staticmethod
    def partial(
        shape: Sequence[int], world: int, shares: Sequence[int] | None = None
    ) -> Layout:
        """``shares``: even ones, unless given."""
        shares = (1,) * world if shares is None else tuple(shares)
        return Layout(
            tuple(shape), "partial", (Box.whole(tuple(shape)),) * world, shares
        )

    @staticmethod
    def sharded(shape: Sequence[int], dim: int, sizes: Sequence[int]) -> Layout:
        """Cut along ``dim`` into one slice per rank. Raises `LayoutError` if the sizes
        do not add up to the extent.
        """
        return _sharded(tuple(shape), dim, tuple(sizes))

    @cached_property
    def dim(self) -> int | None:
        """The one dimension along which a sharded layout is cut in rank order, or None."""
        if self.kind != "sharded":
            return None
        cut = [
            d
            for d, n in enumerate(self.shape)
            if any((b.lo[d], b.hi[d]) != (0, n) for b in self.boxes)
        ]
        if len(cut) > 1:
            return None
        dim = cut[0] if cut else 0
        in_order = spans([b.shape[dim] for b in self.boxes])
        return (
            dim
            if not cut or in_order == [(b.lo[dim], b.hi[dim]) for b in self.boxes]
            else None
        )

    @property
    def inner_dim(self) -> int | None:
        """The dimension along which `mates` are cut in order: `dim`, where there is one level."""
        return self.dim

    def peers(self, rank: int) -> range:
        """The ranks with parts of the same samples as this one: all, where there is one
        level; see `HierarchicalLayout`.
        """
        return range(self.world)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The extents of the boxes along `dim`."""
        return (
            tuple(b.shape[self.dim] for b in self.boxes) if self.dim is not None else ()
        )


@lru_cache(
    maxsize=4096
)  # the planner and the runtime ask for the same ones again and again
def _replicated(shape: Shape, world: int) -> Layout:
    return Layout(shape, "replicated", (Box.whole(shape),) * world)


@lru_cache(maxsize=4096)
def _sharded(shape: Shape, dim: int, sizes: tuple[int, ...]) -> Layout:
    if not -len(shape) <= dim < len(shape):
        raise LayoutError(
            f"a layout of shape {shape} was asked to be cut along dimension {dim}, which it has not"
        )
    dim %= len(shape)
    if any(s < 0 for s in sizes) or sum(sizes) != shape[dim]:
        raise LayoutError(
            f"sizes {sizes} add up to {sum(sizes)}, but dimension {dim} of {shape} has "
            f"{shape[dim]}; "
            "give one non-negative size per rank that add up to it (hetconv.apportion does so "
            "for proportions)"
        )
    whole = Box.whole(shape)
    return Layout(
        shape, "sharded", tuple(whole.along(dim, lo, hi) for lo, hi in spans(sizes))
    )


def spans(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """[3, 0, 2] -> [(0, 3), (3, 3), (3, 5)]."""
    ends = list(accumulate(sizes))
    return list(zip([0, *ends[:-1]], ends, strict=True))


@lru_cache(maxsize=4096)
def apportion(
    total: int, weights: tuple[float, ...], granularity: int = 1
) -> tuple[int, ...]:
    """``total_cost`` units in proportion to ``weights`` by largest remainder; a zero weight
    gets nothing.

    Cuts lie on multiples of ``granularity``; what whole multiples leave over goes to
    the last rank with a weight.
    """
    if not weights or min(weights) < 0 or not 0 < sum(weights) < inf:
        raise LayoutError(
            f"cannot apportion {total} by {weights}: give finite proportions >= 0, at least "
            "one positive"
        )
    blocks = total // granularity
    exact = [blocks * w / sum(weights) for w in weights]
    sizes = [int(e) for e in exact]
    order = sorted(
        (i for i, w in enumerate(weights) if w > 0),
        key=lambda i: (sizes[i] - exact[i], i),
    )
    for i in order[: blocks - sum(sizes)]:
        sizes[i] += 1
    sizes = [s * granularity for s in sizes]
    sizes[max(i for i, w in enumerate(weights) if w > 0)] += total - sum(sizes)
    return tuple(sizes)


Exchange = tuple[
    Boxes, Boxes
]  # every rank sends what it holds of the first boxes to whoever wants it in the second


def exchanges(held: Boxes, wanted: Boxes) -> tuple[Exchange, ...]:
    """The rounds in which values over ``held`` are summed into ``wanted``: one, or two
    for a sum of wholes.

    With more than two ranks that hold one, a sum of wholes is scattered among them
    first and gathered then, which moves 2(P-1)/P of the tensor per rank instead of P-1.
    """
    holders = [b for b in held if b.numel] if held == wanted else []
    if len(holders) > 2 and holders[0].lo and all(b == holders[0] for b in holders):
        box, shares = holders[0], tuple(int(b.numel > 0) for b in held)
        dim = max(range(len(box.lo)), key=lambda d: box.shape[d])
        cut = spans(apportion(box.shape[dim], shares))
        chunks = tuple(
            box.along(dim, box.lo[dim] + lo, box.lo[dim] + hi) for lo, hi in cut
        )
        return (held, chunks), (chunks, wanted)
    return ((held, wanted),)


@dataclass(frozen=True)
class Move:
    """A redistribution from ``src`` to ``dst``, as the two verbs that it is made of.

    ``forward`` and ``adjoint`` list rounds of exchange; an empty list means that every
    rank takes its box of what it already holds. One is the other with its boxes
    swapped, except where a side counts once because it is replicated.
    """

    src: Layout
    dst: Layout | ReadRegion

    @cached_property
    def forward(self) -> tuple[Exchange, ...]:
        return (
            ()
            if self.src.kind == "replicated" or self.embeds
            else exchanges(self.src.boxes, self.dst.boxes)
        )

    @cached_property
    def adjoint(self) -> tuple[Exchange, ...]:
        counts_once = isinstance(self.dst, Layout) and self.dst.kind == "replicated"
        return (
            ()
            if counts_once or self.embeds
            else exchanges(self.dst.boxes, self.src.boxes)
        )

    @property
    def embeds(self) -> bool:
        """Whether the result is partial: then each rank embeds what it holds in zeros
        and nothing moves.
        """
        return isinstance(self.dst, Layout) and self.dst.kind == "partial"


@lru_cache(maxsize=1024)
def all_reduce(shape: Shape, world: int) -> Move:
    """A summand on every rank becomes the sum on every rank (all-reduce)."""
    return Move(Layout.partial(shape, world), Layout.replicated(shape, world))


@lru_cache(maxsize=1024)
def all_gather(shape: Shape, world: int) -> Move:
    """A tensor of each rank becomes all of them, in rank order, on every rank
    (all-gather): (P, *shape).
    """
    each = Layout.sharded((world, *shape), 0, (1,) * world)
    return Move(each, Layout.replicated(each.shape, world))


@lru_cache(maxsize=1024)
def all_gather_uneven(counts: tuple[int, ...]) -> Move:
    """So many numbers of each rank, one rank after the other, go to every rank."""
    own = Layout.sharded((sum(counts),), 0, counts)
    return Move(own, Layout.replicated(own.shape, own.world))


@lru_cache(maxsize=4096)
def overlaps(held: Boxes, wanted: Boxes) -> tuple[tuple[int, int, Box], ...]:
    """Every non-empty (sender, receiver, box) of one round, in rank order; a rank's own
    piece included.
    """
    found = (
        (s, r, a.intersect(b)) for r, b in enumerate(wanted) for s, a in enumerate(held)
    )
    return tuple(p for p in found if p[2].numel)


def bytes_per_pair(
    rounds: tuple[Exchange, ...], itemsize: int
) -> dict[tuple[int, int], int]:
    """Bytes that each (sender, receiver) pair moves in these rounds; a rank's own
    pieces do not move.
    """
    total: dict[tuple[int, int], int] = {}
    for held, wanted in rounds:
        for s, r, box in overlaps(held, wanted):
            if s != r:
                total[s, r] = total.get((s, r), 0) + box.numel * itemsize
    return total


def buckets(
    sizes: Sequence[int], limit: int = 1 << 20, kinds: Sequence[Hashable] = ()
) -> list[list[int]]:
    """Indices of items, last first as backward needs them, in groups of one kind and of
    about ``limit`` elements.
    """
    groups: list[list[int]] = []
    filling: dict[
        Hashable, tuple[list[int], int]
    ] = {}  # by kind, and how many elements that group has
    for i in reversed(range(len(sizes))):
        kind = kinds[i] if kinds else None
        group, filled = filling.get(kind, ([], limit))
        if filled >= limit:
            group, filled = [], 0
            groups.append(group)
        group.append(i)
        filling[kind] = group, filled + sizes[i]
    return groups
