"""Shares of an operator that make all devices finish together. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import reduce
from heapq import heapify, heapreplace
from itertools import pairwise
from operator import or_

import numpy as np

from hetconv.schemas.cluster_profile import Curve

ROUNDED = 1e-9  # by which sums of curves that rise may fall
Knots = tuple[
    list[float], list[float]
]  # shares from 0 to 1 and seconds there; at 0 those of the smallest share


def added(curves: Iterable[tuple[Curve, float]]) -> Curve:
    """Seconds of several operators that get the same share: each curve as many times as
    it is given.
    """
    known = list(curves)
    shares = sorted({x for curve, _ in known for x in curve.shares} | {1e-9, 1.0})
    return Curve(
        tuple(shares), tuple(sum(n * curve.at(x) for curve, n in known) for x in shares)
    )


def balance(curves: Sequence[Curve]) -> tuple[float, ...]:
    """Shares that add up to 1 and make all devices finish together; where seconds fall,
    a smaller share takes as long.

    Bisects on the common time: each device takes the largest share that it finishes by
    then, so one that cannot even start by then gets none (Lastovetsky & Reddy, 2007).
    """
    knots = [_knots(curve) for curve in curves]
    lo, hi = 0.0, min(curve.at(1.0) for curve in curves)
    for _ in range(60):
        mid = (lo + hi) / 2
        lo, hi = (lo, mid) if sum(_largest(k, mid) for k in knots) >= 1 else (mid, hi)
    shares = [_largest(k, hi) for k in knots]
    return tuple(s / sum(shares) for s in shares)


def _knots(curve: Curve) -> Knots:
    inner = [*curve.shares]
    if (
        len(inner) > 1 and curve.seconds[1] > curve.seconds[0]
    ):  # where the first piece, drawn on to the left, meets 0
        steepness = (inner[1] - inner[0]) / (curve.seconds[1] - curve.seconds[0])
        inner = [inner[0] - curve.seconds[0] * steepness, *inner]
    shares = [1e-9, *(x for x in inner if 1e-9 < x < 1), 1.0]
    return [0.0, *shares[1:]], np.maximum.accumulate(
        [curve.at(x) for x in shares]
    ).tolist()


def _largest(knots: Knots, limit: float) -> float:
    """The largest share that is done within ``limit``."""
    shares, seconds = knots
    i = bisect_right(seconds, limit)
    if i in (0, len(shares)):
        return float(i > 0)
    rising = seconds[i] - seconds[i - 1]
    return shares[i - 1] + (limit - seconds[i - 1]) / rising * (
        shares[i] - shares[i - 1]
    )


def balanced_sizes(
    curves: Sequence[Curve], extent: int, granularity: int = 1
) -> tuple[int, ...]:
    """``extent`` cut into whole multiples of ``granularity`` so that the slowest device
    is done as early as possible.

    Exact, for staircases too. What multiples leave over goes to the last device that
    works, as `layout.apportion` does.
    """
    blocks = extent // granularity
    if not blocks:
        first = min(range(len(curves)), key=lambda d: (curves[d].at(1.0), d))
        return tuple(extent * (d == first) for d in range(len(curves)))
    rising = all(
        a <= b * (1 + ROUNDED) for curve in curves for a, b in pairwise(curve.seconds)
    )
    sizes = [
        n * granularity
        for n in (_one_by_one if rising else _of_all)(
            curves, blocks, granularity / extent
        )
    ]
    sizes[max(d for d, n in enumerate(sizes) if n)] += extent - sum(sizes)
    return tuple(sizes)


def _one_by_one(curves: Sequence[Curve], blocks: int, unit: float) -> list[int]:
    """Blocks of ``unit`` shares, where more never take less: the next one goes to who
    would be done with it first.
    """
    sizes = [
        int(0.9 * s * blocks) for s in balance(curves)
    ]  # no device gets less than this
    queue = [
        (curve.at((n + 1) * unit), d)
        for d, (curve, n) in enumerate(zip(curves, sizes, strict=True))
    ]
    heapify(queue)
    for _ in range(blocks - sum(sizes)):
        _, d = queue[0]
        sizes[d] += 1
        heapreplace(queue, (curves[d].at((sizes[d] + 1) * unit), d))
    return sizes


def _of_all(curves: Sequence[Curve], blocks: int, unit: float) -> list[int]:
    """Blocks of ``unit`` shares, in any way: bisects on the slowest device's time,
    within which sizes must add up.
    """
    seconds = [[curve.at(n * unit) for n in range(blocks + 1)] for curve in curves]

    def sums(limit: float) -> list[int]:
        """After each device, as bits: what they can have done together within ``limit``."""
        found = [1]
        for own in seconds:
            able = (found[-1] << n for n, s in enumerate(own) if s <= limit)
            found.append(reduce(or_, able) & ((2 << blocks) - 1))
        return found

    limits = sorted({s for own in seconds for s in own})
    limit = limits[
        bisect_left(limits, True, key=lambda s: bool(sums(s)[-1] >> blocks & 1))
    ]
    before, left, sizes = sums(limit)[:-1], blocks, list[int]()
    for own, others in zip(reversed(seconds), reversed(before), strict=True):
        able = [
            n for n in range(left + 1) if own[n] <= limit and others >> (left - n) & 1
        ]
        sizes.append(min(able, key=lambda n: own[n]))
        left -= sizes[-1]
    return sizes[::-1]
