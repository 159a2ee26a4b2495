"""Shares of an operator that make all devices finish together. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from heapq import heapify, heapreplace

import numpy as np

from .profile import Curve

Knots = tuple[list[float], list[float]]  # shares from 0 to 1 and seconds there; at 0 those of the smallest share


def added(curves: Iterable[tuple[Curve, float]]) -> Curve:
    """Seconds of several operators that get the same share: each curve as many times as it is given."""
    known = list(curves)
    shares = sorted({x for curve, _ in known for x in curve.shares} | {1e-9, 1.0})
    return Curve(tuple(shares), tuple(sum(n * curve.at(x) for curve, n in known) for x in shares))


def balance(curves: Sequence[Curve]) -> tuple[float, ...]:
    """Shares that add up to 1 and make all devices finish together; per device, non-decreasing seconds of a share.

    Bisects on the common time: each device takes the largest share that it finishes by then, so one that cannot even
    start by then gets none (Lastovetsky & Reddy, 2007).
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
    if len(inner) > 1 and curve.seconds[1] > curve.seconds[0]:  # where the first piece, drawn on to the left, meets 0
        steepness = (inner[1] - inner[0]) / (curve.seconds[1] - curve.seconds[0])
        inner = [inner[0] - curve.seconds[0] * steepness, *inner]
    shares = [1e-9, *(x for x in inner if 1e-9 < x < 1), 1.0]
    return [0.0, *shares[1:]], np.maximum.accumulate([curve.at(x) for x in shares]).tolist()


def _largest(knots: Knots, limit: float) -> float:
    """The largest share that is done within ``limit``."""
    shares, seconds = knots
    i = bisect_right(seconds, limit)
    if i in (0, len(shares)):
        return float(i > 0)
    rising = seconds[i] - seconds[i - 1]
    return shares[i - 1] + (limit - seconds[i - 1]) / rising * (shares[i] - shares[i - 1])


def balanced_sizes(curves: Sequence[Curve], extent: int, granularity: int = 1) -> tuple[int, ...]:
    """``extent`` cut into whole multiples of ``granularity`` so that the slowest device is done as early as possible.

    Exact for any non-decreasing seconds, staircases too: the next multiple always goes to the device that would be done
    with it first. What multiples leave over goes to the last device that works, as `layout.apportion` does.
    """
    blocks = extent // granularity
    sizes = [0] * len(curves)
    if not blocks:
        sizes[min(range(len(curves)), key=lambda d: (curves[d].at(1.0), d))] = extent
        return tuple(sizes)
    unit = granularity / extent
    start = [int(0.9 * s * blocks) for s in balance(curves)]  # no device gets less than this
    queue = [(curve.at((n + 1) * unit), d) for d, (curve, n) in enumerate(zip(curves, start, strict=True))]
    heapify(queue)
    sizes = start
    for _ in range(blocks - sum(start)):
        _, d = queue[0]
        sizes[d] += 1
        heapreplace(queue, (curves[d].at((sizes[d] + 1) * unit), d))
    sizes = [n * granularity for n in sizes]
    sizes[max(d for d, n in enumerate(sizes) if n)] += extent - sum(sizes)
    return tuple(sizes)
