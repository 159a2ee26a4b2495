"""Load balancing: shares of an operator with which all devices finish together."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import reduce
from heapq import heapify, heapreplace
from itertools import pairwise
from operator import or_

import numpy as np

from hetconv.schemas.device_model import Curve

MIN_SHARE = 1e-9
# Sums of curves that never fall may fall by this much, through rounding.
RELATIVE_TOLERANCE = 1e-9
# Shares from 0 to 1, and seconds that never fall at each; at 0 those of the least share.
Knots = tuple[list[float], list[float]]


def added(curves: Iterable[tuple[Curve, float]]) -> Curve:
    """Sums the curves of several operators that get the same share.

    Args:
        curves: Seconds by share, and a factor for each.
    """
    known = list(curves)
    inner = {share for curve, _ in known for share in curve.shares}
    shares = tuple(sorted(inner | {MIN_SHARE, 1.0}))
    seconds = (sum(factor * curve.at(x) for curve, factor in known) for x in shares)
    return Curve(shares, tuple(seconds))


def balance(curves: Sequence[Curve]) -> tuple[float, ...]:
    """Finds shares that add up to 1 and with which all devices finish together.

    Bisects on the common time. Each device takes the largest share that it finishes by
    then, so a device that cannot even start by then gets none. Where a larger share
    takes fewer seconds, the smaller one counts as long.

    Source: Lastovetsky & Reddy, Data Partitioning with a Functional Performance Model
    of Heterogeneous Processors, 2007.

    Args:
        curves: Seconds by share, of each device.
    """
    knots = [_knots(curve) for curve in curves]
    low, high = 0.0, min(curve.at(1.0) for curve in curves)
    for _ in range(60):
        middle = (low + high) / 2
        if sum(_largest_share(k, middle) for k in knots) >= 1:
            high = middle
        else:
            low = middle
    shares = [_largest_share(k, high) for k in knots]
    return tuple(share / sum(shares) for share in shares)


def _knots(curve: Curve) -> Knots:
    inner = [*curve.shares]
    if len(inner) > 1 and curve.seconds[1] > curve.seconds[0]:
        # Extend the first segment to the left, to where it takes 0 seconds.
        steepness = (inner[1] - inner[0]) / (curve.seconds[1] - curve.seconds[0])
        inner = [inner[0] - curve.seconds[0] * steepness, *inner]
    shares = [MIN_SHARE, *(x for x in inner if MIN_SHARE < x < 1), 1.0]
    seconds = np.maximum.accumulate([curve.at(x) for x in shares])
    return [0.0, *shares[1:]], seconds.tolist()


def _largest_share(knots: Knots, limit_s: float) -> float:
    shares, seconds = knots
    i = bisect_right(seconds, limit_s)
    if i in (0, len(shares)):
        return float(i > 0)
    part = (limit_s - seconds[i - 1]) / (seconds[i] - seconds[i - 1])
    return shares[i - 1] + part * (shares[i] - shares[i - 1])


def balanced_sizes(
    curves: Sequence[Curve], extent: int, granularity: int = 1
) -> tuple[int, ...]:
    """Splits an extent so that the slowest device finishes as early as possible.

    The result is exact, for staircases too. What multiples leave over goes to the last
    device that works, as in `layout.apportion`.

    Args:
        curves: Seconds by share, of each device.
        extent: Elements to split.
        granularity: Sizes are whole multiples of this.

    Returns:
        Elements of each device.
    """
    blocks = extent // granularity
    if not blocks:
        fastest = min(range(len(curves)), key=lambda d: (curves[d].at(1.0), d))
        return tuple(extent * (d == fastest) for d in range(len(curves)))
    rising = all(
        before <= after * (1 + RELATIVE_TOLERANCE)
        for curve in curves
        for before, after in pairwise(curve.seconds)
    )
    split = _blocks_one_by_one if rising else _blocks_by_bisection
    sizes = [n * granularity for n in split(curves, blocks, granularity / extent)]
    sizes[max(d for d, n in enumerate(sizes) if n)] += extent - sum(sizes)
    return tuple(sizes)


def _blocks_one_by_one(
    curves: Sequence[Curve], blocks: int, block_share: float
) -> list[int]:
    """Gives each block to the device that would finish it first.

    This is exact where more blocks never take fewer seconds.
    """
    # No device gets less than nine tenths of its balanced share.
    sizes = [int(0.9 * share * blocks) for share in balance(curves)]
    queue = [
        (curve.at((n + 1) * block_share), d)
        for d, (curve, n) in enumerate(zip(curves, sizes, strict=True))
    ]
    heapify(queue)
    for _ in range(blocks - sum(sizes)):
        _, d = queue[0]
        sizes[d] += 1
        heapreplace(queue, (curves[d].at((sizes[d] + 1) * block_share), d))
    return sizes


def _blocks_by_bisection(
    curves: Sequence[Curve], blocks: int, block_share: float
) -> list[int]:
    """Bisects on the slowest device's seconds, within which sizes must add up."""
    seconds = [
        [curve.at(n * block_share) for n in range(blocks + 1)] for curve in curves
    ]
    mask = (2 << blocks) - 1

    def reachable(limit: float) -> list[int]:
        """Sums that the devices so far can reach within the limit, as sets of bits."""
        sums = [1]
        for of_device in seconds:
            shifted = (sums[-1] << n for n, s in enumerate(of_device) if s <= limit)
            sums.append(reduce(or_, shifted) & mask)
        return sums

    limits = sorted({s for of_device in seconds for s in of_device})
    first = bisect_left(
        limits, True, key=lambda s: bool(reachable(s)[-1] >> blocks & 1)
    )
    limit = limits[first]
    before, left, sizes = reachable(limit)[:-1], blocks, list[int]()
    for of_device, sums in zip(reversed(seconds), reversed(before), strict=True):
        possible = [
            n
            for n in range(left + 1)
            if of_device[n] <= limit and sums >> (left - n) & 1
        ]
        sizes.append(min(possible, key=lambda n: of_device[n]))
        left -= sizes[-1]
    return sizes[::-1]
