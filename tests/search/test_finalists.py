"""Who is left of the plans that were nearly the fastest, and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import hypot
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetconv.autotune.measure.paired_rounds import Paced, Round
from hetconv.autotune.search import finalists as module
from hetconv.autotune.search.calibrate import MISFIT
from hetconv.autotune.search.finalists import (
    HARDLY,
    HEATS_PART,
    REFERENCE,
    RIVALS,
    Final,
    Rival,
)
from hetconv.autotune.search.race import Alone, Order, Outcome
from hetconv.autotune.search.study import ROUNDS, TrialFailedError
from hetconv.cost.estimator import StepEstimator
from hetconv.planner.candidates import EVEN
from hetconv.planner.make_plan import Contender, contenders, make_plan
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import Prediction
from hetconv.schemas.tuning_results import TunedPlan
from hetconv.tracing.tracer import capture
from tests.nets import Chain, splits_of

USUAL, SLOW = (1e-3, 1e-3), (2e-3, 2e-3)  # pulses


class Steps:
    """Stands for a race: every way takes its ``seconds``, by the end of its name, in
    every round; or fails.

    ``noise``: by name too, factors of these in rounds that follow on each other.
    """

    pulse_s = USUAL

    def __init__(
        self,
        seconds: dict[str, float],
        failing: str = "none",
        noise: dict[str, list[float]] | None = None,
    ):
        self.seconds, self.failing, self.orders = seconds, failing, list[Order]()
        self.noise = noise or {}

    def lead(self, order: Order) -> Outcome:
        self.orders.append(order)
        if order.what == self.failing or (self.failing == EVEN and EVEN in order.ways):
            raise TrialFailedError("on rank 1: there is no memory")
        return Outcome([self.took(order, k) for k in range(order.rounds)])

    def took(self, order: Order, k: int) -> Round:
        names = {name: name.split(": ")[-1] for name in order.ways}
        noise = {
            name: of[k % len(of)] if (of := self.noise.get(n)) else 1.0
            for name, n in names.items()
        }
        return {
            name: Paced(self.seconds[n] * noise[name], self.pulse_s)
            for name, n in names.items()
        }


def final(steps: Steps) -> tuple[Final, list[Contender]]:
    """With five plans of a chain."""
    graph = capture(Chain(), torch.zeros(2, 4, 16, 16))
    profile = ClusterProfile.from_devices(["cpu", "cpu@0.5"], link="host")
    profile = replace(
        profile, devices=tuple(replace(d, pulse_s=1e-3) for d in profile.devices)
    )
    found = {c.name: c for c in contenders(graph, profile)}
    plans = [
        Contender(
            f"p{k}",
            splits_of(Chain(), ("height",), (9 + k, 7 - k)),
            Prediction(1.0, 0.0, (), (), ()),
            {},
        )
        for k in range(5)
    ]
    job = SimpleNamespace(budget=100.0, mode="train")
    run: Any = SimpleNamespace(
        job=job,
        race=steps,
        graph=graph,
        device=torch.device("cpu"),
        say=SimpleNamespace(line=lambda _: None),
    )
    alone = next(c for name, c in found.items() if name.endswith("(0: cpu)"))
    even = "even split by height", found["even split by height"]
    return Final(
        run, make_plan(graph, profile), Alone(0, "contiguous"), alone, even, profile
    ), plans


def plan_of(
    of: Final, tried: list[Rival], untried: Sequence[Contender] = ()
) -> TunedPlan | None:
    found = of.plan(tried, untried)
    return found.plan if found is not None else None


STEPS = {
    REFERENCE: 1.0,
    EVEN: 0.8,
    "p0": 0.63,
    "p1": 0.62,
    "p2": 0.61,
    "p3": 0.60,
    "p4": 0.1,
}


@pytest.fixture(autouse=True)
def _by_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the catalogue's devices are predicted to take is not what these tests are about."""
    monkeypatch.setattr(module, "PREDICTED", 1e6)


def test_the_slower_half_of_the_rivals_goes_after_each_heat() -> None:
    steps = Steps(STEPS)
    of, plans = final(steps)
    found = plan_of(
        of,
        [Rival(c, 0.5 * (1 + k * HARDLY / RIVALS), 0.0) for k, c in enumerate(plans)],
    )
    ways = [{name.split(": ")[-1] for name in order.ways} for order in steps.orders]
    assert ways == [
        {REFERENCE, "p0", "p1", "p2", "p3"},
        {REFERENCE, "p2", "p3"},
        {REFERENCE, "p3", EVEN},
    ]
    assert sum(order.least_s for order in steps.orders[:2]) == pytest.approx(
        100 * HEATS_PART
    )
    assert found is not None
    assert (found.name, found.step_s, found.alone_s, found.even_s, found.trials) == (
        "p3",
        0.6,
        1.0,
        0.8,
        5,
    )
    assert found.splits == plans[3].splits


def test_what_all_races_say_of_every_plan_is_told() -> None:
    of, plans = final(Steps(STEPS, noise={"p0": [1.0, 1.1]}))
    found = of.plan([Rival(plans[0], 0.50, 0.0), Rival(plans[1], 0.51, 0.0)])
    assert found is not None
    seen = {rival.contender.name: rival for rival in found.seen}
    assert {name: rival.part for name, rival in seen.items()} == {
        "p0": 0.63,
        "p1": 0.62,
        "even split by height": 0.8,
    }
    assert seen["p0"].noise > seen["p1"].noise == 0
    assert found.reference_s == [1.0, 1.0]  # of the heat and the closing


def test_an_even_split_that_was_a_rival_too_is_told_of_once() -> None:
    """In the closing it took another part of the steps than in the heat."""
    of, plans = final(Steps(STEPS | {"even split by height": 0.625}))
    assert of.even is not None
    found = of.plan([Rival(plans[0], 0.50, 0.0), Rival(of.even[1], 0.51, 0.0)])
    assert found is not None
    assert [rival.contender.name for rival in found.seen] == [
        "p0",
        "even split by height",
    ]
    assert 0.625 <= found.seen[1].part <= 0.8
    assert found.seen[1].noise > 0


@pytest.mark.parametrize(
    ("noise", "name"), [([0.5, 1.0, 2.0, 1.0], "p0"), ([1.0], "p1")]
)
def test_a_noisy_heat_does_not_overturn_what_was_known(
    noise: list[float], name: str
) -> None:
    of, plans = final(Steps(STEPS | {"p0": 0.62, "p1": 0.61}, noise={"p0": noise}))
    found = plan_of(of, [Rival(plans[0], 0.50, 0.0), Rival(plans[1], 0.52, 0.0)])
    assert found is not None
    assert found.name == name


def test_what_is_kept_is_of_devices_as_fast_as_they_usually_are() -> None:
    steps = Steps(STEPS | {"p0": 0.1})
    steps.pulse_s = SLOW
    of, plans = final(steps)
    found = plan_of(of, [Rival(plans[0], 0.1, 0.0)])
    assert found is not None
    assert found.alone_s == pytest.approx(STEPS[REFERENCE] / 2)
    assert found.even_s is not None
    assert 0.05 < found.step_s < 0.1  # messages are as fast as ever
    assert 0.5 * STEPS[EVEN] < found.even_s < STEPS[EVEN]
    assert found.predicted_s == StepEstimator(
        of.run.graph, of.corrected, "train"
    ).step_s("p0", plans[0].splits)


def test_who_is_far_off_is_not_raced_again() -> None:
    steps = Steps(STEPS)
    of, plans = final(steps)
    found = plan_of(
        of, [Rival(plans[0], 0.5, 0.0), Rival(plans[3], 0.5 * (1 + 2 * HARDLY), 0.0)]
    )
    (closing,) = steps.orders
    assert closing.least_s == 100 * HEATS_PART  # that no heat needed
    assert found is not None
    assert found.name == "p0"


@pytest.mark.parametrize(
    ("fails", "name"), [("none", "p4"), ("the fastest plans", "p0")]
)
def test_who_was_not_tried_but_may_be_the_fastest_races_too(
    fails: str, name: str
) -> None:
    """Predicted of all about the same: what was tried took far longer."""
    steps = Steps(STEPS, fails)
    of, plans = final(steps)
    found = plan_of(
        of, [Rival(plans[0], 9.0, 0.0), Rival(plans[1], 9.1, 0.0)], plans[4:]
    )
    assert {n.split(": ")[-1] for n in steps.orders[0].ways} == {REFERENCE, "p0", "p4"}
    assert found is not None
    assert found.name == name


def test_without_time_for_two_the_best_that_ran_is_the_plan() -> None:
    steps = Steps(STEPS)
    of, plans = final(steps)
    of.run.job.budget = 1e-3
    found = plan_of(
        of, [Rival(plans[0], 9.0, 0.0), Rival(plans[1], 9.1, 0.0)], plans[4:]
    )
    assert len(steps.orders) == 1
    assert found is not None
    assert found.name == "p0"


@pytest.mark.parametrize(
    ("noise", "least", "most"), [(0.0, 0.4, 0.43), (0.1, 0.43, 0.46), (1.0, 0.49, 0.5)]
)
def test_a_noisy_step_counts_less_than_what_was_predicted(
    monkeypatch: pytest.MonkeyPatch, noise: float, least: float, most: float
) -> None:
    monkeypatch.undo()
    known = Rival(final(Steps(STEPS))[1][0], 0.5, module.PREDICTED)
    assert least < known.seen(0.4, hypot(MISFIT, noise)).part < most


def test_a_plan_that_does_not_beat_the_device_alone_is_not_the_plan() -> None:
    of, plans = final(Steps(STEPS | {"p0": 0.985}))
    found = plan_of(of, [Rival(plans[0], 0.5, 0.0)])
    assert found is not None
    assert found.name == found.alone == "fastest device alone (0: cpu)"
    assert (found.step_s, found.trials) == (1.0, 1)


@pytest.mark.parametrize("failing", ["the fastest plans", EVEN])
def test_what_does_not_run_side_by_side_leaves_what_ran_by_itself(failing: str) -> None:
    steps = Steps(STEPS, failing)
    of, plans = final(steps)
    found = plan_of(of, [Rival(plans[0], 0.5, 0.0), Rival(plans[1], 0.51, 0.0)])
    assert found is not None
    assert found.name == ("p0" if failing != EVEN else "p1")
    assert found.even == (None if failing == EVEN else "even split by height")
    assert steps.orders[0].rounds == ROUNDS


def test_without_a_split_the_device_alone_is_the_plan() -> None:
    of, _ = final(Steps(STEPS))
    found = of.undisputed("no split ran")
    assert found is not None
    assert (found.name, found.step_s, found.trials) == (found.alone, 1.0, 0)
    assert replace(of, alone=None).undisputed("no split ran") is None
    assert (
        final(Steps(STEPS, f"{found.alone} again"))[0].undisputed("no split ran")
        is None
    )
