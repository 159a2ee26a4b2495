"""The stopwatch, by a clock that tests move on: what counts as a sample."""

from __future__ import annotations

import pytest
import torch

from hetconv.autotune.measure import timer
from hetconv.autotune.measure.sampling import PassCalls

CPU = torch.device("cpu")


class Clock:
    """Calls move it on."""

    def __init__(self) -> None:
        self.now, self.calls = 0.0, 0

    def __call__(self) -> float:
        return self.now

    def call(self, seconds: float) -> None:
        self.now += seconds
        self.calls += 1


@pytest.mark.parametrize(("seconds", "calls"), [(1e-5, 20), (6e-5, 3), (1.0, 1)])
def test_short_calls_are_timed_together(seconds: float, calls: int) -> None:
    clock = Clock()
    watch = timer.stopwatch(lambda: clock.call(seconds), CPU, clock)
    assert watch() == pytest.approx(seconds)
    assert clock.calls == 1
    assert watch() == pytest.approx(seconds)
    assert clock.calls == 1 + calls


@pytest.mark.parametrize(
    ("taken", "calls"),
    [
        ([0, 0, 0], 1),
        ([9000, 4000, 0, 9000], 3),
        ([9000] * 99, timer.MAX_DISCARDED_SAMPLES + 1),
    ],
)
def test_calls_that_need_new_memory_do_not_count(
    taken: list[int], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, pages, ran = Clock(), 0, list[int]()

    def call() -> None:
        nonlocal pages
        clock.call(1.0)
        pages += taken[len(ran)]
        ran.append(pages)

    monkeypatch.setattr(timer, "pages_taken", lambda: pages)
    assert timer.stopwatch(call, CPU, clock)() == 1.0
    assert len(ran) == calls


@pytest.mark.parametrize(
    ("includes_forward", "backward_s"), [(True, 2.0), (False, 3.0)]
)
def test_forward_is_taken_off_where_backward_runs_it_too(
    includes_forward: bool, backward_s: float
) -> None:
    clock = Clock()
    calls = PassCalls(
        lambda: clock.call(1.0), lambda: clock.call(3.0), includes_forward
    )
    found = timer._time_passes(calls, CPU, clock=clock)
    assert (set(found.forward), set(found.backward)) == ({1.0}, {backward_s})


def test_backward_is_left_out_where_it_does_not_matter() -> None:
    clock, called = Clock(), list[str]()

    def forward() -> None:
        clock.call(1.0)
        called.append("forward")

    calls = PassCalls(forward, lambda: called.append("backward"))
    found = timer._time_passes(calls, CPU, False, clock)
    assert {*called} == {"forward"}
    assert found.forward
    assert found.backward == []
