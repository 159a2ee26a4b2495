"""The stage of whole plans, on made-up seconds: what is the plan, and what is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from math import log
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from hetconv.autotune.launch.progress import Reporter
from hetconv.autotune.measure.device_info import conditions
from hetconv.autotune.models.inputs import ModelInputs
from hetconv.autotune.search import plan_search
from hetconv.autotune.search.job import Run
from hetconv.autotune.search.plan_search import ATTEMPTS, MAX_ATTEMPTS, PlanSearch
from hetconv.autotune.search.race import (
    PlainModel,
    Race,
    TimingRequest,
    Timings,
    TrialFailedError,
)
from hetconv.autotune.search.record import COMPARED_WITH, PLANS, PlanTiming
from hetconv.cost.estimator import StepEstimator
from hetconv.planner.candidates import EVEN
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import SINGLE_DEVICE
from hetconv.schemas.tuning_results import TunedPlan
from hetconv.sharding.split import Split
from tests.cli.test_summary import PAIR, captured
from tests.spawn import on_ranks

from .test_tune import job

Splits = Mapping[str, Split]
Seconds = Callable[[Splits], float | None]


class Ran(NamedTuple):
    """What the stage finds, what it has timed and kept, and what it says."""

    profile: ClusterProfile
    requests: list[TimingRequest]
    kept: dict[tuple[str, str], Any]
    lines: list[str]

    @property
    def plan(self) -> TunedPlan:
        (plan,) = self.profile.plans
        return plan

    @property
    def timings(self) -> dict[str, PlanTiming]:
        return {t.name: t for (stage, _), t in self.kept.items() if stage == PLANS}


def searched(
    seconds: Seconds,
    alone_s: float | None = 1.0,
    known: Mapping[tuple[str, str], Any] | None = None,
    trials: int = 0,
    spent: float = 0.0,
) -> Ran:
    """Where a device alone takes ``alone_s``, and plans what ``seconds`` says by their
    splits; None fails. ``known``: what an earlier run kept.
    """
    requests, lines, kept = list[TimingRequest](), list[str](), dict(known or {})

    def lead(request: TimingRequest) -> Timings:
        took: dict[str, float] = {}
        for name, variant in request.variants.items():
            plain = isinstance(variant, PlainModel)
            found = alone_s if plain else seconds(variant.splits)
            if found is None:
                raise TrialFailedError("on rank 1: there is no memory")
            took[name] = found
        requests.append(request)
        compute_s = (0.4, 0.4) if request.record_compute else ()
        return Timings([took] * request.rounds, compute_s)

    run: Any = SimpleNamespace(
        graph=captured(),
        job=SimpleNamespace(mode="train", seed=0, budget=100.0, trials=trials),
        spent=spent,
        left_s=100.0 * (1 - spent),
        say=SimpleNamespace(
            stage=lambda *_: None,
            advance=lambda *_: None,
            line=lines.append,
            detail=lines.append,
        ),
        race=SimpleNamespace(lead=lead),
        inputs=ModelInputs.of(torch.zeros(2, 4, 16, 16)),
        device=torch.device("cpu"),
        conditions=conditions(torch.device("cpu")),
        on_gpu=False,
        passed=lambda part: lambda: spent > part,
        known=lambda stage, key, _: kept.get((stage, key)),
        keep=lambda stage, key, value: kept.update({(stage, key): value}),
    )
    profile = PlanSearch(run, ClusterProfile.from_devices(PAIR, link="host")).tune()
    return Ran(profile, requests, kept, lines)


def even(splits: Splits) -> bool:
    cut = [split for split in splits.values() if split.kind != "replicate"]
    return all(max(split.sizes) - min(split.sizes) <= 1 for split in cut)


def test_the_plan_is_what_is_fastest_beside_the_even_split_and_a_device_alone() -> None:
    ran = searched(lambda splits: 3.0 if even(splits) else 0.5)
    assert (ran.plan.step_s, ran.plan.alone_s, ran.plan.even_s) == (0.5, 1.0, 3.0)
    assert not even(ran.plan.splits)
    assert ran.plan.alone == f"{SINGLE_DEVICE} (0: cpu)"
    assert ran.plan.even is not None
    assert ran.plan.even.startswith(EVEN)
    assert ran.plan.trials == len(ran.timings) > 2
    assert all(d.corrections for d in ran.profile.devices)
    predicted = StepEstimator(captured(), ran.profile, "train")
    expected_s = predicted.step_s(ran.plan.name, ran.plan.splits)
    assert ran.plan.predicted_s == expected_s


def test_an_even_split_that_is_fastest_is_the_plan() -> None:
    ran = searched(lambda splits: 0.5 if even(splits) else 0.6)
    assert even(ran.plan.splits)
    assert (ran.plan.step_s, ran.plan.even_s) == (0.5, 0.5)


@pytest.mark.parametrize("seconds", [1.0, 1.5, None])
def test_a_device_alone_is_the_plan_where_no_split_beats_it(
    seconds: float | None,
) -> None:
    ran = searched(lambda _: seconds)
    assert ran.plan.name == ran.plan.alone
    assert (ran.plan.step_s, ran.plan.alone_s, ran.plan.even_s) == (1.0, 1.0, seconds)
    assert bool(ran.plan.trials) is (seconds is not None)


def test_a_split_that_fails_spoils_nothing_and_is_not_tried_again() -> None:
    ran = searched(lambda splits: None if even(splits) else 0.5)
    assert (ran.plan.step_s, ran.plan.even, ran.plan.even_s) == (0.5, None, None)
    failed = [t for t in ran.timings.values() if t.ratio is None]
    assert {t.failure for t in failed} == {"on rank 1: there is no memory"}
    assert any(t.name.startswith(EVEN) for t in failed)
    assert ran.plan.trials == len(ran.timings) - len(failed)
    again = searched(lambda splits: None if even(splits) else 0.5, known=ran.kept)
    assert replace(again.plan, measured=ran.plan.measured) == ran.plan


def test_guards_race_where_no_split_is_predicted_to_come_near(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan_search, "shortlist", lambda *_: [])
    slow, fast = searched(lambda _: 3.0), searched(lambda _: 0.3)
    assert (slow.plan.name, slow.plan.even_s) == (slow.plan.alone, 3.0)
    assert (fast.plan.step_s, fast.plan.trials) == (0.3, 0)
    assert slow.timings == {}


def test_without_a_device_alone_plans_are_compared_with_one_that_runs() -> None:
    ran = searched(lambda splits: 3.0 if even(splits) else 0.5, alone_s=None)
    assert (ran.plan.alone, ran.plan.alone_s) == (None, None)
    assert (ran.plan.step_s, ran.plan.even_s) == (0.5, 3.0)
    assert ran.kept[COMPARED_WITH, ""] in ran.timings


def test_nothing_is_tuned_where_nothing_runs() -> None:
    ran = searched(lambda _: None, alone_s=None)
    assert ran.profile == ClusterProfile.from_devices(PAIR, link="host")


def test_a_plan_is_given_up_beyond_the_best_one_so_far() -> None:
    ran = searched(lambda splits: 3.0 if even(splits) else 0.5)
    limits = [r.give_up_above for r in ran.requests if r.record_compute]
    assert limits[0] is None
    assert limits[-1] == pytest.approx(log(0.5))


def test_what_was_timed_is_known_to_who_resumes() -> None:
    first = searched(lambda _: 0.5)
    again = searched(lambda _: 0.5, known=first.kept)
    assert not [r for r in again.requests if r.record_compute]
    assert replace(again.plan, measured=first.plan.measured) == first.plan
    assert again.profile.devices == first.profile.devices


def test_a_plan_that_kills_ranks_is_not_tried_for_ever() -> None:
    first = searched(lambda _: 0.5)
    begun = {known: n for known, n in first.kept.items() if known[0] == ATTEMPTS}
    assert set(begun.values()) == {1}
    assert searched(lambda _: 0.5, known=begun).plan.trials == first.plan.trials
    killing = dict.fromkeys(begun, MAX_ATTEMPTS)
    ran = searched(lambda _: 0.5, known=killing)
    assert {t.failure for t in ran.timings.values()} == {
        "as a rank was killed whenever it ran"
    }


def test_one_plan_is_timed_whatever_is_left_of_the_budget() -> None:
    assert len(searched(lambda _: 0.5, spent=2.0).timings) == 1


def test_drift_between_trials_does_not_change_what_is_observed() -> None:
    """The reference takes twice as long in the second of three trials."""
    run: Any = SimpleNamespace(
        graph=captured(), job=SimpleNamespace(mode="train"), inputs=None
    )
    search = PlanSearch(run, ClusterProfile.from_devices(PAIR, link="host"))
    timing = PlanTiming(
        "it", plan_search.LogRatio(log(0.5), 0.01), 1.0, compute_s=(0.4, 0.2)
    )
    slow = timing._replace(reference_s=2.0, compute_s=(0.8, 0.4))
    failed = PlanTiming("it", None, failure="there is no memory")
    contender: Any = SimpleNamespace(splits={})
    search.timed = [(contender, t) for t in (timing, slow, timing, failed)]
    first, *others = search._observations()
    assert first.step_s == pytest.approx(0.5)
    assert list(first.compute_s) == [0.4, 0.2]
    assert others == [first, first]


def test_a_better_ratio_races_and_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    class Search:
        """Finds 12:4 in place of whatever was computed."""

        def __init__(self, run: Any, base: Any, kind: Any, computed: Any, s: float):
            self.found = plan_search.TunedRatio(
                captured().digest, "train", kind, (12, 4), 0.3, computed, 0.5, 7
            )

        def tune(self, enough: Any) -> plan_search.TunedRatio:
            return self.found

    monkeypatch.setattr(plan_search, "RatioSearch", Search)

    def seconds(splits: Splits) -> float:
        sizes = {s.sizes for s in splits.values() if s.kind == "height"}
        return 0.3 if sizes and max(sizes, key=sum) == (12, 4) else 0.5

    def of_rows(planned: Any, *_: Any) -> Any:
        return [c for c in planned if c.name == "uneven height split"]

    monkeypatch.setattr(plan_search, "shortlist", of_rows)
    ran = searched(seconds, trials=4)
    assert (ran.plan.name, ran.plan.step_s) == ("tuned height split", 0.3)
    assert ran.profile.tuned[0].weights == (12, 4)
    assert searched(seconds, trials=0).profile.tuned == ()

    def long(splits: Splits) -> float:
        return 10 * seconds(splits)

    ran = searched(long, alone_s=10.0, trials=4)  # the race takes what time is left
    assert ran.profile.tuned == ()
    assert ran.plan.step_s < 10.0


class Decided(NamedTuple):
    """What a rank knows afterwards, and how many requests it led."""

    profile: ClusterProfile
    led: int


def decided(folder: Path) -> Decided:
    """What comes of it on ranks where each split takes half of a device alone."""
    led = 0

    def lead(self: Race, request: TimingRequest) -> Timings:
        nonlocal led
        led += 1
        took = {
            name: 1.0 if isinstance(variant, PlainModel) else 0.5
            for name, variant in request.variants.items()
        }
        return Timings([took] * request.rounds, (0.4, 0.4))

    profile = ClusterProfile.from_devices(["cpu", "cpu@0.5"], link="nvlink3")
    with (
        pytest.MonkeyPatch.context() as patch,
        ExitStack() as stack,
        Reporter("test") as say,
    ):
        patch.setattr(Race, "lead", lead)
        run = Run(job(folder), say, stack)
        return Decided(plan_search.plans(run, profile), led)


def test_all_ranks_know_what_rank_0_found(tmp_path: Path) -> None:
    first, other = on_ranks(2, decided, tmp_path)
    (plan,) = first.profile.plans
    assert other.profile == first.profile
    assert (first.led > 2, other.led) == (True, 0)
    assert plan.step_s == 0.5
