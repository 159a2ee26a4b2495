"""One exchange as one rank sees it: slices to send, pieces to receive, and their assembly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Literal, NamedTuple

from torch import Tensor

from hetconv.sharding.layout import Box, Boxes, Layout, ReadRegion, Shape
from hetconv.sharding.moves import Exchange, Move, overlaps
from hetconv.signature_cache import Cache

from .exchange import wire_shape

Slices = tuple[slice, ...]
Span = tuple[int, int]
Collective = Literal["all-gather", "reduce-scatter"]


def local_slice(local: Tensor, held: Box, wanted: Box) -> Tensor:
    """Returns the part of a box within what this rank holds, as a view.

    Args:
        local: what this rank holds.
        held: box of ``local`` in the global tensor.
        wanted: a box within ``held``.
    """
    return local if held == wanted else local[wanted.slices_in(held)]


class AssemblyPlan(NamedTuple):
    """How pieces over some boxes are assembled over another box.

    Attributes:
        shape: of the assembled tensor.
        covered: whether each element is in exactly one piece.
        summands: whether each piece covers the whole box.
        slices: the order of the pieces where they are channel slices of an image; None
            otherwise.
        places: index of each piece in the assembled tensor.
    """

    shape: Shape
    covered: bool
    summands: bool
    slices: tuple[int, ...]
    places: tuple[Slices, ...]

    @staticmethod
    def to_fill(boxes: Sequence[Box], whole: Box) -> AssemblyPlan:
        """Returns the plan that assembles pieces over ``boxes`` into ``whole``."""
        covered = sum(box.numel for box in boxes) == whole.numel and disjoint(boxes)
        image = len(whole.shape) == 4 and all(
            b.with_range(1, 0, 0) == whole.with_range(1, 0, 0) for b in boxes
        )
        slices = (
            sorted(range(len(boxes)), key=lambda k: boxes[k].lo)
            if covered and image
            else ()
        )
        summands = bool(boxes) and all(box == whole for box in boxes)
        return AssemblyPlan(
            whole.shape,
            covered,
            summands,
            tuple(slices),
            tuple(box.slices_in(whole) for box in boxes),
        )


class ExchangePlan(NamedTuple):
    """One exchange as one rank sees it.

    Reading it from the boxes of all ranks takes longer than a small message, so that plans
    are cached.

    Attributes:
        exchange: what it was read from.
        sends: by receiver, the slice of the local tensor.
        comes: by sender, the shape of the piece.
        parts: ranks that hold what this rank wants, in order.
        own: slice of the local tensor that this rank itself wants.
        fit: how the pieces are assembled.
        moves: whether any two ranks exchange a piece.
        spans: of each part, the elements that it is of the result in wire format; None
            unless every part is one run of elements, and each element in one part.
        collective: the collective that the exchange is, if ranks have equal runs.
    """

    exchange: Exchange
    sends: tuple[tuple[int, Slices | None], ...]
    comes: Mapping[int, Shape]
    parts: tuple[int, ...]
    own: Slices | None
    fit: AssemblyPlan
    moves: bool
    spans: tuple[Span, ...] | None
    collective: Collective | None


_moves: Cache[tuple[int, int], Move] = Cache()


_sides: Cache[tuple[int, int, int], ExchangePlan] = Cache()


def move_of(src: Layout, dst: Layout | ReadRegion) -> Move:
    """Returns the cached move between two layouts.

    It is looked up by identity, as layouts are slow to compare. Cached entries keep their
    layouts, so that the ids stay valid.
    """
    key = (id(src), id(dst))
    return _moves.current.get(key) or _moves.add(key, Move(src, dst))


def exchange_plan(held: Boxes, wanted: Boxes, me: int) -> ExchangePlan:
    """Returns the cached exchange plan of a rank.

    Args:
        held: box that each rank holds.
        wanted: box that each rank wants.
        me: this rank.
    """
    key = (id(held), id(wanted), me)
    return _sides.current.get(key) or _sides.add(key, _side(held, wanted, me))


def _side(held: Boxes, wanted: Boxes, me: int) -> ExchangePlan:
    def of_own(box: Box) -> Slices | None:
        return None if box == held[me] else box.slices_in(held[me])

    every = overlaps(held, wanted)
    sends = tuple((r, of_own(box)) for s, r, box in every if s == me != r)
    parts = [(s, box) for s, r, box in every if r == me]
    comes = {s: box.shape for s, box in parts if s != me}
    own = next((of_own(box) for s, box in parts if s == me), None)
    fit, moves = (
        AssemblyPlan.to_fill([box for _, box in parts], wanted[me]),
        any(s != r for s, r, _ in every),
    )
    runs = [contiguous_span(box, wanted[me]) for _, box in parts]
    spans = tuple(run for run in runs if run is not None)
    return ExchangePlan(
        (held, wanted),
        sends,
        comes,
        tuple(s for s, _ in parts),
        own,
        fit,
        moves,
        spans if fit.covered and len(spans) == len(parts) > 1 else None,
        _collective(held, wanted),
    )


def contiguous_span(box: Box, whole: Box) -> Span | None:
    """Returns where a box lies in a larger one in wire format, if it is one run there.

    Args:
        box: a box within ``whole``.
        whole: a box whose elements are counted in the order in which they are sent.
    """
    sizes, all_sizes = wire_shape(box.shape), wire_shape(whole.shape)
    first = next((d for d, n in enumerate(sizes) if n > 1), len(sizes))
    if sizes[first + 1 :] != all_sizes[first + 1 :]:
        return None
    start = 0
    offsets = tuple(a - b for a, b in zip(box.lo, whole.lo, strict=True))
    for size, offset in zip(all_sizes, wire_shape(offsets), strict=True):
        start = start * size + offset
    return start, start + prod(sizes)


def _collective(held: Boxes, wanted: Boxes) -> Collective | None:
    """Returns the collective that an exchange is among all ranks, if it is one."""
    if _are_equal_runs(held, wanted):
        return "all-gather"
    if _are_equal_runs(wanted, held):
        return "reduce-scatter"
    return None


def _are_equal_runs(parts: Boxes, wholes: Boxes) -> bool:
    """Returns whether parts are equal runs of one whole, in the order of the ranks."""
    whole = wholes[0]
    if any(box != whole for box in wholes) or not all(box.numel for box in parts):
        return False
    runs = [contiguous_span(box, whole) for box in parts]
    ends = [0, *(run[1] for run in runs if run is not None)]
    return runs == [*pairwise(ends)] and len({box.numel for box in parts}) == 1


def disjoint(boxes: Sequence[Box]) -> bool:
    """Returns whether no two boxes overlap."""
    return not any(a.intersect(b).numel for i, a in enumerate(boxes) for b in boxes[:i])
