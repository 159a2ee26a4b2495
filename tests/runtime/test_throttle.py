"""Devices slowed on purpose: their names, and for how long they sleep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hetconv.autotune.measure.timer import timed
from hetconv.errors import HetConvError
from hetconv.runtime import throttle
from hetconv.runtime.throttle import (
    Computation,
    DeviceName,
    set_speed,
    throttled,
    throttled_with_backward,
)
from hetconv.sharding.split import SplitKind
from tests.equivalence import Differences, assert_same
from tests.nets import IMAGE_KINDS
from tests.nn.test_layers import standalone
from tests.spawn import on_ranks

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def core_waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of each time that this thread waited for its core; tests append to them."""
    seconds: list[float] = []
    monkeypatch.setattr(throttle, "waits_s", lambda: sum(seconds))
    return seconds


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Seconds of each sleep. Whoever reads a clock finds it a second later each time."""
    seconds: list[float] = []
    monkeypatch.setattr(throttle.time, "sleep", seconds.append)
    for name in ("perf_counter", "thread_time"):
        ticks = iter(range(100))
        monkeypatch.setattr(throttle.time, name, lambda ticks=ticks: float(next(ticks)))
    yield seconds
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
def test_a_name_is_read_and_written(text: str, name: DeviceName) -> None:
    assert DeviceName.parse(text) == name
    assert DeviceName.parse(str(name)) == name


def test_only_the_name_of_a_slowed_device_has_a_speed() -> None:
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
def test_a_text_that_names_no_device_is_refused(text: str) -> None:
    with pytest.raises(HetConvError, match="device"):
        DeviceName.parse(text)


@pytest.mark.parametrize(("speed", "sleep"), [(0.5, 1.0), (0.25, 3.0), (0.1, 9.0)])
def test_a_slowed_device_sleeps_for_the_rest_of_its_time(
    speed: float, sleep: float, sleeps: list[float]
) -> None:
    set_speed(speed)
    assert throttled(lambda: "done", CPU) == "done"
    assert sleeps == pytest.approx([sleep])


def test_a_device_at_full_speed_never_sleeps(sleeps: list[float]) -> None:
    set_speed(0.5)
    set_speed(1.0)
    assert throttled(lambda: 3, CPU) == 3
    assert sleeps == []


@pytest.mark.parametrize("speed", [0.0, -0.5, 1.1, float("nan")])
def test_a_speed_out_of_range_is_refused(speed: float) -> None:
    with pytest.raises(HetConvError, match="speed"):
        set_speed(speed)


def test_late_ends_of_sleeps_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
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
        throttled(compute, CPU)
    set_speed(1.0)
    assert now[0] == pytest.approx(20 * 0.02, abs=0.001)


class SharedCore:
    """The clocks of a core on which each computation takes one second.

    During each of them others have the core for ``others`` seconds.
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

    def throttled(self, speed: float, threads: int = 1) -> float:
        """Returns the seconds of ten computations."""
        return self.seconds(lambda: throttled(self.compute, CPU), speed, threads)

    def seconds(
        self, action: Callable[[], object], speed: float, threads: int
    ) -> float:
        """Returns the seconds of ten times this action."""
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
        (0.5, 0.6, 1, 20.0),  # sleeps less
        (0.5, 1.5, 1, 25.0),  # nothing is left to sleep
        (0.25, 1.5, 1, 40.0),
        (0.5, 0.5, 2, 30.0),  # the clocks of other threads are unknown
        (1.0, 0.5, 1, 15.0),  # there is no sleep to shorten
    ],
)
def test_a_slowed_device_is_no_slower_on_a_shared_core(
    speed: float,
    others: float,
    threads: int,
    seconds: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert SharedCore(others, monkeypatch).throttled(speed, threads) == pytest.approx(
        seconds
    )


@pytest.mark.parametrize(
    ("speed", "wait", "seconds"),
    [
        (0.5, 0.003, 20.003),  # no sleep follows the last wait
        (
            0.5,
            0.02,
            20.2 - 9 * throttle.MAX_TIMER_DELAY_S,
        ),  # at most the delay of a timer
        (1.0, 0.003, 10.03),  # there is no sleep to shorten
    ],
)
def test_a_slowed_device_sleeps_less_for_what_it_waited_between_computations(
    speed: float,
    wait: float,
    seconds: float,
    monkeypatch: pytest.MonkeyPatch,
    core_waits: list[float],
) -> None:
    core = SharedCore(0.0, monkeypatch)

    def message() -> None:
        throttled(core.compute, CPU)
        core.now += wait
        core_waits.append(wait)

    assert core.seconds(message, speed, 1) == pytest.approx(seconds)


def test_a_timed_computation_is_no_shorter_for_earlier_waits(
    monkeypatch: pytest.MonkeyPatch, core_waits: list[float]
) -> None:
    core = SharedCore(0.0, monkeypatch)
    set_speed(0.5)
    try:
        throttled(core.compute, CPU)
        core_waits.append(0.003)
        assert timed(
            lambda: throttled(core.compute, CPU), CPU, lambda: core.now
        ) == pytest.approx(2.0)
    finally:
        set_speed(1.0)


@pytest.mark.parametrize("speed", [1.0, 0.5])
def test_listeners_are_given_wall_time_and_thread_time(
    speed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others have the core for half a second of each computation."""
    core, computations = SharedCore(0.5, monkeypatch), list[Computation]()
    with throttle.listen_to_computations(computations.append):
        core.throttled(speed)
    seconds = 1.5 if speed == 1 else 2.0
    assert [c.thread_s for c in computations] == pytest.approx([1.0] * 10)
    assert [c.end - c.start for c in computations] == pytest.approx([seconds] * 10)


@pytest.mark.parametrize(("threads", "again"), [(1, False), (1, True), (2, True)])
def test_both_passes_of_a_node_are_throttled(
    threads: int, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pass takes a second, and so does what backward computes again for a
    checkpoint, which is throttled by itself and only once.
    """
    core = SharedCore(0.0, monkeypatch)

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            core.compute()
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            if again:
                throttled(core.compute, CPU)
            core.compute()
            return g

    def passes() -> None:
        throttled_with_backward(
            lambda: Node.apply(torch.ones(1, requires_grad=True)), CPU
        ).sum().backward()  # type: ignore[no-any-return]

    assert core.seconds(passes, 0.5, threads) == pytest.approx(60.0 if again else 40.0)


def with_listener(kind: SplitKind) -> Differences:
    """Compares a convolution with the plain one while somebody listens, as in tuning."""
    computations: list[Computation] = []
    with throttle.listen_to_computations(computations.append):
        found = standalone(kind, (1, 1), "split", {"padding": 1})
    return found | {"nothing was computed": 0.0 if len(computations) >= 2 else 1.0}


@pytest.mark.parametrize("kind", IMAGE_KINDS)
def test_a_listener_changes_no_result(kind: SplitKind) -> None:
    assert_same(on_ranks(2, with_listener, kind))
