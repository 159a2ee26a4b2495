"""Tables of what data movement costs, from each of many layouts to each of many reads: `layout` on arrays. Pure.

The planner compares thousands of redistributions of a value; here one costs microseconds. Tests hold each entry equal
to what `Move` and `traffic` say of its pair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from .errors import LayoutError
from .layout import Boxes, Layout, Need, exchanges
from .network import Array, Network

# Numbers of an intermediate result: 120 KB stay in a core's cache. Above 128 KB malloc may hand pages back to the
# system and take fresh ones at every step, which takes longer than filling them.
BLOCK = 15_000

Ints = npt.NDArray[np.intp]
Measure = Callable[[Array], Array]  # of the bytes that ranks send each other in a round, (n, P, P) -> (n,)


def movement(
    sources: Sequence[Layout], reads: Sequence[Layout | Need], itemsize: int, network: Network, adjoint: bool
) -> Array:
    """(sources, reads): seconds of moving a value from each layout to each read, round after round.

    ``adjoint``: of moving its gradient back. ``itemsize``: bytes per element. Raises `LayoutError` for layouts and
    reads that are not of one shape and of as many ranks as the network.
    """
    if others := {x.world for x in (*sources, *reads)} - {network.world}:
        raise LayoutError(
            f"layouts for {sorted(others)} ranks were given for a network of {network.world}; give those for its ranks"
        )
    return _table(sources, reads, itemsize, adjoint, network.seconds)


def sent_bytes(sources: Sequence[Layout], reads: Sequence[Layout | Need], itemsize: int, adjoint: bool) -> Array:
    """(sources, reads): bytes that all ranks send together for what `movement` has the seconds of. Raises alike."""
    return _table(sources, reads, itemsize, adjoint, lambda sent: sent.sum((-2, -1)))


def _table(
    sources: Sequence[Layout], reads: Sequence[Layout | Need], itemsize: int, adjoint: bool, measure: Measure
) -> Array:
    both = (*sources, *reads)
    if len({(x.shape, x.world) for x in both}) > 1:
        shapes, worlds = sorted({x.shape for x in both}), sorted({x.world for x in both})
        raise LayoutError(
            f"layouts and reads of shapes {shapes} for {worlds} ranks were given; give those of one value"
        )
    moves = _moves(sources, reads, adjoint)
    table = np.zeros(moves.shape)
    if not moves.any():
        return table
    index: dict[Boxes, int] = {}
    numbers = np.array([index.setdefault(x.boxes, len(index)) for x in both])
    row, column = np.nonzero(moves)
    held, wanted = numbers[: len(sources)][row], numbers[len(sources) :][column]
    if adjoint:
        held, wanted = wanted, held
    pairs, at = np.unique(held * len(index) + wanted, return_inverse=True)
    table[moves] = _exchanged(tuple(index), *np.divmod(pairs, len(index)), itemsize, measure)[at]
    return table


def _moves(sources: Sequence[Layout], reads: Sequence[Layout | Need], adjoint: bool) -> npt.NDArray[np.bool_]:
    """(sources, reads): where `Move` has rounds. What counts once stays, and what becomes partial is embedded."""
    kinds = [read.kind if isinstance(read, Layout) else "need" for read in reads]
    asked = np.array([kind != "partial" and not (adjoint and kind == "replicated") for kind in kinds], dtype=bool)
    given = np.array([adjoint or source.kind != "replicated" for source in sources], dtype=bool)
    both: npt.NDArray[np.bool_] = given[:, None] & asked
    return both


def _exchanged(boxes: Sequence[Boxes], held: Ints, wanted: Ints, itemsize: int, measure: Measure) -> Array:
    """(n,): of the `exchanges` between ``boxes[held]`` and ``boxes[wanted]``; no two of ``boxes`` are the same."""
    result = _in_one_round(boxes, held, wanted, itemsize, measure)
    for k in np.flatnonzero(held == wanted):  # only a sum of wholes into wholes takes more rounds
        rounds = exchanges(boxes[held[k]], boxes[held[k]])
        if len(rounds) > 1:
            ends = np.arange(2 * len(rounds)).reshape(-1, 2)
            result[k] = _in_one_round(tuple(chain(*rounds)), ends[:, 0], ends[:, 1], itemsize, measure).sum()
    return result


def _in_one_round(boxes: Sequence[Boxes], held: Ints, wanted: Ints, itemsize: int, measure: Measure) -> Array:
    """(n,): block by block, each of pairs whose ranks differ in the same dimensions."""
    lo, hi = _corners(boxes)
    cut = ((lo != lo[..., :1]) | (hi != hi[..., :1])).any(-1)  # (dimensions, boxes): whether ranks differ
    rank, _, world = lo.shape
    code = (1 << np.arange(rank)) @ cut
    groups = code[held] << rank | code[wanted]
    to_others, step = itemsize * (1 - np.eye(world)), max(BLOCK // world**2, 1)
    result = np.empty(len(held))
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        for block in np.split(members, range(step, len(members), step)):
            result[block] = measure(_common(lo, hi, cut, held[block], wanted[block]) * to_others)
    return result


def _corners(boxes: Sequence[Boxes]) -> Array:
    """(2, dimensions, boxes, ranks): lo and hi."""
    corners = np.array([[(b.lo, b.hi) for b in one] for one in boxes], dtype=np.float64)
    return corners.transpose(2, 3, 0, 1)


def _common(lo: Array, hi: Array, cut: npt.NDArray[np.bool_], held: Ints, wanted: Ints) -> Array:
    """(n, P, P): elements common to each rank's held box and each rank's wanted one; of extent 1 where ranks agree.

    All pairs must be cut alike: what is not cut on a side is then computed for one rank.
    """
    common = np.ones((len(held), 1, 1))
    for d in range(len(lo)):
        own, other = (slice(None if cut[d, side[0]] else 1) for side in (held, wanted))
        start = np.maximum(lo[d][held, own, None], lo[d][wanted, None, other])
        end = np.minimum(hi[d][held, own, None], hi[d][wanted, None, other])
        common = common * np.maximum(end - start, 0)
    return common
