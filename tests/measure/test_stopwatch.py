"""The stopwatch and pulses, by a clock that tests move on: what counts as a sample, and
of what speed it is.
"""

from __future__ import annotations

import time
from statistics import median
from types import SimpleNamespace

import pytest
import torch

from hetconv.autotune.launch import throttle
from hetconv.autotune.measure import timer
from hetconv.autotune.measure.other_workloads import Call
from hetconv.autotune.measure.sampling import Passes, Run
from tests.spawn import on_ranks

CPU = torch.device("cpu")


class Clock:
    """Of time.perf_counter; calls move it on."""

    def __init__(self) -> None:
        self.now, self.calls = 0.0, 0

    def call(self, seconds: float) -> None:
        self.now += seconds
        self.calls += 1


@pytest.mark.parametrize(("seconds", "calls"), [(1e-5, 20), (6e-5, 3), (1.0, 1)])
def test_short_calls_are_timed_together(
    seconds: float, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(timer, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    watch = timer.stopwatch(lambda: clock.call(seconds), CPU)
    assert watch() == pytest.approx(seconds)
    assert clock.calls == 1
    assert watch() == pytest.approx(seconds)
    assert clock.calls == 1 + calls


@pytest.mark.parametrize(
    ("taken", "calls"),
    [([0, 0, 0], 1), ([9000, 4000, 0, 9000], 3), ([9000] * 99, timer.MOST_NEW + 1)],
)
def test_calls_that_need_new_memory_do_not_count(
    taken: list[int], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, ran = 0, list[int]()

    def call() -> None:
        nonlocal pages
        pages += taken[len(ran)]
        ran.append(pages)

    monkeypatch.setattr(timer, "pages_taken", lambda: pages)
    timer.stopwatch(call, CPU)()
    assert len(ran) == calls


def test_forward_is_taken_off_where_backward_runs_it_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(timer, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(timer, "pulse", lambda device: lambda: 0.25)
    run = Run(lambda: clock.call(1.0), lambda: clock.call(3.0), both=True)
    found = timer._passes(run, CPU)
    assert (set(found.forward), set(found.backward), found.pulse_s) == (
        {1.0},
        {2.0},
        0.25,
    )
    assert set(timer._passes(run._replace(both=False), CPU).backward) == {3.0}


def test_backward_is_left_out_where_it_does_not_matter() -> None:
    called: list[str] = []
    found = timer._passes(
        Run(lambda: called.append("forward"), lambda: called.append("backward")),
        CPU,
        False,
    )
    assert {*called} == {"forward"}
    assert found.forward
    assert found.backward == []


def test_backward_is_brought_to_the_speed_that_forward_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device is half as fast in backward."""
    clock, pulses = Clock(), {True: 0.25, False: 0.5}
    run = Run(lambda: clock.call(1.0), lambda: clock.call(6.0), both=True)
    monkeypatch.setattr(timer, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(timer, "pulse", lambda device: lambda: pulses[clock.now < 10])
    found = timer._passes(run, CPU)
    assert (set(found.forward), set(found.backward), found.pulse_s) == (
        {1.0},
        {2.0},
        0.25,
    )


def test_a_pulse_is_a_piece_of_work_of_some_microseconds() -> None:
    beat = timer.pulse(CPU)
    assert timer.pulse(torch.device("cpu")) is beat
    assert 1e-6 < min(beat() for _ in range(5)) < 0.1


def called(speed: float) -> tuple[Passes, Passes]:
    throttle.set_speed(speed)
    try:
        return tuple(
            Call(alone).samples(lambda run: timer._passes(run, CPU), CPU)[1.0]
            for alone in (False, True)
        )  # type: ignore[return-value]
    finally:
        throttle.set_speed(1.0)


def test_a_call_takes_the_host_some_microseconds() -> None:
    ((parts, plain),) = on_ranks(1, called, 1.0)
    for found in (parts, plain):
        assert min(*found.forward, *found.backward) >= 0
        assert max(median(found.forward), median(found.backward)) < 0.1
    assert max(parts.backward) > 0


def test_a_pulse_after_a_pause_is_that_of_a_core_that_works_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beat = timer.pulse(CPU)
    monkeypatch.setattr(timer, "at_work_s", lambda: 0.0)
    start = time.perf_counter()
    assert beat() <= time.perf_counter() - start - timer.WARM_S
