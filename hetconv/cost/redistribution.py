"""Tables of what data movement costs, from each of many layouts to each of many reads:
`layout` on arrays. Pure.

The planner compares thousands of redistributions of a value; here one costs
microseconds. Tests hold each entry equal to what `Move` and `bytes_per_pair` say of its pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hetconv.errors import LayoutError
from hetconv.sharding.layout import Boxes, Layout, ReadRegion
from hetconv.sharding.moves import exchanges

from .network import Array, Network, elements_to_add

# Numbers of an intermediate result: 120 KB stay in a core's cache. Above 128 KB malloc
# may hand pages back to the system and take fresh ones at every step, which takes
# longer than filling them.
BLOCK = 15_000
APART = 1 << 7  # beside the bytes of an element, of which no dtype has so many
MAX_BOXES = 1 << 24  # whose pairs, with the bytes of an element, are counted in 64 bits

Ints = npt.NDArray[np.intp]
# Of the bytes that ranks send each other in a round, that each adds, and that each has
# in the end, if they are joined:
Measure = Callable[
    [Array, Array, Array], Array
]  # (n, P, P), (n, P), (n, P) -> (n, ...)


class MovedValue(NamedTuple):
    """A value that is moved from each of these layouts to each of these reads,
    ``itemsize`` bytes per element.

    ``adjoint``: its gradient is moved back. ``apart``: (sources, reads), of which what
    arrives stays as it is, see `Network.messages`.
    """

    sources: Sequence[Layout]
    reads: Sequence[Layout | ReadRegion]
    itemsize: int
    adjoint: bool
    apart: npt.NDArray[np.bool_] | None = None


def movement_tables(values: Sequence[MovedValue], network: Network) -> list[Array]:
    """(sources, reads) of each value: seconds of moving it, round after round. What
    values share is computed once.

    Raises `LayoutError` for layouts and reads that are not of one shape and of as many
    ranks as the network.
    """
    for one in values:
        if others := {x.world for x in (*one.sources, *one.reads)} - {network.world}:
            raise LayoutError(
                f"layouts for {sorted(others)} ranks were given for a network of {network.world}; "
                f"give those for its ranks"
            )
    return _tables(values, network.seconds)


def movement_table(
    sources: Sequence[Layout],
    reads: Sequence[Layout | ReadRegion],
    itemsize: int,
    network: Network,
    adjoint: bool,
) -> Array:
    """`movement_tables` of one value."""
    return movement_tables([MovedValue(sources, reads, itemsize, adjoint)], network)[0]


def sent_bytes(
    sources: Sequence[Layout],
    reads: Sequence[Layout | ReadRegion],
    itemsize: int,
    adjoint: bool,
) -> Array:
    """(sources, reads): bytes that all ranks send together for what `movement_table` has the
    seconds of. Raises alike.
    """
    return _tables(
        [MovedValue(sources, reads, itemsize, adjoint)],
        lambda sent, *_: sent.sum((-2, -1)),
    )[0]


def received_bytes(one: MovedValue) -> Array:
    """(sources, reads, P): bytes that arrive at each rank for what `movement_table` has the
    seconds of. Raises alike.
    """
    return _tables([one], lambda sent, *_: sent.sum(-2), (one.sources[0].world,))[0]


def _tables(
    values: Sequence[MovedValue], measure: Measure, each: tuple[int, ...] = ()
) -> list[Array]:
    """(sources, reads, *each) of each value, where ``measure`` gives so many numbers of a round."""
    boxes = _Numbered()
    coded = [_coded(one, boxes) for one in values]
    if not coded:
        return []
    codes, at = np.unique(
        np.concatenate([code.ravel() for code in coded]), return_inverse=True
    )
    moving = codes[codes >= 0]
    ends, sorts = np.divmod(moving, 1 << 8)
    took = np.zeros((len(codes), *each))
    took[codes >= 0] = _exchanged(
        boxes.given, *np.divmod(ends, MAX_BOXES), sorts, measure, each
    )
    parts = np.split(took[at], np.cumsum([code.size for code in coded])[:-1])
    return [
        part.reshape(*code.shape, *each)
        for part, code in zip(parts, coded, strict=True)
    ]


class _Numbered:
    """Boxes by number: equal ones have the same. They are looked up by identity, for
    they are long to compare.
    """

    def __init__(self) -> None:
        self.given: list[Boxes] = []
        self._equal: dict[Boxes, int] = {}
        self._same: dict[int, int] = {}

    def of(self, values: Iterable[Layout | ReadRegion]) -> Ints:
        return np.array([self._number(x.boxes) for x in values], dtype=np.intp)

    def _number(self, boxes: Boxes) -> int:
        found = self._same.get(id(boxes))
        if found is None:
            found = self._same[id(boxes)] = self._equal.setdefault(
                boxes, len(self.given)
            )
            if found == len(self.given):
                self.given.append(boxes)
        return found


def _coded(one: MovedValue, boxes: _Numbered) -> Ints:
    """(sources, reads): which boxes are exchanged, whether `APART`, and the bytes of an
    element, in one number.

    -1 for nothing.
    """
    both = (*one.sources, *one.reads)
    if len({(x.shape, x.world) for x in both}) > 1:
        shapes, worlds = (
            sorted({x.shape for x in both}),
            sorted({x.world for x in both}),
        )
        raise LayoutError(
            f"layouts and reads of shapes {shapes} for {worlds} ranks were given; give those "
            "of one value"
        )
    held, wanted = boxes.of(one.sources)[:, None], boxes.of(one.reads)[None]
    if one.adjoint:
        held, wanted = wanted, held
    sort = one.itemsize if one.apart is None else one.itemsize | APART * one.apart
    codes: Ints = np.where(_moves(one), (held * MAX_BOXES + wanted) << 8 | sort, -1)
    return codes


def _moves(one: MovedValue) -> npt.NDArray[np.bool_]:
    """(sources, reads): where `Move` has rounds. What counts once stays, and what
    becomes partial is embedded.
    """
    kinds = [read.kind if isinstance(read, Layout) else "need" for read in one.reads]
    asked = np.array(
        [
            kind != "partial" and not (one.adjoint and kind == "replicated")
            for kind in kinds
        ],
        dtype=bool,
    )
    given = np.array(
        [one.adjoint or source.kind != "replicated" for source in one.sources],
        dtype=bool,
    )
    both: npt.NDArray[np.bool_] = given[:, None] & asked
    return both


def _exchanged(
    boxes: Sequence[Boxes],
    held: Ints,
    wanted: Ints,
    sorts: Ints,
    measure: Measure,
    each: tuple[int, ...],
) -> Array:
    """(n, *each): of `exchanges` between ``boxes[held]`` and ``boxes[wanted]``; no two
    of ``boxes`` are the same.
    """
    result = _in_one_round(boxes, held, wanted, sorts, measure, each)
    for k in np.flatnonzero(
        held == wanted
    ):  # only a sum of wholes into wholes takes more rounds
        rounds = exchanges(boxes[held[k]], boxes[held[k]])
        if len(rounds) > 1:
            ends = np.arange(2 * len(rounds)).reshape(-1, 2)
            alike = sorts[[k] * len(rounds)]
            by_round = _in_one_round(
                tuple(chain(*rounds)), ends[:, 0], ends[:, 1], alike, measure, each
            )
            result[k] = by_round.sum(0)
    return result


def _in_one_round(
    boxes: Sequence[Boxes],
    held: Ints,
    wanted: Ints,
    sorts: Ints,
    measure: Measure,
    each: tuple[int, ...],
) -> Array:
    """(n, *each): block by block, each of pairs whose ranks differ in the same dimensions."""
    result = np.zeros((len(held), *each))
    if not len(held):
        return result
    lo, hi = _corners(boxes)
    cut = ((lo != lo[..., :1]) | (hi != hi[..., :1])).any(
        -1
    )  # (dimensions, boxes): whether ranks differ
    rank, _, world = lo.shape
    code = (1 << np.arange(rank)) @ cut
    groups = code[held] << rank | code[wanted]
    numel = (hi - lo).prod(0)
    to_others, step = 1.0 - np.eye(world), max(BLOCK // world**2, 1)
    order = np.argsort(groups, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1):
        for block in np.split(members, range(step, len(members), step)):
            common = np.broadcast_to(
                _common(lo, hi, cut, held[block], wanted[block]),
                (len(block), world, world),
            )
            apart, itemsize = np.divmod(sorts[block, None], APART)
            sent, whole = (
                common * to_others * itemsize[..., None],
                numel[wanted[block]] * itemsize,
            )
            sums = elements_to_add(common, numel[wanted[block]]) * itemsize
            result[block] = measure(sent, sums, np.where(apart, sent.sum(-2), whole))
    return result


def _corners(boxes: Sequence[Boxes]) -> Array:
    """(2, dimensions, boxes, ranks): lo and hi; with fewer dimensions than others have,
    further ones from 0 to 1.
    """
    rank = max(len(one[0].lo) for one in boxes)
    zeros, ones = ([(n,) * (rank - r) for r in range(rank + 1)] for n in (0, 1))
    ends = (
        (b.lo, zeros[len(b.lo)], b.hi, ones[len(b.lo)]) for one in boxes for b in one
    )
    flat = np.fromiter(chain.from_iterable(chain.from_iterable(ends)), dtype=np.float64)
    corners: Array = np.ascontiguousarray(
        flat.reshape(len(boxes), len(boxes[0]), 2, rank).transpose(2, 3, 0, 1)
    )
    return corners


def _common(
    lo: Array, hi: Array, cut: npt.NDArray[np.bool_], held: Ints, wanted: Ints
) -> Array:
    """(n, P, P): elements common to each rank's held box and each rank's wanted one; of
    extent 1 where ranks agree.

    All pairs must be cut alike: what is not cut on a side is then computed for one rank.
    """
    common = np.ones((len(held), 1, 1))
    for d in range(len(lo)):
        own, other = (slice(None if cut[d, side[0]] else 1) for side in (held, wanted))
        start = np.maximum(lo[d][held, own, None], lo[d][wanted, None, other])
        end = np.minimum(hi[d][held, own, None], hi[d][wanted, None, other])
        common = common * np.maximum(end - start, 0)
    return common
