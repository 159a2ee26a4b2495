"""Steps that take turns, the pulses within them, and what they would have taken at the
usual speed.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hetconv.autotune.launch import throttle
from hetconv.autotune.measure import paired_rounds
from hetconv.autotune.measure.model_inputs import ModelInputs
from hetconv.autotune.measure.paired_rounds import (
    BEATS,
    EVERY,
    Paced,
    paced_rounds,
    paired,
    pulses_of,
    until_all_are_done,
)
from hetconv.autotune.measure.timer import WARM_S
from hetconv.autotune.search.race import Alone, Usual, step_alone
from hetconv.comm.rank_group import rank_group_of
from hetconv.cost.estimator import StepEstimator
from hetconv.planner.candidates import Candidates
from hetconv.planner.make_plan import PLANNED, make_plan
from hetconv.schemas.cluster_profile import Alone as Rested
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import SINGLE_DEVICE, Mode
from hetconv.tracing.tracer import capture
from tests.nets import Chain, splits_of
from tests.spawn import on_ranks

CPU = torch.device("cpu")


class Clock:
    """Stands for the time, in which nothing but pulses of a second passes."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def beat(self) -> float:
        self.now += 1.0
        return 0.25


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    monkeypatch.setattr(paired_rounds, "time", made)
    monkeypatch.setattr(paired_rounds, "pulse", lambda _: made.beat)
    yield made
    assert throttle.as_it_is()  # nobody listens or visits any more


def visit(at_work_s: float = WARM_S) -> None:
    """By a thread that is at work for so long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(throttle, "at_work_s", lambda: at_work_s)
        for visitor in throttle._visitors:
            visitor()


def test_pulses_within_a_step_take_a_small_part_of_it(clock: Clock) -> None:
    with paired_rounds._Pulses.within(CPU) as found:
        for clock.now in (10.0, 12.0, 11.0 + EVERY - 1, 11.0 + EVERY, 12.0 + EVERY):
            visit()
    assert (found.pulse_s, found.took_s) == ([0.25, 0.25], 2.0)


def test_no_pulse_is_taken_soon_after_a_pause(clock: Clock) -> None:
    with paired_rounds._Pulses.within(CPU) as found:
        visit(WARM_S / 2)
        assert found.pulse_s == []
        visit(WARM_S)
        assert found.pulse_s == [0.25]


def test_no_pulse_is_taken_after_a_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each computes, is visited, and sleeps: a core that just slept would take longer
    for a pulse.
    """
    done: list[str] = []
    ticks = itertools.count()
    monkeypatch.setattr(
        paired_rounds, "pulse", lambda _: lambda: done.append("pulse") or 0.25
    )
    monkeypatch.setattr(throttle.time, "sleep", lambda _: done.append("sleep"))
    monkeypatch.setattr(paired_rounds, "EVERY", 0)
    monkeypatch.setattr(paired_rounds, "WARM_S", 0.0)
    monkeypatch.setattr(throttle, "_seen", throttle._Seen(0.0, 0.0, 0.0))
    # What had to wait for its core sleeps less.
    monkeypatch.setattr(
        throttle, "_now", lambda: throttle._Clocks(*(float(next(ticks)),) * 2)
    )
    throttle.set_speed(0.5)
    try:
        with paired_rounds._Pulses.within(CPU):
            throttle.stretched(
                lambda: torch.randn(300, 300) @ torch.randn(300, 300), CPU
            )
    finally:
        throttle.set_speed(1.0)
    assert done == ["pulse", "sleep"]


def test_a_gpu_is_not_made_to_wait_within_a_step(clock: Clock) -> None:
    with paired_rounds._Pulses.within(torch.device("cuda")):
        assert throttle._visitors == []


def test_a_step_is_as_long_as_without_the_pulses_of_one_rank() -> None:
    ranks = [
        paired_rounds._Timed(5.0, 1.0, (1.0, 3.0)),
        paired_rounds._Timed(5.5, 0.5, (2.0,)),
    ]
    assert paired_rounds._of_all(ranks) == Paced(4.5, (1.5, 2.0))
    assert paired_rounds._of_all([paired_rounds._Timed(5.0, 0.0, ())]) == Paced(5.0, ())


def test_rounds_have_a_device_at_its_mean_speed() -> None:
    """Half of the time three times as slow, it does two thirds of the work."""
    assert pulses_of([Paced(1.0, (1.0, 2.0)), Paced(1.0, (3.0, 2.0))]) == (1.5, 2.0)


def ordered(turns: int) -> list[str]:
    """In which order four steps ran, in rounds that follow each other."""
    ran: list[str] = []
    steps = {name: functools.partial(ran.append, name) for name in "abcd"}
    paired(steps, turns, CPU)
    return ran[len(steps) :]  # all have run once before


def test_steps_take_turns_in_another_order_in_every_round_and_in_the_same_on_all_ranks() -> (
    None
):
    first, second = on_ranks(2, ordered, 8)
    assert first == second
    rounds_of_it = [tuple(first[k : k + 4]) for k in range(0, 32, 4)]
    assert all(sorted(one) == [*"abcd"] for one in rounds_of_it)
    assert len({one[0] for one in rounds_of_it}) > 2


def timed(computations: int) -> tuple[int, int, Any]:
    """Pulses of a step with so many computations: of all, of those within; and of the
    step in `paired`, with these.
    """
    beats, times = list[int](), list[int]()

    def beat() -> float:
        beats.append(0)
        return 1e-3

    def step() -> None:
        times.append(len(beats))
        for _ in range(computations):
            throttle.stretched(lambda: None, CPU)
        times.append(len(beats))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paired_rounds, "pulse", lambda _: beat)
        patch.setattr(paired_rounds, "EVERY", 0)
        patch.setattr(paired_rounds, "WARM_S", 0.0)
        (found,) = paced_rounds({"it": step}, 1, CPU)
        within = times[-1] - times[-2]
        assert found["it"].seconds > 0
        assert found["it"].pulse_s == (pytest.approx(1e-3),)
        so_far = len(beats)
        paired({"it": step}, 2, CPU)
    return so_far, within, len(beats) - so_far


@pytest.mark.parametrize("computations", [0, 9])
def test_pulses_come_before_a_step_and_between_its_computations(
    computations: int,
) -> None:
    assert on_ranks(1, timed, computations) == [(BEATS + computations, computations, 0)]


@pytest.mark.parametrize(("mode", "least"), [("infer", 3), ("train", 6)])
def test_a_plain_model_lets_visitors_in_between_its_modules(
    mode: Mode, least: int
) -> None:
    """Forward and backward; not within what an emulated device is slowed by."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3))
    step, heard = (
        step_alone(model, ModelInputs.of(torch.zeros(1, 3, 8, 8)), mode),
        list[float](),
    )
    step()
    with (
        throttle.visiting(lambda: heard.append(0.0)),
        throttle.listening(lambda c: heard.append(c.end - c.start)),
    ):
        step()
    assert heard[:-1] == [0.0] * (least + 1)  # the last when all is done
    assert heard[-1] > 0  # the whole, of which listeners hear


def chain() -> tuple[Any, ClusterProfile]:
    profile = ClusterProfile.from_devices(["cpu", "cpu@0.5"], link="host")
    devices = tuple(
        replace(d, pulse_s=1e-3, alone=Rested(pulse_s=5e-4)) for d in profile.devices
    )
    return capture(Chain(), torch.zeros(2, 4, 16, 16)), replace(
        profile, devices=devices
    )


def test_a_step_on_slow_devices_would_have_taken_less_on_the_usual_ones() -> None:
    graph, profile = chain()
    usual, plan = (
        Usual(StepEstimator(graph, profile, "infer")),
        make_plan(graph, profile, mode="infer"),
    )
    ways: Any = {
        "plan": plan.with_splits(splits_of(Chain(), ("height",), (3, 1))),
        "alone": Alone(0, "contiguous"),
    }
    assert usual(ways, {name: Paced(6.0, (1e-3, 1e-3)) for name in ways})["plan"] == 6.0
    seconds = usual(ways, {name: Paced(6.0, (2e-3, 2e-3)) for name in ways})
    assert 3.0 < seconds["plan"] < 6.0  # messages are as fast as ever
    assert seconds["alone"] == pytest.approx(
        1.5
    )  # while others rest a pulse takes half as long
    assert (
        usual(ways, {name: Paced(6.0, (5e-4, 9.9)) for name in ways})["alone"] == 6.0
    )  # whatever the other one does


def test_steps_are_predicted_for_the_speed_that_pulses_tell() -> None:
    graph, profile = chain()
    pricer, splits = (
        StepEstimator(graph, profile, "train"),
        splits_of(Chain(), ("height",), (3, 1)),
    )
    slow = StepEstimator(
        graph,
        replace(profile, devices=tuple(d.at_pulse(3e-3) for d in profile.devices)),
        "train",
    )
    assert pricer.step_s(PLANNED, splits, (3e-3, 3e-3)) == pytest.approx(
        slow.step_s(PLANNED, splits)
    )
    assert pricer.step_s(PLANNED, splits) == pricer.estimate(splits)[0].step_s
    alone = Candidates(graph, profile, "train").single_device(1)
    assert alone is not None
    assert pricer.step_s(SINGLE_DEVICE, alone, (9.9, 1e-3)) == pytest.approx(
        2 * pricer.step_s(SINGLE_DEVICE, alone)
    )


@pytest.mark.parametrize(("longest", "count"), [(0.0, 2), (5.0, 3), (60.0, 4)])
def test_short_steps_run_in_more_rounds_but_not_in_too_many(
    longest: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paired_rounds, "rank_group_of", lambda: None)
    monkeypatch.setattr(
        paired_rounds,
        "one_round",
        lambda *_: {"a": Paced(1.5, ()), "b": Paced(0.5, ())},
    )
    assert (
        len(
            paced_rounds(
                {"a": lambda: None, "b": lambda: None}, 2, CPU, longest, most=4
            )
        )
        == count
    )


def a_step() -> tuple[float, float, float, float]:
    """When this rank came to it, began it, was done and had seen all done; rank 1 comes
    late and takes long.
    """
    group, late = rank_group_of(), 0.2 * dist.get_rank()
    times = list[float]()

    def step() -> None:
        times.append(time.monotonic())
        time.sleep(late)
        times.append(time.monotonic())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            dist, "barrier", None
        )  # its threads wait for the system's next turn where a core is full
        time.sleep(late)
        came = time.monotonic()
        until_all_are_done(step, CPU, group)
    return came, *times, time.monotonic()


def test_ranks_of_a_host_begin_a_step_and_end_it_together_without_the_backend() -> None:
    came, began, done, saw_all_done = zip(*on_ranks(2, a_step), strict=True)
    assert max(came) <= min(began)
    assert max(done) <= min(saw_all_done)
