"""Moves: the rounds of messages that bring a tensor from one layout to another."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from .layout import Box, Boxes, Layout, ReadRegion, Shape, apportion, spans

Exchange = tuple[Boxes, Boxes]
"""One round: the boxes that ranks hold before it, and those that they want after it.

Every rank sends the intersections of its box with the boxes that other ranks want.
"""


def exchanges(held: Boxes, wanted: Boxes) -> tuple[Exchange, ...]:
    """Returns the rounds in which values over ``held`` are summed into ``wanted``.

    An all-reduce of a box that more than two ranks hold takes two rounds,
    reduce-scatter and all-gather: every rank sends 2 (P - 1) / P of the box instead of
    P - 1 times the box. Everything else takes one round.

    Args:
        held: The box that each rank holds.
        wanted: The box that each rank wants.
    """
    holders = [box for box in held if box.numel] if held == wanted else []
    if len(holders) <= 2 or not holders[0].lo or any(b != holders[0] for b in holders):
        return ((held, wanted),)
    box = holders[0]
    dim = max(range(len(box.lo)), key=lambda d: box.shape[d])
    sizes = apportion(box.shape[dim], tuple(int(b.numel > 0) for b in held))
    start = box.lo[dim]
    chunks = tuple(
        box.with_range(dim, start + lo, start + hi) for lo, hi in spans(sizes)
    )
    return (held, chunks), (chunks, wanted)


@dataclass(frozen=True)
class Move:
    """A redistribution, as the rounds of its forward and of its adjoint.

    The adjoint has the boxes of the forward swapped, except that a side counts once
    where it is replicated.

    Attributes:
        src: Layout of the tensor before.
        dst: Layout of the tensor after, or the region that each rank reads of it.
    """

    src: Layout
    dst: Layout | ReadRegion

    @cached_property
    def forward(self) -> tuple[Exchange, ...]:
        """Rounds from ``src`` to ``dst``; without any, ranks slice what they hold."""
        if self.src.kind == "replicated" or self.embeds:
            return ()
        return exchanges(self.src.boxes, self.dst.boxes)

    @cached_property
    def adjoint(self) -> tuple[Exchange, ...]:
        """Rounds of the gradient from ``dst`` to ``src``."""
        replicated = isinstance(self.dst, Layout) and self.dst.kind == "replicated"
        if replicated or self.embeds:
            return ()
        return exchanges(self.dst.boxes, self.src.boxes)

    @property
    def embeds(self) -> bool:
        """Whether ``dst`` is partial, so that ranks pad with zeros and send nothing."""
        return isinstance(self.dst, Layout) and self.dst.kind == "partial"


@lru_cache(maxsize=1024)
def all_reduce(shape: Shape, world: int) -> Move:
    """Returns the all-reduce of a tensor of ``shape`` over ``world`` ranks."""
    return Move(Layout.partial(shape, world), Layout.replicated(shape, world))


@lru_cache(maxsize=1024)
def all_gather(shape: Shape, world: int) -> Move:
    """Returns the all-gather of each rank's tensor of ``shape`` into (world, *shape)."""
    stacked = Layout.sharded((world, *shape), 0, (1,) * world)
    return Move(stacked, Layout.replicated(stacked.shape, world))


@lru_cache(maxsize=1024)
def all_gather_uneven(counts: tuple[int, ...]) -> Move:
    """Returns the all-gather of vectors with ``counts`` elements, concatenated."""
    vector = Layout.sharded((sum(counts),), 0, counts)
    return Move(vector, Layout.replicated(vector.shape, vector.world))


@lru_cache(maxsize=4096)
def overlaps(held: Boxes, wanted: Boxes) -> tuple[tuple[int, int, Box], ...]:
    """Returns every non-empty (sender, receiver, box) of one round.

    They are ordered by receiver, then sender, and include what a rank keeps itself.
    """
    pieces = (
        (sender, receiver, have.intersect(want))
        for receiver, want in enumerate(wanted)
        for sender, have in enumerate(held)
    )
    return tuple(piece for piece in pieces if piece[2].numel)


def bytes_per_pair(
    rounds: tuple[Exchange, ...], itemsize: int
) -> dict[tuple[int, int], int]:
    """Returns the bytes that each (sender, receiver) pair sends in ``rounds``.

    Args:
        rounds: The rounds of a move.
        itemsize: Bytes of an element.
    """
    total: dict[tuple[int, int], int] = {}
    for held, wanted in rounds:
        for sender, receiver, box in overlaps(held, wanted):
            if sender != receiver:
                pair = sender, receiver
                total[pair] = total.get(pair, 0) + box.numel * itemsize
    return total


def buckets(
    sizes: Sequence[int], limit: int = 1 << 20, kinds: Sequence[Hashable] = ()
) -> list[list[int]]:
    """Groups gradients into buckets, last first as backward computes them.

    Args:
        sizes: Number of elements of each gradient.
        limit: A bucket with so many elements is full.
        kinds: Kind of each gradient; a bucket holds one kind only.

    Returns:
        Indices into ``sizes``, bucket by bucket.
    """
    groups: list[list[int]] = []
    # For each kind the bucket that is being filled, and its number of elements.
    filling: dict[Hashable, tuple[list[int], int]] = {}
    for i in reversed(range(len(sizes))):
        kind = kinds[i] if kinds else None
        group, filled = filling.get(kind, ([], limit))
        if filled >= limit:
            group, filled = [], 0
            groups.append(group)
        group.append(i)
        filling[kind] = group, filled + sizes[i]
    return groups
