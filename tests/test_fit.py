"""From samples to models, on plain numbers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetconv.autotune import fit


def test_a_curve_goes_through_medians() -> None:
    curve = fit.curve({1.0: [4.0, 5.0, 9.0], 0.5: [2.0, 2.0, 7.0]})
    assert curve.shares == (0.5, 1.0)
    assert curve.seconds == (2.0, 5.0)


def test_falling_neighbours_are_pooled() -> None:
    assert fit.curve({0.25: [1.0], 0.5: [4.0], 0.75: [2.0], 1.0: [5.0]}).seconds == (1.0, 3.0, 3.0, 5.0)


@given(
    st.dictionaries(st.floats(0.01, 1), st.lists(st.floats(0.001, 10), min_size=1, max_size=3), min_size=1, max_size=6)
)
def test_curves_never_fall_and_keep_their_range(samples: dict[float, list[float]]) -> None:
    seconds = fit.curve(samples).seconds
    assert all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(seconds))
    everything = [s for times in samples.values() for s in times]
    assert min(everything) <= seconds[0] * (1 + 1e-12)
    assert seconds[-1] <= max(everything) * (1 + 1e-12)


def test_a_link_is_a_line() -> None:
    link = fit.link({64: [1e-4 + 64e-9] * 3, 1 << 20: [1e-4 + (1 << 20) * 1e-9] * 3})
    assert link.latency_s == pytest.approx(1e-4)
    assert link.s_per_byte == pytest.approx(1e-9)


def test_a_link_is_never_negative() -> None:
    link = fit.link({64: [2e-4], 1 << 20: [1e-4]})
    assert link.latency_s == pytest.approx(2e-4, rel=1e-3)
    assert link.s_per_byte == pytest.approx(1e-4 / (1 << 20))


def test_rates_are_totals_over_totals() -> None:
    assert fit.roofline([(10.0, 1.0), (30.0, 3.0)]) == pytest.approx(10.0)
    assert fit.backward_ratio([1.0, 1.0], [1.0, 4.0]) == pytest.approx(2.5)
