"""Which part of its core a rank gets, and by which clock it is timed, on made-up clocks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetconv.autotune.measure import cpu_share
from hetconv.autotune.measure.cpu_share import clock_and_factor, core_share
from hetconv.runtime import throttle

CPU = torch.device("cpu")
TEAM: Any = "a team"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Of several only the first one's clock is known."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    throttle.set_speed(1.0)


@pytest.mark.parametrize(("worked", "share"), [(0.5, 0.5), (0.98, 1.0), (1.0, 1.0)])
def test_a_share_is_what_the_thread_works_of_the_time(
    worked: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look at the wall clock is some milliseconds later than the one before."""
    ticks = count()
    now = [0.0]

    def perf_counter() -> float:
        now[0] = 0.001 * next(ticks)
        return now[0]

    clocks = SimpleNamespace(
        perf_counter=perf_counter, thread_time=lambda: worked * (now[0] + 0.001)
    )
    monkeypatch.setattr(cpu_share, "time", clocks)
    monkeypatch.setattr(cpu_share, "tight_barrier", lambda _: None)
    core_share.cache_clear()
    try:
        assert core_share(TEAM) == pytest.approx(share, rel=0.02)
    finally:
        core_share.cache_clear()


@pytest.mark.parametrize(
    ("throttled", "speed", "own_clock"),
    [(True, 1.0, True), (True, 0.5, False), (False, 1.0, True), (False, 0.5, True)],
)
def test_a_slowed_device_sleeps_less_for_what_others_have_its_core(
    throttled: bool, speed: float, own_clock: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers take what the wall says; all else as many times as long as its share says."""
    monkeypatch.setattr(cpu_share, "core_share", lambda _: 0.25)
    throttle.set_speed(speed)
    expected = (time.thread_time, 4.0) if own_clock else (time.perf_counter, 1.0)
    assert clock_and_factor(CPU, TEAM, throttled) == expected


def test_several_threads_are_timed_by_the_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_share, "core_share", lambda _: 0.25)
    torch.set_num_threads(2)
    assert clock_and_factor(CPU, TEAM, True) == (time.perf_counter, 1.0)
