"""Balanced shares, on plain curves, and exactly in whole units."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetconv.planner.load_balance import added, balance, balanced_sizes
from hetconv.schemas.device_model import Curve


def straight(start: float, whole: float) -> Curve:
    """Seconds ``start`` for anything at all, and ``whole`` more for all of it."""
    return Curve((0.5, 1.0), (start + whole / 2, start + whole))


@st.composite
def curves(draw: st.DrawFn, falling: bool = False) -> Curve:
    shares = sorted(draw(st.sets(st.integers(1, 100), min_size=1, max_size=5)))
    seconds = draw(
        st.lists(st.floats(0, 10), min_size=len(shares), max_size=len(shares))
    )
    seconds = seconds if falling else sorted(seconds)
    return Curve(tuple(x / 100 for x in shares), tuple(seconds))


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=6))
def test_linear_devices_share_by_speed(speeds: list[float]) -> None:
    shares = balance([straight(0.0, 1 / s) for s in speeds])
    assert shares == pytest.approx([s / sum(speeds) for s in speeds], rel=1e-6)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.1, 10)), min_size=2, max_size=6))
def test_devices_that_work_finish_together(models: list[tuple[float, float]]) -> None:
    devices = [straight(a, b) for a, b in models]
    shares = balance(devices)
    times = [f.at(x) for f, x in zip(devices, shares, strict=True) if x > 1e-9]
    assert sum(shares) == pytest.approx(1)
    assert max(times) - min(times) <= 1e-3 * max(times)
    assert max(times) <= min(f.at(1.0) for f in devices) * (1 + 1e-9)


def test_a_device_too_slow_to_start_sits_out() -> None:
    assert balance([straight(0.0, 1.0), Curve((0.001, 1.0), (5.0, 5.0))]) == (1.0, 0.0)


@given(
    st.lists(curves() | curves(falling=True), min_size=1, max_size=3), st.integers(1, 9)
)
def test_whole_units_are_shared_as_well_as_can_be(
    devices: list[Curve], extent: int
) -> None:
    def slowest(sizes: tuple[int, ...]) -> float:
        return max(f.at(n / extent) for f, n in zip(devices, sizes, strict=True))

    sizes = balanced_sizes(devices, extent)
    every = (
        s for s in product(range(extent + 1), repeat=len(devices)) if sum(s) == extent
    )
    assert sum(sizes) == extent
    assert slowest(sizes) <= min(map(slowest, every)) + 1e-9


def test_a_whole_block_is_taken_where_a_part_takes_longer() -> None:
    blocks = Curve(
        (1 / 48, 15 / 48, 16 / 48, 17 / 48, 31 / 48, 32 / 48, 33 / 48, 1.0),
        (1, 2, 1.5, 2.1, 4, 3, 3.1, 5),
    )
    slower = Curve(blocks.shares, tuple(2 * seconds for seconds in blocks.seconds))
    assert balanced_sizes([blocks, slower], 48) == (32, 16)
    assert balanced_sizes([blocks, blocks, blocks], 48) == (16, 16, 16)


@pytest.mark.parametrize(
    ("extent", "expected"), [(96, (64, 32)), (100, (64, 36)), (8, (8, 0))]
)
def test_cuts_lie_on_multiples(extent: int, expected: tuple[int, ...]) -> None:
    assert (
        balanced_sizes([straight(0.0, 1.0), straight(0.0, 2.0)], extent, 16) == expected
    )


@given(
    st.lists(st.tuples(curves(), st.integers(1, 3)), min_size=1, max_size=4),
    st.integers(1, 100),
)
def test_curves_add_up(known: list[tuple[Curve, int]], percent: int) -> None:
    shares = {x for curve, _ in known for x in curve.shares}
    if percent / 100 in shares:
        expected = sum(n * curve.at(percent / 100) for curve, n in known)
        assert added(known).at(percent / 100) == pytest.approx(expected)
