"""From samples to models, on plain numbers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetconv.autotune.measure import fit
from hetconv.autotune.measure.sampling import Granularity, Passes


def test_a_curve_goes_through_medians() -> None:
    curve = fit.curve({1.0: [4.0, 5.0, 9.0], 0.5: [2.0, 2.0, 7.0]})
    assert curve.shares == (0.5, 1.0)
    assert curve.seconds == (2.0, 5.0)


def test_falling_neighbours_are_pooled() -> None:
    assert fit.curve({0.25: [1.0], 0.5: [4.0], 0.75: [2.0], 1.0: [5.0]}).seconds == (
        1.0,
        3.0,
        3.0,
        5.0,
    )


def test_what_may_fall_is_left_as_it_was_measured() -> None:
    falling = {0.25: [1.0], 0.5: [4.0], 0.75: [2.0], 1.0: [5.0]}
    assert fit.curve(falling, rising=False).seconds == (1.0, 4.0, 2.0, 5.0)


def test_where_nothing_was_measured_within_a_grain_its_parts_take_what_the_whole_does() -> (
    None
):
    """40 in grains of 16: the first is known within, the second not at all, of the
    third the end.
    """
    known = fit.curve({1 / 40: [1.0], 16 / 40: [2.0], 1.0: [5.0]}, rising=False)
    steps = fit.with_steps(known, Granularity(40, 16))
    assert steps.shares == tuple(n / 40 for n in (1, 16, 17, 32, 33, 40))
    assert steps.seconds == (1.0, 2.0, 4.0, 4.0, 5.0, 5.0)
    assert fit.with_steps(steps, Granularity(40, 16)) == steps


@given(
    st.dictionaries(
        st.floats(0.01, 1),
        st.lists(st.floats(0.001, 10), min_size=1, max_size=3),
        min_size=1,
        max_size=6,
    )
)
def test_curves_never_fall_and_keep_their_range(
    samples: dict[float, list[float]],
) -> None:
    seconds = fit.curve(samples).seconds
    assert all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(seconds))
    everything = [s for times in samples.values() for s in times]
    assert min(everything) <= seconds[0] * (1 + 1e-12)
    assert seconds[-1] <= max(everything) * (1 + 1e-12)


SIZES = tuple(1 << n for n in (10, 13, 16, 19, 22, 26))
seconds_of_nothing, seconds_per_byte = st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-7)


@given(seconds_of_nothing, seconds_per_byte)
def test_a_line_without_noise_is_found(latency: float, slope: float) -> None:
    found = fit.line({size: [latency + size * slope] * 3 for size in SIZES})
    assert [found[0] + size * found[1] for size in SIZES] == pytest.approx(
        [latency + size * slope for size in SIZES]
    )


@given(
    seconds_per_byte,
    st.floats(1 << 16, 1 << 19),
    st.sampled_from(SIZES),
    st.floats(2.0, 50.0),
)
def test_one_size_that_was_disturbed_does_not_count(
    slope: float, half: float, where: int, factor: float
) -> None:
    """Messages of ``half`` bytes take twice the latency, so that several sizes tell of
    each of both.
    """
    latency = slope * half
    samples = {
        size: [(latency + size * slope) * (factor if size == where else 1)]
        for size in SIZES
    }
    start, per_byte = fit.line(samples)
    assert [
        start + size * per_byte for size in SIZES if size != where
    ] == pytest.approx([latency + size * slope for size in SIZES if size != where])


@given(
    st.dictionaries(
        st.sampled_from(SIZES),
        st.lists(st.floats(1e-7, 10), min_size=1, max_size=3),
        min_size=1,
    )
)
def test_a_line_is_never_negative_and_rises(samples: dict[int, list[float]]) -> None:
    start, slope = fit.line(samples)
    assert start >= 0
    assert slope > 0


def test_small_messages_count_as_large_ones_do() -> None:
    """A line through the large ones alone would say a second for nothing."""
    start, slope = fit.line(
        {1: [1e-4], 10: [1e-4 + 9e-9], 1 << 20: [2.0], 1 << 21: [3.0]}
    )
    assert start == pytest.approx(1e-4, rel=0.05)
    assert slope > 1e-9


def test_a_link_has_one_latency_and_a_bandwidth_each_way() -> None:
    there, back = (
        {size: [1e-4 + size * slope] for size in SIZES} for slope in (1e-9, 3e-9)
    )
    link = fit.link(there, back)
    assert link.latency_s == pytest.approx(1e-4)
    assert link.s_per_byte == pytest.approx(1e-9)
    assert link.back_s_per_byte == pytest.approx(3e-9)
    assert fit.link({8: [1e-9]}, {8: [1e-9]}).latency_s == fit.MIN_LATENCY_S


def test_calls_are_added_where_the_host_computes_and_hidden_where_it_goes_ahead() -> (
    None
):
    kernels = fit.operator_model({0.5: Passes([1.0], [2.0]), 1.0: Passes([4.0], [5.0])})
    assert fit.whole_seconds(kernels) == (4.0, 5.0)
    added, ahead = (
        fit.with_dispatch(kernels, (2.0, 3.0), host) for host in (False, True)
    )
    assert (added.forward.seconds, added.backward.seconds) == ((3.0, 6.0), (5.0, 8.0))
    assert (ahead.forward.seconds, ahead.backward.seconds) == ((2.0, 4.0), (3.0, 5.0))


def test_backward_may_be_known_of_the_whole_alone() -> None:
    model = fit.operator_model({0.5: Passes([1.0], []), 1.0: Passes([3.0], [4.0])})
    assert (model.forward.at(0.5), model.backward.at(0.5), model.backward.at(1.0)) == (
        1.0,
        2.0,
        4.0,
    )


def test_rates_are_totals_over_totals() -> None:
    assert fit.ratio_of_sums([10.0, 30.0], [1.0, 3.0]) == pytest.approx(10.0)
    assert fit.ratio_of_sums([1.0, 4.0], [1.0, 1.0]) == pytest.approx(2.5)
