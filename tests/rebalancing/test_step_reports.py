"""What ranks tell of their steps, beside what the plan predicts."""

from __future__ import annotations

import copy
import dataclasses
import logging
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hetconv
from hetconv.comm.thread_time import MESSAGE_WAITS
from hetconv.errors import HetConvError, PlanError
from hetconv.runtime.step_monitor import RankTimes, StepMonitor
from hetconv.schemas.plan import Plan
from hetconv.tracing.graph import Graph
from tests.spawn import on_ranks

PROFILE = hetconv.ClusterProfile.from_devices("2xT4", link="pcie3-x16")
SLEEP_S = 0.05


class Net(nn.Module):
    """Rank 1 sleeps between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(64, 64, 3, padding=1) for _ in range(2))

    def forward(self, x: Any) -> Any:
        y = self.a(x)
        if dist.is_initialized() and dist.get_rank() == 1:
            time.sleep(SLEEP_S)
        return self.b(y)


def planned() -> tuple[nn.Module, Graph, Plan]:
    plain = nn.Sequential(*Net().children())
    graph = hetconv.capture(copy.deepcopy(plain), torch.zeros(1, 64, 512, 512))
    plan = hetconv.make_plan(graph, PROFILE)
    names = dict(zip(("0", "1"), ("a", "b"), strict=True))
    layers = {names[name]: of for name, of in plan.layers.items()}
    return Net(), graph, dataclasses.replace(plan, layers=layers)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def measured() -> tuple[hetconv.StepReport, hetconv.StepReport | None, list[str]]:
    net, _, plan = planned()
    model, lines, logged = hetconv.parallelize(net, plan), Lines(), None
    logging.getLogger("hetconv").addHandler(lines)
    logging.getLogger("hetconv").setLevel(logging.INFO)
    monitor = hetconv.monitor(model, plan, log_every=5)
    for _ in range(5):
        model(torch.rand(1, 64, 32, 32)).sum().backward()
        logged = monitor.step()
    report = monitor.report()
    monitor.stop()
    logging.getLogger("hetconv").removeHandler(lines)
    before = monitor.report()
    model(torch.rand(1, 64, 32, 32))
    monitor.step()
    assert monitor.last(1)[0, 1:].tolist() == [0.0, 0.0]
    assert before.busy_s == report.busy_s
    return report, logged, lines.lines


def test_a_rank_that_sleeps_is_told_as_slower_than_planned() -> None:
    results = on_ranks(2, measured)
    assert results[0][0] == results[1][0]
    report, logged, lines = results[0]
    assert logged == report
    assert report.busy_s[1] >= SLEEP_S
    assert report.busy_s[1] > report.busy_s[0]
    assert report.waited_s[0] > report.waited_s[1]
    slow = report.slowdowns
    assert slow is not None
    assert lines == [str(report)]
    assert f"rank 1 takes {slow[1]:.2f} times as long as planned" in lines[0]
    assert not results[1][2]


def with_gain() -> hetconv.StepReport:
    plain = nn.Sequential(*(nn.Conv2d(64, 64, 3, padding=1) for _ in range(2)))
    graph = hetconv.capture(copy.deepcopy(plain), torch.zeros(1, 64, 512, 512))
    plan = hetconv.make_plan(graph, PROFILE)
    model = hetconv.parallelize(plain, plan)
    monitor = hetconv.monitor(model, plan, graph=graph, profile=PROFILE)
    predicted = monitor.report().predicted_busy_s
    assert predicted is not None
    slow = 3.0 if dist.get_rank() == 0 else 1.0

    class Script:
        def take(self) -> RankTimes:
            return RankTimes(predicted[dist.get_rank()] * slow, 0.0)

    script: Any = Script()
    monitor._passes = script
    monitor.step()
    return monitor.report()


def test_a_report_tells_what_another_split_would_save() -> None:
    first, second = on_ranks(2, with_gain)
    assert first == second
    assert first.slowdowns == pytest.approx((3.0, 1.0))
    # Half of the rows at a third of the speed, instead of a quarter, and messages.
    assert first.gain is not None
    assert 0.4 < first.gain < 0.5
    assert "another split would save" in str(first)


def refuses() -> list[str]:
    net, graph, plan = planned()
    model = hetconv.parallelize(net, plan)
    wrong: list[tuple[type[HetConvError], dict[str, Any]]] = [
        (HetConvError, {"log_every": -1}),
        (HetConvError, {"plan": plan, "graph": graph}),
        (
            PlanError,
            {
                "plan": plan,
                "graph": graph,
                "profile": hetconv.ClusterProfile.from_devices("3xT4"),
            },
        ),
    ]
    said = []
    for kind, arguments in wrong:
        with pytest.raises(kind) as e:
            hetconv.monitor(model, **arguments)
        said.append(str(e.value))
    return said


def test_arguments_that_do_not_fit_are_refused() -> None:
    for said in on_ranks(2, refuses):
        assert "log_every is -1" in said[0]
        assert "give all of them, or neither graph nor profile" in said[1]
        assert "the profile has 3 devices, but the model is on 2 ranks" in said[2]


class Event:
    """An event of a GPU that is over when the test says so; times are in milliseconds."""

    now, over = 0.0, -1.0

    def __init__(self) -> None:
        self.at = Event.now

    def query(self) -> bool:
        return self.at <= Event.over

    def elapsed_time(self, last: Event) -> float:
        return last.at - self.at


def test_times_of_a_gpu_are_read_once_its_events_are_over() -> None:
    monitor = StepMonitor(Event)

    def step(compute_ms: float, wait_ms: float) -> RankTimes:
        with monitor.forward():
            Event.now += compute_ms
            with MESSAGE_WAITS:
                Event.now += wait_ms
        with MESSAGE_WAITS:  # between passes nothing is measured
            Event.now += 7
        return monitor.take()

    assert step(10, 3) == RankTimes(0.0, 0.0)
    assert step(20, 4) == RankTimes(0.0, 0.0)  # the host is ahead: nothing waits
    Event.over = Event.now
    assert step(30, 5) == pytest.approx(RankTimes(0.020, 0.004))
    assert step(40, 6) == pytest.approx(RankTimes(0.020, 0.004))
    Event.over = Event.now
    assert step(50, 7) == pytest.approx(RankTimes(0.040, 0.006))
    assert MESSAGE_WAITS.mark is None
