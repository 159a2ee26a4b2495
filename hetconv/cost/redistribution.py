"""Cost of redistribution for many pairs of layouts at once.

The planner compares thousands of redistributions of a value. On arrays, one takes
microseconds. Tests hold each entry equal to what `Move` and `bytes_per_pair` give for
its pair of layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hetconv.errors import LayoutError
from hetconv.sharding.layout import Boxes, Layout, ReadRegion
from hetconv.sharding.moves import exchanges

from .network import Array, Network, elements_to_add

# Intermediate results of 120 KB stay in a core's cache. Above 128 KB malloc may return
# pages to the system and take new ones at every step, which takes longer than filling
# them.
MAX_BLOCK_ELEMENTS = 15_000
# One integer codes an exchange: held boxes, wanted boxes, whether what arrives stays
# separate, and the bytes of an element, which are fewer than this flag.
SEPARATE_FLAG = 1 << 7
MAX_BOXES = 1 << 24

Ints = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]
# Measures n rounds by the bytes that ranks send each other, (n, P, P), that each adds,
# (n, P), and that each has in the end, (n, P). The result has shape (n, ...).
Measure = Callable[[Array, Array, Array], Array]


class MovedValue(NamedTuple):
    """Value that is moved from each of several layouts to each of several reads.

    Attributes:
        sources: Layouts of the value.
        reads: What is read of it.
        itemsize: Bytes of an element.
        adjoint: Whether its gradient is moved back.
        separate: Mask of shape (sources, reads): where what arrives is not joined to a
            rank's own part; see `Network.messages`.
    """

    sources: Sequence[Layout]
    reads: Sequence[Layout | ReadRegion]
    itemsize: int
    adjoint: bool
    separate: Mask | None = None


def movement_tables(values: Sequence[MovedValue], network: Network) -> list[Array]:
    """Computes the seconds of moving values, round after round.

    What the values have in common is computed once.

    Args:
        values: Values to move.
        network: Links between the devices.

    Returns:
        Seconds of shape (sources, reads), for each value.

    Raises:
        LayoutError: If layouts and reads of a value differ in shape, or are for another
            number of ranks than the network has.
    """
    for moved in values:
        worlds = {x.world for x in (*moved.sources, *moved.reads)} - {network.world}
        if worlds:
            raise LayoutError(
                f"layouts for {sorted(worlds)} ranks were given for a network of "
                f"{network.world}; give those for its ranks"
            )
    return _tables(values, network.seconds)


def received_bytes(moved: MovedValue) -> Array:
    """Computes the bytes that arrive at each rank when a value is moved.

    Args:
        moved: Value to move.

    Returns:
        Bytes of shape (sources, reads, P).

    Raises:
        LayoutError: If layouts and reads differ in shape or number of ranks.
    """
    world = moved.sources[0].world
    return _tables([moved], lambda sent, *_: sent.sum(-2), (world,))[0]


def _tables(
    values: Sequence[MovedValue], measure: Measure, shape: tuple[int, ...] = ()
) -> list[Array]:
    """(sources, reads, *shape) of each value, where ``measure`` gives (n, *shape)."""
    numbers = _BoxNumbers()
    coded = [_codes(moved, numbers) for moved in values]
    if not coded:
        return []
    flat = np.concatenate([codes.ravel() for codes in coded])
    unique, index = np.unique(flat, return_inverse=True)
    moves = unique >= 0
    pairs, flags = np.divmod(unique[moves], 1 << 8)
    held, wanted = np.divmod(pairs, MAX_BOXES)
    measured = np.zeros((len(unique), *shape))
    exchanged = _Exchanges(numbers.boxes, measure, shape)
    measured[moves] = exchanged.all_rounds(held, wanted, flags)
    ends = np.cumsum([codes.size for codes in coded])[:-1]
    tables = np.split(measured[index], ends)
    return [
        table.reshape(*codes.shape, *shape)
        for table, codes in zip(tables, coded, strict=True)
    ]


class _BoxNumbers:
    """Numbers of boxes, one for all equal ones.

    They are looked up by identity first, for they take long to compare.
    """

    def __init__(self) -> None:
        self.boxes: list[Boxes] = []
        self._by_value: dict[Boxes, int] = {}
        self._by_id: dict[int, int] = {}

    def of(self, values: Sequence[Layout | ReadRegion]) -> Ints:
        return np.array([self._number(x.boxes) for x in values], dtype=np.intp)

    def _number(self, boxes: Boxes) -> int:
        number = self._by_id.get(id(boxes))
        if number is None:
            number = self._by_value.setdefault(boxes, len(self.boxes))
            self._by_id[id(boxes)] = number
            if number == len(self.boxes):
                self.boxes.append(boxes)
        return number


def _codes(moved: MovedValue, numbers: _BoxNumbers) -> Ints:
    """(sources, reads): what is exchanged in one integer, or -1 if nothing is."""
    both = (*moved.sources, *moved.reads)
    if len({(x.shape, x.world) for x in both}) > 1:
        raise LayoutError(
            f"layouts and reads of shapes {sorted({x.shape for x in both})} for "
            f"{sorted({x.world for x in both})} ranks were given; give those of one value"
        )
    held, wanted = numbers.of(moved.sources)[:, None], numbers.of(moved.reads)[None]
    if moved.adjoint:
        held, wanted = wanted, held
    flags: int | Ints = moved.itemsize
    if moved.separate is not None:
        flags = moved.itemsize | SEPARATE_FLAG * moved.separate
    codes: Ints = np.where(
        _exchange_mask(moved), (held * MAX_BOXES + wanted) << 8 | flags, -1
    )
    return codes


def _exchange_mask(moved: MovedValue) -> Mask:
    """(sources, reads): where `Move` has rounds of messages.

    A replicated source has none forward, nor has what is read as partial.
    """

    def receives(read: Layout | ReadRegion) -> bool:
        if not isinstance(read, Layout):
            return True
        return read.kind != "partial" and not (
            moved.adjoint and read.kind == "replicated"
        )

    sends = [moved.adjoint or source.kind != "replicated" for source in moved.sources]
    mask: Mask = np.logical_and.outer(sends, [receives(read) for read in moved.reads])
    return mask


class _Exchanges:
    """Measures exchanges between pairs of boxes, no two of which are the same."""

    def __init__(
        self, boxes: Sequence[Boxes], measure: Measure, shape: tuple[int, ...]
    ):
        self.boxes, self.measure, self.shape = boxes, measure, shape

    def all_rounds(self, held: Ints, wanted: Ints, flags: Ints) -> Array:
        """(n, *shape): sums of the rounds of `exchanges` of each pair."""
        result = self._one_round(held, wanted, flags)
        # Only a sum of whole tensors into whole tensors takes several rounds.
        for k in np.flatnonzero(held == wanted):
            rounds = exchanges(self.boxes[held[k]], self.boxes[held[k]])
            if len(rounds) > 1:
                by_round = _Exchanges(tuple(chain(*rounds)), self.measure, self.shape)
                first = np.arange(0, 2 * len(rounds), 2)
                same_flags = flags[[k] * len(rounds)]
                result[k] = by_round._one_round(first, first + 1, same_flags).sum(0)
        return result

    def _one_round(self, held: Ints, wanted: Ints, flags: Ints) -> Array:
        """(n, *shape): one round of each pair, block by block."""
        result = np.zeros((len(held), *self.shape))
        if not len(held):
            return result
        lo, hi = _corners(self.boxes)
        differs = ((lo != lo[..., :1]) | (hi != hi[..., :1])).any(-1)
        numel = (hi - lo).prod(0)
        world = lo.shape[-1]
        to_others = 1.0 - np.eye(world)
        for block in _blocks(differs, held, wanted, world):
            own, other = held[block], wanted[block]
            common = np.broadcast_to(
                _common_elements(lo, hi, differs, own, other),
                (len(block), world, world),
            )
            separate, itemsize = np.divmod(flags[block, None], SEPARATE_FLAG)
            sent = common * to_others * itemsize[..., None]
            whole = numel[other] * itemsize
            added = elements_to_add(common, numel[other]) * itemsize
            received = np.where(separate, sent.sum(-2), whole)
            result[block] = self.measure(sent, added, received)
        return result


def _blocks(differs: Mask, held: Ints, wanted: Ints, world: int) -> Iterator[Ints]:
    """Splits pairs into blocks whose ranks differ in the same dimensions.

    Args:
        differs: Whether the ranks' boxes differ, (dimensions, boxes).
        held: Held boxes of each pair.
        wanted: Wanted boxes of each pair.
        world: Number of ranks.
    """
    rank = len(differs)
    bits = (1 << np.arange(rank)) @ differs
    groups = bits[held] << rank | bits[wanted]
    order = np.argsort(groups, kind="stable")
    block = max(MAX_BLOCK_ELEMENTS // world**2, 1)
    for members in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1):
        yield from np.split(members, range(block, len(members), block))


def _corners(boxes: Sequence[Boxes]) -> Array:
    """(2, dimensions, boxes, ranks): lo and hi of each box.

    Boxes of fewer dimensions than others get further ones, from 0 to 1.
    """
    rank = max(len(of_ranks[0].lo) for of_ranks in boxes)
    flat: list[int] = []
    for box in chain.from_iterable(boxes):
        missing = rank - len(box.lo)
        flat += (*box.lo, *(0,) * missing, *box.hi, *(1,) * missing)
    corners = np.array(flat, dtype=np.float64)
    by_box = corners.reshape(len(boxes), len(boxes[0]), 2, rank)
    return np.ascontiguousarray(by_box.transpose(2, 3, 0, 1))


def _common_elements(
    lo: Array, hi: Array, differs: Mask, held: Ints, wanted: Ints
) -> Array:
    """(n, P, P): elements common to each rank's held box and each rank's wanted box.

    A dimension of ranks has extent 1 where they do not differ. All pairs must differ in
    the same dimensions, so that this is computed for one rank only.
    """
    common = np.ones((len(held), 1, 1))
    for d in range(len(lo)):
        own = slice(None if differs[d, held[0]] else 1)
        other = slice(None if differs[d, wanted[0]] else 1)
        start = np.maximum(lo[d][held, own, None], lo[d][wanted, None, other])
        end = np.minimum(hi[d][held, own, None], hi[d][wanted, None, other])
        common = common * np.maximum(end - start, 0)
    return common
