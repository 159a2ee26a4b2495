"""The budget of the stage of plans, on a clock that steps of made-up seconds advance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetconv.autotune.measure import paired_rounds
from hetconv.autotune.measure.device_info import conditions
from hetconv.autotune.measure.paired_rounds import MIN_ROUNDS
from hetconv.autotune.models.inputs import ModelInputs
from hetconv.autotune.search import job, race
from hetconv.autotune.search.plan_search import MIN_TRIAL_S, PlanSearch
from hetconv.autotune.search.race import (
    CANDIDATE,
    MAX_SLOWDOWN,
    REFERENCE,
    PlainModel,
    Race,
    StepTimes,
    TimingRequest,
    Timings,
    Variant,
)
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import SINGLE_DEVICE
from tests.cli.test_summary import PAIR, captured

ALONE = PlainModel(0, "contiguous_format")
OTHER = PlainModel(0, "channels_last")
Seconds = Callable[[Variant], list[float]]


class Clock:
    """Stands for a job whose steps take made-up seconds.

    Args:
        seconds: of a variant, those of its steps in turn; the last one from then on.
        budget: of the job.
        on_gpu: whether a part of it belongs to tiles.
        spent_s: seconds that earlier stages took.
        built_s: seconds that a variant takes before its first step.
    """

    def __init__(
        self,
        seconds: Seconds,
        budget: float,
        on_gpu: bool = True,
        spent_s: float = 0.0,
        built_s: float = 0.0,
    ):
        self.seconds, self.budget_s, self.on_gpu = spent_s, budget, on_gpu
        self._of, self._built_s = seconds, built_s
        self.steps: Counter[str] = Counter()
        self.requests: list[TimingRequest] = []
        self.kept: dict[tuple[str, str], Any] = {}
        self.graph, self.device = captured(), torch.device("cpu")
        self.conditions = conditions(self.device)
        self.job = SimpleNamespace(mode="train", seed=0, budget=budget, trials=0)
        silent = lambda *_: None  # noqa: E731
        self.say = SimpleNamespace(
            stage=silent, advance=silent, line=silent, detail=silent
        )
        self.inputs = ModelInputs.of(torch.zeros(2, 4, 16, 16))
        self.race = self._race()

    spent = job.Run.spent
    left_s = job.Run.left_s
    passed = job.Run.passed

    def known(self, stage: str, key: str, _: object) -> Any:
        return self.kept.get((stage, key))

    def keep(self, stage: str, key: str, value: Any) -> None:
        self.kept[stage, key] = value

    def _race(self) -> Race:
        model, inputs = torch.nn.Identity(), self.inputs
        racing = Race(model, inputs, "train", 1.0, lambda: self.left_s)
        racing._group, racing._step = SimpleNamespace(), self._step  # type: ignore[assignment, method-assign]
        racing._compute_seconds = lambda *_: (0.1, 0.1)  # type: ignore[method-assign]
        racing._run = self._run  # type: ignore[method-assign]
        return racing

    def _run(self, request: TimingRequest) -> Timings:
        self.requests.append(request)
        return self.race._time(request, self.race._group)  # type: ignore[arg-type]

    def _step(self, variant: Variant, _: object) -> Callable[[], float]:
        self.seconds += self._built_s
        turns, name = iter(self._of(variant)), str(variant)
        took = 0.0

        def step() -> float:
            nonlocal took
            took = next(turns, took)
            self.steps[name] += 1
            self.seconds += took
            return took

        return step


@pytest.fixture(autouse=True)
def _steps_are_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_round(steps: Mapping[str, Any], *_: object) -> dict[str, float]:
        return {name: step() for name, step in steps.items()}

    monkeypatch.setattr(race, "agreed_step_s", lambda step, *_: step())
    monkeypatch.setattr(paired_rounds, "_one_round", one_round)
    monkeypatch.setattr(race.timer, "broadcast_object", lambda value: value)


def timed(
    candidate: list[float], budget: float = 40.0, **options: Any
) -> tuple[Timings, Clock]:
    """What comes of a candidate beside a reference that takes a second."""
    clock = Clock(lambda v: [1.0] if v == ALONE else candidate, budget, on_gpu=False)
    variants = {REFERENCE: ALONE, CANDIDATE: OTHER}
    return clock.race.lead(TimingRequest("it", variants, **options)), clock


@pytest.mark.parametrize(
    ("candidate", "too_slow_s", "steps"),
    [
        ([30.0], 30.0, 1),  # a second step would end after the budget
        ([12.0], 12.0, 2),
        ([12.0, 2.0], None, 2 + MIN_ROUNDS),  # the first one compiled
        ([2.0], None, 1 + MIN_ROUNDS),
        ([2.0, 2.0, 9.0, 9.0], None, 1 + MIN_ROUNDS),
    ],
)
def test_a_candidate_that_is_clearly_out_is_dropped_at_once(
    candidate: list[float], too_slow_s: float | None, steps: int
) -> None:
    found, clock = timed(candidate)
    assert found.too_slow == ({CANDIDATE: too_slow_s} if too_slow_s else {})
    assert clock.steps[str(OTHER)] == steps
    assert not found.rounds or REFERENCE in found.rounds[-1]


def test_rounds_end_with_the_budget() -> None:
    found, clock = timed([2.0], budget=12.0 + job.END_S)
    assert len(found.rounds) == 3
    assert clock.seconds <= 12.0
    found, _ = timed([2.0], budget=0.0)
    assert len(found.rounds) == 1, "which says something, and no more"


def test_a_race_that_decides_has_the_rounds_that_it_takes() -> None:
    """With one or two nothing would surely beat a device alone, which then would be taken."""
    found, _ = timed([2.0], budget=0.0, rounds_in_any_case=MIN_ROUNDS)
    assert len(found.rounds) == MIN_ROUNDS


def test_a_reference_that_is_slow_stays() -> None:
    times = StepTimes(10.0, fastest_s=1.0)
    times.add({REFERENCE: 9.0, CANDIDATE: 9.0})
    assert times.too_slow() == {CANDIDATE: 9.0}


@pytest.mark.parametrize(("left_s", "is_slow"), [(10.0, True), (1000.0, False)])
def test_a_slow_step_that_costs_little_runs_on(left_s: float, is_slow: bool) -> None:
    """It tells a calibration more than it costs."""
    times = StepTimes(left_s + 5, fastest_s=1.0)
    times.add({CANDIDATE: MAX_SLOWDOWN + 1, "fast": 1.0})
    assert times.is_slow(CANDIDATE) is is_slow


def searched(clock: Any) -> Any:
    profile = ClusterProfile.from_devices(PAIR, link="host")
    return PlanSearch(clock, profile).tune()


def alone_or(step_s: float) -> Seconds:
    return lambda variant: [0.5 if isinstance(variant, PlainModel) else step_s]


@pytest.mark.parametrize("budget", [35.0, 120.0, 600.0])
def test_a_gpu_alone_is_the_plan_beside_a_cpu_and_in_time(budget: float) -> None:
    """Splits take 30 times as long, which no prediction knew."""
    clock = Clock(alone_or(15.0), budget, spent_s=0.3 * budget)
    (plan,) = searched(clock).plans
    assert plan.name.startswith(SINGLE_DEVICE)
    assert plan.step_s == 0.5
    first_step_s = 15.0  # which cannot be foreseen
    assert clock.seconds <= (1 - job.TILES_PART) * budget + first_step_s
    split = {v: n for v, n in clock.steps.items() if not v.startswith("PlainModel")}
    assert max(split.values()) <= 2
    assert budget > 35 or sum(split.values()) == 1


@pytest.mark.parametrize("spent_s", [8.0, 14.0, 18.0])
def test_the_share_of_the_tiles_comes_before_further_plans(spent_s: float) -> None:
    """With 25 s, of which operators and links took a good part."""
    clock = Clock(alone_or(0.4), 25.0, spent_s=spent_s, built_s=0.4)
    searched(clock)
    plans_end_s = (1 - job.TILES_PART) * 25.0
    one_plan_s = (
        MIN_TRIAL_S + 6.0
    )  # is timed, and races for four rounds, whatever is left
    assert clock.seconds <= max(plans_end_s, spent_s) + one_plan_s
    timed = [r for r in clock.requests if r.record_compute]
    assert len(timed) >= 1
    if spent_s > job.part_of(clock, 0.5) * 25.0:  # type: ignore[arg-type]
        assert len(timed) == 1
