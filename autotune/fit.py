"""From samples to models: plain numbers in, frozen models out. No clock, no tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from hetconv.profile import Curve, LinkModel


def curve(samples: Mapping[float, Sequence[float]]) -> Curve:
    """A piecewise-linear curve through the medians of the seconds at each share, made non-decreasing.

    Where a larger share was measured faster (noise), neighbours are pooled to their mean (isotonic regression).
    """
    shares = sorted(samples)
    blocks = [[median(samples[s]), 1] for s in shares]
    pooled: list[list[float]] = []
    for value, count in blocks:
        pooled.append([value, count])
        while len(pooled) > 1 and pooled[-2][0] > pooled[-1][0]:
            (a, m), (b, n) = pooled[-2:]
            pooled[-2:] = [[(a * m + b * n) / (m + n), m + n]]
    seconds = [value for value, count in pooled for _ in range(int(count))]
    return Curve(tuple(shares), tuple(seconds))


def link(samples: Mapping[int, Sequence[float]]) -> LinkModel:
    """Latency and seconds per byte from the medians of one-way times by message size (bytes), of two sizes.

    Where noise made the large message no slower than the small one, all of its time counts as bandwidth.
    """
    (small, quick), (large, slow) = ((size, median(times)) for size, times in sorted(samples.items()))
    per_byte = (slow - quick) / (large - small) if slow > quick else slow / large
    return LinkModel(max(quick - small * per_byte, 1e-7), per_byte)


def roofline(measured: Sequence[tuple[float, float]]) -> float:
    """Work per second from (work, seconds) pairs, weighted by seconds: total over total."""
    return sum(work for work, _ in measured) / max(sum(seconds for _, seconds in measured), 1e-12)


def backward_ratio(forward: Sequence[float], backward: Sequence[float]) -> float:
    """How much longer backward takes than forward, over all measured operators."""
    return sum(backward) / max(sum(forward), 1e-12)
