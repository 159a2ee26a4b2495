"""How often to measure, and at which shares: decisions on lists of seconds. No clock,
no tensor, no rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from math import ceil, comb, hypot, inf
from statistics import median
from typing import Any, NamedTuple

CONFIDENCE = 0.95
PRECISION = 0.03  # of the median: how far the ends of its interval may be off it
TOLERANCE = (
    0.05  # of the seconds at a share: how far a line between two others may be off them
)
MOST_SHARES = 8
FEW = 64  # parts; where there are no more, every grain is measured within, if there is time
LEAST, MOST = 3, 50  # repeats
LONGEST = 0.15  # seconds for which calls are repeated whose median does not settle
BESIDE, MOST_PULSES = (
    0.1,
    100,
)  # of the samples' seconds, that pulses between them take where more than a few are due


class Passes(NamedTuple):
    """Seconds of each repeat, on a device that a pulse took ``pulse_s`` meanwhile, see
    `timer.pulse`.
    """

    forward: list[float]
    backward: list[float]
    pulse_s: float

    def at(self, pulse_s: float) -> Passes:
        """As they would be on the device when a pulse takes it so long."""
        return self.times(pulse_s / self.pulse_s)._replace(pulse_s=pulse_s)

    def times(self, factor: float) -> Passes:
        """Of what takes so many times as long, but for pulses."""
        forward, backward = (
            [factor * s for s in own] for own in (self.forward, self.backward)
        )
        return Passes(forward, backward, self.pulse_s)

    def and_again(self, later: Passes) -> Passes:
        """With more of the same, which were taken on the device as it was then."""
        same = later.at(self.pulse_s)
        return Passes(
            [*self.forward, *same.forward],
            [*self.backward, *same.backward],
            self.pulse_s,
        )


class Steps(NamedTuple):
    """Of ``extent`` filters or channels, so many at a time are computed, a ``grain``."""

    extent: int
    grain: int

    @property
    def few(self) -> bool:
        """Whether there is time to measure within each grain; less than one has none."""
        return self.grain <= self.extent <= FEW

    @property
    def grains(self) -> list[tuple[int, int]]:
        """Of each, how many come before it, and how many with it; the last one may be
        part of one.
        """
        return [
            (lo, min(lo + self.grain, self.extent))
            for lo in range(0, self.extent, self.grain)
        ]

    @property
    def ends(self) -> list[int]:
        """Parts that tell all of it: where each grain begins and ends.

        And one short of its end: kernels may take longer for that than for the whole
        grain, and seconds fall there.
        """
        return sorted(
            {
                part
                for lo, hi in self.grains
                for part in (lo + 1, min(lo + self.grain - 1, hi), hi)
            }
        )


class Run(NamedTuple):
    """Two calls to be timed. ``overlapped_s``: the second one runs the first one's work too.
    ``whole``: of all of a layer.
    """

    forward: Callable[[], Any]
    backward: Callable[[], Any]
    both: bool = False
    whole: bool = True


Time = Callable[[Run], Passes]


@cache
def _rank(n: int) -> int | None:
    """k, so that the median lies from the kth smallest to the kth largest of n samples
    with `CONFIDENCE`, or None.

    Whatever the samples' distribution, their number below its median is binomial
    (Conover, 1999, section 3.2).
    """
    tail, k = 0.0, 0
    while (tail := tail + comb(n, k) / 2**n) <= (1 - CONFIDENCE) / 2:
        k += 1
    return k or None


def interval(samples: Sequence[float]) -> tuple[float, float]:
    """Ends of the confidence interval of the median; without end for fewer than six samples."""
    k = _rank(len(samples))
    if k is None:
        return -inf, inf
    ordered = sorted(samples)
    return ordered[k - 1], ordered[-k]


def settled(samples: Sequence[float]) -> bool:
    """Whether the median is known to within `PRECISION` of it. A few slow outliers do
    not matter.
    """
    lo, hi = interval(samples)
    middle = median(samples)
    return max(hi - middle, middle - lo) <= PRECISION * middle


def doubt(samples: Sequence[float]) -> float:
    """Seconds by which their median may be off, if it has not settled."""
    if not samples or settled(samples):
        return 0.0
    lo, hi = interval(samples) if _rank(len(samples)) else (min(samples), max(samples))
    return (hi - lo) / 2


def doubts(samples: Mapping[float, Passes], backward: bool) -> dict[float, float]:
    """`doubt` of both passes together, by share, where there is any; ``backward`` does
    not always matter.
    """
    found = {
        at: doubt(p.forward) + backward * doubt(p.backward) for at, p in samples.items()
    }
    return {at: seconds for at, seconds in found.items() if seconds > 0}


def sampled(
    seconds: Callable[[], float], pulse: Callable[[], float], longest: float = LONGEST
) -> tuple[list[float], float]:
    """Seconds of as many calls as it takes until they have settled, or have together
    taken longer than ``longest``.

    The first call warms up and counts only as time. And the median of a ``pulse`` between them.
    """
    spent, found, pulses = seconds(), list[float](), [pulse()]
    while len(found) < LEAST or (
        len(found) < MOST and spent + sum(found) < longest and not settled(found)
    ):
        found.append(seconds())
        while len(pulses) <= min(len(found), LEAST) or _due(pulses, found):
            pulses.append(pulse())
    return found, median(pulses)


def _due(pulses: Sequence[float], found: Sequence[float]) -> bool:
    return len(pulses) < MOST_PULSES and sum(pulses) < BESIDE * sum(found)


def explored(
    passes: Callable[[int], Passes], extent: int, grain: int = 1
) -> dict[int, Passes]:
    """Of some parts of ``extent``, the smallest and the whole among them, what ``passes`` measured.

    Starts with three, and measures the middle of the interval in which a straight line
    was furthest off where it was last tried, until no line is by more than `TOLERANCE`.
    Parts are multiples of ``grain``, or the whole.
    """
    units = max(extent // grain, 1)
    found: dict[int, Passes] = {}

    def measure(unit: int) -> None:
        found[unit] = passes(extent if unit == units else unit * grain)

    for unit in sorted({1, ceil(units / 4), units}):
        measure(unit)
    errors = dict.fromkeys(pairwise(sorted(found)), inf)
    while errors and len(found) < MOST_SHARES:
        a, b = max(errors, key=lambda gap: (errors[gap], gap[1] - gap[0]))
        if errors.pop((a, b)) <= TOLERANCE:
            break
        if (middle := (a + b) // 2) > a:
            measure(middle)
            off = _off_line(found[a], found[middle], found[b], (middle - a) / (b - a))
            errors |= {(a, middle): off, (middle, b): off}
    return {
        extent if unit == units else unit * grain: found[unit] for unit in sorted(found)
    }


def _off_line(first: Passes, middle: Passes, last: Passes, at: float) -> float:
    """How far off the line between two others what was measured in the middle is, of
    what it was: the worse pass.

    Less what their medians may be off: a bend that noise may have made asks for
    nothing. Nor does a pass that was not measured at all three.
    """
    a, b = first.at(middle.pulse_s), last.at(middle.pulse_s)
    forward, backward = (
        (a.forward, middle.forward, b.forward),
        (a.backward, middle.backward, b.backward),
    )
    return max(
        _surely_off(*each, at) if all(each) else 0.0 for each in (forward, backward)
    )


def _surely_off(
    first: Sequence[float], middle: Sequence[float], last: Sequence[float], at: float
) -> float:
    a, m, b = median(first), median(middle), median(last)
    unsure = hypot((1 - at) * doubt(first), at * doubt(last), doubt(middle))
    return max(abs(a + (b - a) * at - m) - unsure, 0.0) / max(m, 1e-12)
