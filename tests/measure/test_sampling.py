"""How often and at which shares to measure, on lists of seconds and made-up operators."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from math import exp, inf
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetconv.autotune.measure.sampling import (
    MAX_FINE_EXTENT,
    MAX_LINE_ERROR,
    MAX_REPEATS,
    MAX_SHARES,
    Granularity,
    Passes,
    converged,
    explore,
    median_interval,
    sample,
    uncertainties,
    uncertainty,
)


@pytest.mark.parametrize(
    ("n", "k"), [(6, 1), (8, 1), (9, 2), (12, 3), (15, 4), (20, 6), (25, 8), (50, 18)]
)
def test_the_interval_is_the_table_s(n: int, k: int) -> None:
    """Ranks of the textbooks' tables of confidence intervals of a median, at 95 %."""
    samples = [float(i) for i in range(1, n + 1)]
    random.Random(n).shuffle(samples)
    assert median_interval(samples) == (k, n + 1 - k)


def test_few_samples_say_nothing() -> None:
    assert median_interval([1.0] * 5) == (-inf, inf)
    assert not converged([1.0] * 5)
    assert converged([1.0] * 6)


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    draw, held = random.Random(0), 0
    for _ in range(2000):
        lo, hi = median_interval([draw.expovariate(1.0) for _ in range(15)])
        held += lo <= 0.6931 <= hi
    assert 0.95 <= held / 2000 <= 0.98  # 96.5 %, for ranks are whole


def test_outliers_settle_later_but_settle() -> None:
    quiet = [1.0, 1.01, 0.99, 1.0, 1.02, 1.0]
    assert converged(quiet)
    assert not converged([*quiet, 50.0])
    assert converged([*quiet, 50.0, 1.0, 1.01, 1.0])
    assert not converged([1.0, 1.1] * 10)


def test_a_median_is_in_doubt_until_it_has_settled() -> None:
    assert uncertainty([1.0] * 6) == uncertainty([]) == 0.0
    assert uncertainty([1.0, 5.0, 2.0]) == 2.0  # too few for an interval
    assert (
        uncertainty([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]) == 3.0
    )  # from the second to the second largest
    quiet, loud = [1.0] * 6, [1.0, 3.0]
    samples = {
        0.25: Passes(quiet, quiet),
        0.5: Passes(quiet, loud),
        1.0: Passes(loud, loud),
    }
    assert uncertainties(samples, backward=True) == {0.5: 1.0, 1.0: 2.0}
    assert uncertainties(samples, backward=False) == {1.0: 1.0}


def test_later_samples_are_added() -> None:
    both = Passes([1.0], [2.0]).joined(Passes([4.0], [6.0, 8.0]))
    assert both == Passes([1.0, 4.0], [2.0, 6.0, 8.0])
    assert both.times(2.0) == Passes([2.0, 8.0], [4.0, 12.0, 16.0])


class Clock:
    """An operator of these seconds, again and again; counts."""

    def __init__(self, *seconds: float):
        self.seconds, self.calls = seconds, 0

    def __call__(self) -> float:
        self.calls += 1
        return self.seconds[(self.calls - 1) % len(self.seconds)]


def test_samples_are_taken_until_they_have_settled() -> None:
    steady = Clock(0.001)
    assert sample(steady) == [0.001] * 6
    assert steady.calls == 7  # the first one warms up


def test_the_first_call_does_not_count() -> None:
    first = [9.0]
    assert max(sample(lambda: first.pop() if first else 0.001, 100.0)) == 0.001


def test_samples_end_with_time_or_number() -> None:
    restless = Clock(0.001, 0.002)
    assert len(sample(restless, 100.0)) == MAX_REPEATS
    slow = Clock(1.0, 2.0)
    assert sample(slow, 0.5) == [2.0, 1.0, 2.0]
    assert len(sample(Clock(0.01, 0.02), 0.2)) in range(10, 16)


def operator(
    seconds: Callable[[float], float],
) -> tuple[Callable[[int], Passes], list[int]]:
    """An operator whose backward takes twice as long, and the parts that were asked for."""
    asked: list[int] = []

    def passes(part: int) -> Passes:
        asked.append(part)
        return Passes([seconds(part)] * 3, [2 * seconds(part)] * 3)

    return passes, asked


def test_a_straight_line_is_tried_in_every_interval_and_left() -> None:
    passes, asked = operator(lambda part: 1.0 + part)
    assert list(explore(passes, 64)) == sorted(asked) == [1, 8, 16, 40, 64]


@pytest.mark.parametrize(("noise", "count"), [(0.0, MAX_SHARES), (0.3, 5)])
def test_what_noise_may_have_made_is_no_bend(noise: float, count: int) -> None:
    """Every other share takes a fifth longer, by the median of samples that differ by
    more, or not at all.
    """
    asked: list[int] = []

    def passes(part: int) -> Passes:
        asked.append(part)
        took = part * (1.0 + len(asked) % 2 / 5)
        samples = [took * (1 - noise), took, took * (1 + noise)] * (1 if noise else 3)
        return Passes(samples, samples)

    assert len(explore(passes, 64)) == count


def test_a_bend_is_found() -> None:
    """As where the work no longer fits a cache: the interval around it is halved, the
    straight one is left alone.
    """
    passes, asked = operator(
        lambda part: float(part) if part <= 40 else 40 + 9.0 * (part - 40)
    )
    explore(passes, 64)
    assert asked[:3] == [1, 16, 64]
    assert sum(part > 16 for part in asked[3:]) > sum(part < 16 for part in asked[3:])


@given(st.integers(1, 500), st.integers(1, 32), st.floats(0.2, 3.0))
def test_what_is_explored_is_whole_grains_once_and_not_too_many(
    extent: int, grain: int, power: float
) -> None:
    passes, asked = operator(lambda part: float(part) ** power)
    found = explore(passes, extent, grain)
    assert sorted(found) == sorted(asked) == list(found)
    assert max(found) == extent
    assert min(found) == min(grain, extent) or extent < 2 * grain
    assert all(part % grain == 0 or part == extent for part in found)
    assert len(found) <= min(MAX_SHARES, max(extent // grain, 1))


@given(st.floats(0.0, 0.2), st.floats(0.5, 8.0))
def test_lines_are_within_the_tolerance_or_the_cap_was_reached(
    start: float, bend: float
) -> None:
    """Of smooth curves, each of whose intervals is worst about its middle."""

    def seconds(part: float) -> float:
        return start + 1 - exp(-bend * part / 256) + part / 256

    found = explore(operator(seconds)[0], 256)
    off = 0.0
    for a, b in pairwise(found):
        middle = (a + b) // 2
        line = seconds(a) + (seconds(b) - seconds(a)) * (middle - a) / (b - a)
        off = max(off, abs(line - seconds(middle)) / seconds(middle))
    assert off <= MAX_LINE_ERROR or len(found) == MAX_SHARES


def test_the_worse_pass_decides() -> None:
    """Forward is a line; backward alone has a bend."""
    asked: list[int] = []

    def passes(part: int) -> Passes:
        asked.append(part)
        return Passes([float(part)], [float(part) if part <= 40 else 9.0 * part])

    assert len(explore(passes, 64)) == MAX_SHARES
    assert median([float(part > 16) for part in asked[3:]]) == 1.0


def test_intervals_of_neighbours_are_not_halved() -> None:
    assert list(explore(operator(lambda part: float(part % 2))[0], 3)) == [1, 2, 3]
    assert list(explore(operator(lambda part: 1.0)[0], 1)) == [1]
    assert list(explore(operator(lambda part: 1.0)[0], 7, 16)) == [7]


def test_a_median_of_no_time_breaks_nothing() -> None:
    assert sample(lambda: 0.0, 1.0) == [0.0] * 6
    assert converged([0.0] * 6)


@pytest.mark.parametrize(
    ("extent", "parts"),
    [
        (48, [1, 15, 16, 17, 31, 32, 33, 47, 48]),
        (40, [1, 15, 16, 17, 31, 32, 33, 40]),
        (17, [1, 15, 16, 17]),
        (16, [1, 15, 16]),
        (
            MAX_FINE_EXTENT,
            [n + k for n in range(0, MAX_FINE_EXTENT, 16) for k in (1, 15, 16)],
        ),
    ],
)
def test_few_steps_have_ends_to_be_measured(extent: int, parts: list[int]) -> None:
    steps = Granularity(extent, 16)
    assert steps.fine
    assert steps.ends == parts


def test_less_than_a_grain_and_many_grains_are_not_fine() -> None:
    assert not Granularity(15, 16).fine
    assert not Granularity(MAX_FINE_EXTENT + 1, 16).fine
