"""Devices slowed on purpose: their names, and how long they sleep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hetconv.autotune.launch import throttle
from hetconv.autotune.launch.throttle import (
    Computation,
    DeviceName,
    both_stretched,
    set_speed,
    stretched,
)
from hetconv.autotune.measure.timer import timed
from hetconv.errors import HetConvError
from hetconv.sharding.split import SplitKind
from tests.equivalence import Differences, assert_same
from tests.nets import IMAGE_KINDS
from tests.nn.test_layers import standalone
from tests.spawn import on_ranks

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """In which this thread waited for its core, by turns."""
    turns: list[float] = []
    monkeypatch.setattr(throttle, "waits_s", lambda: sum(turns))
    return turns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """What was slept; each look at a clock is a second later than the one before."""
    slept: list[float] = []
    monkeypatch.setattr(throttle.time, "sleep", slept.append)
    for name in ("perf_counter", "thread_time"):
        ticks = iter(range(100))
        monkeypatch.setattr(throttle.time, name, lambda ticks=ticks: float(next(ticks)))
    yield slept
    set_speed(1.0)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("cpu", DeviceName("cpu")),
        (" cuda:1 ", DeviceName("cuda:1")),
        ("cuda", DeviceName("cuda")),
        ("cpu@0.5", DeviceName("cpu", 0.5)),
        ("cuda:0@1", DeviceName("cuda:0")),
        ("cuda:0@1e-2", DeviceName("cuda:0", 0.01)),
    ],
)
def test_names_of_devices(text: str, name: DeviceName) -> None:
    assert DeviceName.parse(text) == name
    assert DeviceName.parse(str(name)) == name


def test_a_slowed_device_shows_it_in_its_name() -> None:
    assert (str(DeviceName("cpu", 0.5)), str(DeviceName("cpu"))) == ("cpu@0.5", "cpu")
    assert [DeviceName("cpu", s).emulated for s in (0.5, 1.0)] == [True, False]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gpu",
        "cpu@",
        "cpu@fast",
        "cpu@0",
        "cpu@-1",
        "cpu@1.5",
        "cpu@nan",
        "cpu@inf",
        "meta",
        "cuda:x",
        "@1",
    ],
)
def test_what_is_no_device_is_refused(text: str) -> None:
    with pytest.raises(HetConvError, match="device"):
        DeviceName.parse(text)


@pytest.mark.parametrize(("speed", "sleep"), [(0.5, 1.0), (0.25, 3.0), (0.1, 9.0)])
def test_a_slowed_device_takes_as_much_longer(
    speed: float, sleep: float, clock: list[float]
) -> None:
    set_speed(speed)
    assert stretched(lambda: "done", CPU) == "done"
    assert clock == pytest.approx([sleep])


def test_a_device_at_full_speed_never_sleeps(clock: list[float]) -> None:
    set_speed(0.5)
    set_speed(1.0)
    assert stretched(lambda: 3, CPU) == 3
    assert clock == []


@pytest.mark.parametrize("speed", [0.0, -0.5, 1.1, float("nan")])
def test_a_speed_without_sense_is_refused(speed: float) -> None:
    with pytest.raises(HetConvError, match="speed"):
        set_speed(speed)


def test_sleeps_that_end_late_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds + 0.0005

    def compute() -> None:
        now[0] += 0.01

    monkeypatch.setattr(throttle.time, "sleep", sleep)
    for name in ("perf_counter", "thread_time"):
        monkeypatch.setattr(throttle.time, name, lambda: now[0])
    set_speed(0.5)
    for _ in range(20):
        stretched(compute, CPU)
    set_speed(1.0)
    assert now[0] == pytest.approx(20 * 0.02, abs=0.001)


class Shared:
    """Two clocks: a core that others have for ``others`` seconds in each computation of
    one second.
    """

    def __init__(self, others: float, monkeypatch: pytest.MonkeyPatch):
        self.others, self.now, self.worked = others, 0.0, 0.0
        monkeypatch.setattr(throttle.time, "sleep", self.sleep)
        monkeypatch.setattr(throttle.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(throttle.time, "thread_time", lambda: self.worked)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def compute(self) -> None:
        self.now, self.worked = self.now + 1 + self.others, self.worked + 1

    def stretched(self, speed: float, threads: int = 1) -> float:
        """Seconds of ten computations."""
        return self.seconds(lambda: stretched(self.compute, CPU), speed, threads)

    def seconds(
        self, action: Callable[[], object], speed: float, threads: int
    ) -> float:
        """Of ten of these."""
        before, start = torch.get_num_threads(), self.now
        try:
            torch.set_num_threads(threads)
            set_speed(speed)
            for _ in range(10):
                action()
            return self.now - start
        finally:
            set_speed(1.0)
            torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("speed", "others", "threads", "seconds"),
    [
        (0.5, 0.0, 1, 20.0),
        (0.5, 0.6, 1, 20.0),  # slept less
        (0.5, 1.5, 1, 25.0),  # there was nothing left to sleep
        (0.25, 1.5, 1, 40.0),
        (0.5, 0.5, 2, 30.0),  # of several threads only the first is known
        (1.0, 0.5, 1, 15.0),  # nothing makes good for it
    ],
)
def test_a_slowed_device_is_no_slower_on_a_shared_core(
    speed: float,
    others: float,
    threads: int,
    seconds: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Shared(others, monkeypatch).stretched(speed, threads) == pytest.approx(
        seconds
    )


@pytest.mark.parametrize(
    ("speed", "wait", "seconds"),
    [
        (0.5, 0.003, 20.003),  # nothing follows the last one
        (0.5, 0.02, 20.2 - 9 * throttle.LATE),  # no more than a turn of others
        (1.0, 0.003, 10.03),  # nothing makes good for it
    ],
)
def test_a_slowed_device_sleeps_less_for_what_it_waited_between_computations(
    speed: float,
    wait: float,
    seconds: float,
    monkeypatch: pytest.MonkeyPatch,
    waited: list[float],
) -> None:
    shared = Shared(0.0, monkeypatch)

    def message() -> None:
        stretched(shared.compute, CPU)
        shared.now += wait
        waited.append(wait)

    assert shared.seconds(message, speed, 1) == pytest.approx(seconds)


def test_what_is_measured_makes_good_for_nothing_before_it(
    monkeypatch: pytest.MonkeyPatch, waited: list[float]
) -> None:
    shared = Shared(0.0, monkeypatch)
    set_speed(0.5)
    try:
        stretched(shared.compute, CPU)
        waited.append(0.003)
        assert timed(
            lambda: stretched(shared.compute, CPU), CPU, lambda: shared.now
        ) == pytest.approx(2.0)
    finally:
        set_speed(1.0)


@pytest.mark.parametrize("speed", [1.0, 0.5])
def test_listeners_are_told_the_wall_and_the_threads_own_clock(
    speed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others have the core for half a second of each."""
    shared, heard = Shared(0.5, monkeypatch), list[Computation]()
    with throttle.listening(heard.append):
        shared.stretched(speed)
    seconds = 1.5 if speed == 1 else 2.0
    assert [c.own_s for c in heard] == pytest.approx([1.0] * 10)
    assert [c.end - c.start for c in heard] == pytest.approx([seconds] * 10)


@pytest.mark.parametrize(("threads", "again"), [(1, False), (1, True), (2, True)])
def test_both_passes_of_a_node_are_stretched(
    threads: int, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes a second; what backward computes again for a checkpoint is stretched
    by itself, and once.
    """
    shared = Shared(0.0, monkeypatch)

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            shared.compute()
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            if again:
                stretched(shared.compute, CPU)
            shared.compute()
            return g

    def passes() -> None:
        both_stretched(
            lambda: Node.apply(torch.ones(1, requires_grad=True)), CPU
        ).sum().backward()  # type: ignore[no-any-return]

    assert shared.seconds(passes, 0.5, threads) == pytest.approx(
        60.0 if again else 40.0
    )


def watched(kind: SplitKind) -> Differences:
    """With a listener to what is computed, as while tuning."""
    heard: list[float] = []
    with throttle.listening(lambda seen: heard.append(seen.end - seen.start)):
        found = standalone(kind, (1, 1), "split", {"padding": 1})
    return found | {"nothing was computed": 0.0 if len(heard) >= 2 else 1.0}


@pytest.mark.parametrize("kind", IMAGE_KINDS)
def test_a_convolution_whose_seconds_are_told(kind: SplitKind) -> None:
    assert_same(on_ranks(2, watched, kind))
