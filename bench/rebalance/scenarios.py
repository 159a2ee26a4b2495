"""Training on two ranks of which one becomes slow, and recovers: steps of three models in turn.

One keeps its plan, one is rebalanced, and one has the plan that is tuned for the slow
state.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hetconv
from bench.shared.machine import RIVAL
from examples.edsr import EDSR, SCALE
from hetconv.autotune.models.inputs import InputSpec, TensorSpec
from hetconv.autotune.search.job import Job
from hetconv.autotune.search.tune import tune
from hetconv.comm.rank_group import all_gather_object, rank_group_of
from hetconv.rebalancing.rebalancer import Rebalancer
from hetconv.runtime.throttle import DeviceName, set_speed
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import Plan
from hetconv.tracing.graph import Graph

TRIALS, BUDGET_S = 8, 75
SLOW_RANK, SLOW_SPEED = 1, 0.4
RIVAL_SPEED = 0.5  # that a busy process leaves of a core

Slowed = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """An EDSR and the height and width of its image."""

    blocks: int
    size: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the image."""
        return (1, 3, self.size, self.size)

    def model(self) -> nn.Module:
        """Returns the plain model, with the same parameters each time."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return EDSR(blocks=self.blocks)

    def graph(self) -> Graph:
        """Returns what `capture` sees of it."""
        return hetconv.capture(self.model(), torch.zeros(self.shape))


SMALL, EXAMPLE = Case(4, 64), Case(8, 144)
"""The second one is that of examples/super_resolution.py."""


@dataclass(frozen=True)
class Schedule:
    """Which of the steps are slow: from ``slow_from`` up to ``slow_until``."""

    steps: int = 400
    slow_from: int = 50
    slow_until: int = 300


@dataclass
class Course:
    """Seconds of each step.

    Attributes:
        fixed_s: Of the plan that stays.
        rebalanced_s: Of the plan that changes.
        tuned_s: Of the plan that is tuned for the slow state.
        control_s: Of `Rebalancer.step`, which is not part of ``rebalanced_s``.
        busy_s: Of each rank's busy part, under the plan that stays: (rank, step).
        decisions: Lines of the rebalancer's record.
    """

    fixed_s: list[float] = field(default_factory=list)
    rebalanced_s: list[float] = field(default_factory=list)
    tuned_s: list[float] = field(default_factory=list)
    control_s: list[float] = field(default_factory=list)
    busy_s: list[list[float]] = field(default_factory=list)
    decisions: list[dict[str, Any]] = field(default_factory=list)


class Training:
    """A model in training under a plan."""

    def __init__(self, case: Case, plan: Plan):
        self.model: nn.Module = hetconv.parallelize(case.model(), plan)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-4)
        torch.manual_seed(0)
        self._x = torch.rand(case.shape)
        self._y = torch.rand(1, 3, SCALE * case.size, SCALE * case.size)

    def step(self) -> None:
        """Makes one step."""
        self.optimizer.zero_grad()
        loss: Tensor = (self.model(self._x) - self._y).abs().mean()
        loss.backward()
        self.optimizer.step()


def tuned_profile(case: Case, names: tuple[str, ...]) -> ClusterProfile:
    """Returns what `hetconv autotune` measures for devices of these names; collective."""
    devices = tuple(map(DeviceName.parse, names))
    set_speed(devices[dist.get_rank()].speed)
    with tempfile.TemporaryDirectory() as folder:
        inputs, output = (
            InputSpec((TensorSpec(case.shape),)),
            Path(folder, "cluster.json"),
        )
        job = Job(
            devices,
            "examples.edsr:EDSR",
            json.dumps({"blocks": case.blocks}),
            inputs,
            "train",
            trials=TRIALS,
            budget=BUDGET_S,
            output=output,
            seed=0,
        )
        profile = tune(job).profile
    set_speed(1.0)
    return profile


def seconds(run: Callable[[], Any]) -> float:
    """Returns the seconds until all ranks have run something."""
    dist.barrier()
    start_s = time.perf_counter()
    run()
    dist.barrier()
    return time.perf_counter() - start_s


@contextmanager
def busy_process() -> Iterator[None]:
    """Context in which another process computes on the core of the slow rank."""
    if dist.get_rank() != SLOW_RANK:
        yield
        return
    rival = subprocess.Popen([sys.executable, "-c", RIVAL])
    os.sched_setaffinity(rival.pid, os.sched_getaffinity(0))
    try:
        yield
    finally:
        rival.kill()
        rival.wait()


@contextmanager
def throttled() -> Iterator[None]:
    """Context in which the slow rank has 0.4 of its speed."""
    set_speed(SLOW_SPEED if dist.get_rank() == SLOW_RANK else 1.0)
    try:
        yield
    finally:
        set_speed(1.0)


def course(
    slowed: Slowed,
    schedule: Schedule,
    profile: ClusterProfile,
    graph: Graph,
    tuned: Plan,
) -> Course:
    """Trains the three models in turn; collective."""
    plan = hetconv.make_plan(graph, profile, mode="train")
    fixed, moving, best = (Training(SMALL, p) for p in (plan, plan, tuned))
    found, own_busy_s, monitor = Course(), list[float](), hetconv.monitor(fixed.model)
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "decisions.jsonl")
        rebalancer = Rebalancer(
            moving.model, moving.optimizer, plan, graph, profile, record=record
        )

        def run(count: int) -> None:
            for _ in range(count):
                found.fixed_s.append(seconds(fixed.step))
                monitor.step()
                own_busy_s.append(float(monitor.last(1)[0, 1]))
                found.tuned_s.append(seconds(best.step))
                rebalancer.monitor.resume()
                found.rebalanced_s.append(seconds(moving.step))
                found.control_s.append(seconds(rebalancer.step))

        run(schedule.slow_from)
        with slowed():
            run(schedule.slow_until - schedule.slow_from)
        run(schedule.steps - schedule.slow_until)
        found.decisions = _lines(record)
    found.busy_s = all_gather_object(rank_group_of(), own_busy_s)
    return found


@dataclass
class Quiet:
    """Steps in which no device changes, with and without a rebalancer, in turn.

    Attributes:
        plain_s: Seconds of each step without.
        controlled_s: Seconds of each step with it, `Rebalancer.step` among them.
        busy_s: Of each rank's busy part: (rank, step).
        decisions: Lines of the rebalancer's record.
    """

    plain_s: list[float] = field(default_factory=list)
    controlled_s: list[float] = field(default_factory=list)
    busy_s: list[list[float]] = field(default_factory=list)
    decisions: list[dict[str, Any]] = field(default_factory=list)


def quiet(case: Case, steps: int, profile: ClusterProfile) -> Quiet:
    """Trains without a change of speed; collective."""
    graph = case.graph()
    plan = hetconv.make_plan(graph, profile, mode="train")
    training, found, own_busy_s = Training(case, plan), Quiet(), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "decisions.jsonl")
        rebalancer = Rebalancer(
            training.model, training.optimizer, plan, graph, profile, record=record
        )

        def controlled() -> None:
            training.step()
            rebalancer.step()

        for _ in range(steps):
            rebalancer.monitor.start()
            found.controlled_s.append(seconds(controlled))
            rebalancer.monitor.stop()
            own_busy_s += rebalancer.monitor.last(1)[:, 1].tolist()
            found.plain_s.append(seconds(training.step))
        found.decisions = _lines(record)
    found.busy_s = all_gather_object(rank_group_of(), own_busy_s)
    return found


def _lines(record: Path) -> list[dict[str, Any]]:
    if dist.get_rank() or not record.exists():
        return []
    return [json.loads(line) for line in record.read_text().splitlines()]


def measure(schedule: Schedule, quiet_steps: int, paired_steps: int) -> dict[str, Any]:
    """Runs all scenarios on every rank; returns courses and quiet runs by name."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[dist.get_rank() % len(cores)]})
    graph, equal = SMALL.graph(), tuned_profile(SMALL, ("cpu", "cpu"))
    slower = tuned_profile(SMALL, ("cpu", f"cpu@{SLOW_SPEED}"))
    at_rival = equal.slowed((1.0, 1 / RIVAL_SPEED))
    plans = [hetconv.make_plan(graph, p, mode="train") for p in (slower, at_rival)]
    courses = {
        "throttled": course(throttled, schedule, equal, graph, plans[0]),
        "busy process": course(busy_process, schedule, equal, graph, plans[1]),
    }
    modelled = ClusterProfile.from_devices("2xcpu", link="host")
    quiets = {
        "quiet": quiet(SMALL, quiet_steps, equal),
        "example": quiet(EXAMPLE, paired_steps, modelled),
    }
    return {name: asdict(found) for name, found in (courses | quiets).items()}
