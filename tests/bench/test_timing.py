"""The benchmarks' stopwatch, on a clock that the tests move on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench.shared import timing


class Clock:
    """CUDA events on a clock that the runs move on."""

    def __init__(self) -> None:
        self.now = 0.0

    def event(self) -> Clock:
        return Event(self)


class Event(Clock):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def record(self) -> None:
        self.at = self.clock.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


def test_seconds_are_of_one_run_and_leave_out_the_first() -> None:
    clock, lasts = Clock(), iter((100.0, 1.0, 2.0, 3.0))

    def run() -> None:
        clock.now += next(lasts)

    assert timing.seconds(run, 3, clock.event) == pytest.approx(2.0)


def test_contenders_take_turns_at_going_first() -> None:
    order: list[str] = []

    def measure(name: str) -> Callable[[], float]:
        def turn() -> float:
            order.append(name)
            return float(len(order))

        return turn

    times = timing.alternated({"a": measure("a"), "b": measure("b")}, 3)
    assert "".join(order) == "abbaab"
    assert times == {"a": [1, 4, 5], "b": [2, 3, 6]}


@pytest.mark.parametrize("set_bytes", [100, 1 << 20, 60 << 20, 1 << 30])
def test_input_sets_outgrow_the_cache_and_graphs_rotate_over_all(
    set_bytes: int,
) -> None:
    sets = timing.sets_for(set_bytes, 60 << 20)
    assert sets * set_bytes > 2 * (60 << 20) or sets == timing.MAX_CALLS
    for least in (1e-7, 1e-5, 1e-2):
        calls = timing.calls_for(sets, least)
        assert calls % sets == 0
        assert calls >= min(timing.GRAPH_S / least, timing.MAX_CALLS)


def test_what_cannot_be_captured_is_timed_in_a_loop_over_all_inputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    for name in ("synchronize", "set_stream", "default_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(timing, "_captured", refuse)
    seen: list[int] = []

    def call(i: int) -> torch.Tensor:
        seen.append(i)
        return torch.zeros(1)

    timed = timing.prepared(call, 4, 1e-3)
    seen.clear()
    timed.run()
    assert (timed.mode, timed.calls, seen) == ("loop", 4, [0, 1, 2, 3])
