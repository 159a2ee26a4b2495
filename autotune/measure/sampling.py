"""How often to measure, and at which shares: decisions on lists of seconds.

Nothing here needs a clock, a tensor or a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from math import ceil, comb, hypot, inf, log, pi, sqrt
from statistics import median, stdev
from typing import Any, NamedTuple

DEFAULT_LOG_ERROR = 0.2  # of what was measured once


def log_error_of_median(seconds: Sequence[float]) -> float:
    """Computes the standard error of the median's logarithm, as of a normal distribution.

    Args:
        seconds: the measurements. One says nothing, nor do zeros: a device without a
            share computes for no time.

    Returns:
        The error, or `DEFAULT_LOG_ERROR`.
    """
    if len(seconds) < 2 or min(seconds) <= 0:
        return DEFAULT_LOG_ERROR
    return error_of_median([log(s) for s in seconds])


def error_of_median(values: Sequence[float]) -> float:
    """Computes the standard error of the median, as of a normal distribution.

    Args:
        values: two or more.
    """
    return sqrt(pi / 2 / len(values)) * stdev(values)


CONFIDENCE = 0.95
MAX_MEDIAN_ERROR = (
    0.03  # relative: how far the ends of the interval may be off the median
)
MAX_LINE_ERROR = 0.05  # relative: how far a line between two shares may be off a third
MAX_SHARES = 8
MAX_FINE_EXTENT = 64  # filters or channels, up to which every grain is measured within
MIN_REPEATS, MAX_REPEATS = 3, 50
MAX_SAMPLING_S = 0.15  # for which calls are repeated whose median does not converge


class Passes(NamedTuple):
    """Seconds of each repeat of the forward and of the backward pass."""

    forward: list[float]
    backward: list[float]

    def times(self, factor: float) -> Passes:
        """Returns the seconds of what takes ``factor`` times as long."""
        forward, backward = ([factor * s for s in seconds] for seconds in self)
        return Passes(forward, backward)

    def joined(self, later: Passes) -> Passes:
        """Returns the repeats of both."""
        return Passes(
            [*self.forward, *later.forward], [*self.backward, *later.backward]
        )


class Granularity(NamedTuple):
    """The steps in which kernels compute filters or channels.

    Attributes:
        extent: number of filters or channels.
        grain: how many of them are computed at a time; the last grain may be smaller.
    """

    extent: int
    grain: int

    @property
    def fine(self) -> bool:
        """Whether every grain is measured within, for which there are few enough."""
        return self.grain <= self.extent <= MAX_FINE_EXTENT

    @property
    def grains(self) -> list[tuple[int, int]]:
        """The first unit of each grain, and the one after its last."""
        return [
            (start, min(start + self.grain, self.extent))
            for start in range(0, self.extent, self.grain)
        ]

    @property
    def ends(self) -> list[int]:
        """Sizes to measure: where each grain begins and ends, and one short of its end.

        Kernels may take longer for one unit less than for the whole grain.
        """
        sizes: set[int] = set()
        for start, end in self.grains:
            sizes |= {start + 1, min(start + self.grain - 1, end), end}
        return sorted(sizes)


class PassCalls(NamedTuple):
    """The calls of the two passes of a workload, to be timed.

    Attributes:
        forward: runs the forward pass.
        backward: runs the backward pass.
        includes_forward: whether ``backward`` runs the forward pass first.
        whole: whether this is the whole workload, not a part of it.
    """

    forward: Callable[[], Any]
    backward: Callable[[], Any]
    includes_forward: bool = False
    whole: bool = True


TimePasses = Callable[[PassCalls], Passes]


@cache
def _order_statistic(n: int) -> int | None:
    """Returns k so that the median lies between the kth smallest and kth largest of n.

    It does so with `CONFIDENCE`, whatever the distribution: the number of samples below the
    median is binomial (Conover, 1999, section 3.2). It is None for too few samples.
    """
    tail, k = 0.0, 0
    while (tail := tail + comb(n, k) / 2**n) <= (1 - CONFIDENCE) / 2:
        k += 1
    return k or None


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """Returns the ends of the confidence interval of the median.

    Fewer than six samples say nothing: the interval is infinite.
    """
    k = _order_statistic(len(samples))
    if k is None:
        return -inf, inf
    ordered = sorted(samples)
    return ordered[k - 1], ordered[-k]


def converged(samples: Sequence[float]) -> bool:
    """Tells whether the median is known to within `MAX_MEDIAN_ERROR` of it.

    A few slow outliers do not matter.
    """
    low, high = median_interval(samples)
    middle = median(samples)
    return max(high - middle, middle - low) <= MAX_MEDIAN_ERROR * middle


def uncertainty(samples: Sequence[float]) -> float:
    """Returns the seconds by which the median may be off; 0 once it has converged."""
    if not samples or converged(samples):
        return 0.0
    low, high = median_interval(samples)
    if high == inf:
        low, high = min(samples), max(samples)
    return (high - low) / 2


def uncertainties(
    samples: Mapping[float, Passes], backward: bool
) -> dict[float, float]:
    """Returns the `uncertainty` of each share whose median has not converged.

    Args:
        samples: passes by share.
        backward: whether the backward pass counts.
    """
    found = {
        share: uncertainty(p.forward) + backward * uncertainty(p.backward)
        for share, p in samples.items()
    }
    return {share: seconds for share, seconds in found.items() if seconds > 0}


def sample(
    seconds: Callable[[], float], max_sampling_s: float = MAX_SAMPLING_S
) -> list[float]:
    """Times calls until their median has converged or the time is over.

    Args:
        seconds: makes a call and returns what it took. The first one warms up and
            counts only as time.
        max_sampling_s: seconds of all calls after which none is added.
    """
    spent, found = seconds(), list[float]()
    while len(found) < MIN_REPEATS or (
        len(found) < MAX_REPEATS
        and spent + sum(found) < max_sampling_s
        and not converged(found)
    ):
        found.append(seconds())
    return found


def explore(
    measure: Callable[[int], Passes], extent: int, grain: int = 1
) -> dict[int, Passes]:
    """Measures a workload at the sizes that tell most of how its seconds grow.

    Starts with three sizes, and halves the interval in which a straight line was
    furthest off where it was last tried, until none is by more than `MAX_LINE_ERROR`.

    Args:
        measure: times the workload at a size.
        extent: the whole size.
        grain: sizes are multiples of it, or the whole.

    Returns:
        Passes by size, in rising order; the smallest and the whole among them.
    """
    units = max(extent // grain, 1)
    found: dict[int, Passes] = {}

    def measure_units(count: int) -> None:
        found[count] = measure(extent if count == units else count * grain)

    for count in sorted({1, ceil(units / 4), units}):
        measure_units(count)
    errors = dict.fromkeys(pairwise(sorted(found)), inf)
    while errors and len(found) < MAX_SHARES:
        a, b = max(errors, key=lambda gap: (errors[gap], gap[1] - gap[0]))
        if errors.pop((a, b)) <= MAX_LINE_ERROR:
            break
        if (middle := (a + b) // 2) > a:
            measure_units(middle)
            error = _line_error(
                found[a], found[middle], found[b], (middle - a) / (b - a)
            )
            errors |= {(a, middle): error, (middle, b): error}
    return {
        extent if count == units else count * grain: found[count]
        for count in sorted(found)
    }


def _line_error(first: Passes, middle: Passes, last: Passes, at: float) -> float:
    """Returns how far the middle is off the line between two others, as a part of it.

    The worse pass counts; a pass that was not measured at all three does not.
    """
    return max(
        _certain_line_error(*pass_, at) if all(pass_) else 0.0
        for pass_ in zip(first, middle, last, strict=True)
    )


def _certain_line_error(
    first: Sequence[float], middle: Sequence[float], last: Sequence[float], at: float
) -> float:
    """Less what the medians may be off: a bend that noise may have made asks for nothing."""
    a, m, b = median(first), median(middle), median(last)
    noise = hypot(
        (1 - at) * uncertainty(first), at * uncertainty(last), uncertainty(middle)
    )
    return max(abs(a + (b - a) * at - m) - noise, 0.0) / max(m, 1e-12)
