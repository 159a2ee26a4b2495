"""The study of a plan's ratio, on functions in place of a stopwatch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import log
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import FrozenTrial, TrialState

from hetconv.autotune.measure.device_info import conditions
from hetconv.autotune.measure.paired_rounds import LogRatio
from hetconv.autotune.search.journal import Store
from hetconv.autotune.search.race import TimingRequest, Timings, TrialFailedError
from hetconv.autotune.search.ratio_search import (
    MAX_WEIGHT_FACTOR,
    RETRIED,
    RatioSearch,
    Weights,
    probes,
    ratio_of,
    refine,
)
from hetconv.autotune.search.record import FAILURE
from hetconv.planner.make_plan import make_plan
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import Plan
from hetconv.schemas.tuning_results import TunedRatio
from hetconv.sharding.split import REPLICATE, Split
from hetconv.tracing.tracer import capture
from tests.nets import Chain

BIG, SMALL = Split("height", (30, 2)), Split("height", (5, 3))


def test_a_ratio_is_that_of_the_largest_layer_of_plans_of_one_kind() -> None:
    assert ratio_of({"a": SMALL, "b": BIG, "c": REPLICATE}) == ("height", (30, 2))
    assert ratio_of({"a": SMALL, "b": Split("width", (1, 1))}) is None
    assert ratio_of({"a": Split("filter", (3, 1))}) is None
    assert ratio_of({"a": Split("height", (2, 2, 1), ((2, 1), (1, 1)))}) is None
    assert ratio_of({"a": Split("height", (8, 0))}) is None
    assert ratio_of({"a": REPLICATE}) is ratio_of({}) is None


class Makespan:
    """Devices of these speeds, whose steps are compared with those in computed weights,
    more or less.
    """

    def __init__(
        self,
        speeds: tuple[float, ...],
        computed: Weights,
        noise: float = 0.0,
        seed: int = 0,
    ):
        self._speeds, self._noise = speeds, noise
        self._computed_s = self._seconds(computed)
        self._random = random.Random(seed)
        self.asked: list[Weights] = []
        self.limits: list[float] = []

    def _seconds(self, weights: Weights) -> float:
        return max(w / s for w, s in zip(weights, self._speeds, strict=True))

    def __call__(self, weights: Weights, limit: float) -> LogRatio:
        self.asked.append(weights)
        self.limits.append(limit)
        off = 1 + self._random.uniform(-self._noise, self._noise)
        ratio = self._seconds(weights) / self._computed_s * off
        return LogRatio(log(ratio), self._noise)


def new() -> optuna.Study:
    return optuna.create_study()


@pytest.mark.parametrize("seed", range(5))
def test_a_wrong_ratio_is_mended_in_few_trials(seed: int) -> None:
    steps = Makespan((1.0, 0.5), (58, 42), 0.01, seed)
    weights, ran = refine(new(), (58, 42), steps, 30, seed)
    assert abs(weights[0] - 67) <= 2
    assert (58, 42) not in steps.asked, "the computed ratio needs no run beside itself"
    assert ran < 12, "it goes on although there is nothing left to gain"


def test_three_devices_have_two_ratios() -> None:
    steps = Makespan((1.0, 0.6, 0.3), (90, 76, 34), 0.005)
    weights, _ = refine(new(), (90, 76, 34), steps, 30, 0)
    assert sum(weights) == 200
    assert steps._seconds(weights) < 1.05 * 200 / 1.9


@pytest.mark.parametrize("seed", range(3))
def test_the_result_is_never_worse_than_the_computed_ratio(seed: int) -> None:
    weights, _ = refine(new(), (20, 10), lambda *_: LogRatio(0.4, 0.0), 10, seed)
    assert weights == (20, 10)


def test_the_first_trials_move_work_to_and_from_each_device() -> None:
    steps = Makespan((1.0, 0.5), (50, 50))
    refine(new(), (50, 50), steps, 3, 0)
    assert steps.asked == [(42, 58), (58, 42)]
    assert probes((50, 0, 50), [0]) == [
        {"rank0": 1.0},
        {"rank0": 42 / 58},
        {"rank0": 58 / 42},
    ]
    assert probes((4, 3), [0]) == [
        {"rank0": 1.0},
        {"rank0": 1 / MAX_WEIGHT_FACTOR},
        {"rank0": MAX_WEIGHT_FACTOR},
    ]  # a row is too much


def test_no_ratio_is_measured_twice_and_the_sum_stays() -> None:
    steps = Makespan((1.0, 0.6, 0.3), (10, 6, 4))
    refine(new(), (10, 6, 4), steps, 25, 0)
    assert len(steps.asked) == len(set(steps.asked)) > 2
    assert {sum(w) for w in steps.asked} == {20}


def test_a_device_without_a_share_gets_none() -> None:
    steps = Makespan((1.0, 1.0, 1.0), (60, 0, 40))
    refine(new(), (60, 0, 40), steps, 15, 0)
    assert steps.asked
    assert all(w[1] == 0 for w in steps.asked)


def test_a_trial_is_given_up_beyond_the_best_one_so_far() -> None:
    steps = Makespan((1.0, 0.5), (50, 50))
    refine(new(), (50, 50), steps, 4, 0)
    assert steps.limits[:2] == [0.0, 0.0]
    assert steps.limits[2] == pytest.approx(log(42 / 50))


def test_the_study_repeats_under_its_seed_and_stops_when_told() -> None:
    first, second = Makespan((1.0, 0.5), (60, 40)), Makespan((1.0, 0.5), (60, 40))
    assert refine(new(), (60, 40), first, 8, 3) == refine(new(), (60, 40), second, 8, 3)
    assert first.asked == second.asked
    assert refine(new(), (60, 40), first, 12, 3, lambda: True) == ((60, 40), 0)


def test_a_trial_that_fails_is_reported_and_the_others_go_on() -> None:
    reported: list[FrozenTrial] = []
    steps = Makespan((1.0, 0.5), (58, 42))

    def failing(weights: Weights, limit: float) -> LogRatio:
        if weights[0] > 60:
            raise TrialFailedError("on rank 1: there is no memory")
        return steps(weights, limit)

    weights, ran = refine(new(), (58, 42), failing, 6, 0, report=reported.append)
    failed = [t for t in reported if t.state is TrialState.FAIL]
    assert ran == len(reported) == 6
    assert failed
    assert {t.user_attrs[FAILURE] for t in failed} == {"on rank 1: there is no memory"}
    assert weights[0] <= 60


class KilledError(BaseException):
    """In place of a signal."""


def test_a_study_goes_on_where_it_was_killed_and_tries_that_once_more() -> None:
    study, steps = new(), Makespan((1.0, 0.5), (58, 42))

    def killed(weights: Weights, limit: float) -> LogRatio:
        if len(steps.asked) == 2:
            # Optuna marks a trial that raised as failed; a killed process leaves it.
            study._storage.set_trial_state_values = lambda *_, **__: True  # type: ignore[method-assign]
            raise KilledError
        return steps(weights, limit)

    with pytest.raises(KilledError):
        refine(study, (58, 42), killed, 9, 0)
    del study._storage.set_trial_state_values  # type: ignore[method-assign]
    assert [t.state for t in study.trials].count(TrialState.RUNNING) == 1
    known = list(steps.asked)
    weights, ran = refine(study, (58, 42), steps, 9, 0)
    assert abs(weights[0] - 67) <= 2
    assert ran <= 9
    assert len([t for t in study.trials if RETRIED in t.user_attrs]) == 1
    assert not set(steps.asked[len(known) :]) & set(known)
    assert not [t for t in study.trials if t.state is TrialState.RUNNING]


@contextmanager
def searching(
    folder: Path, seconds: Callable[[int], float | None]
) -> Iterator[tuple[RatioSearch, list[str]]]:
    """From 8:8 rows, where steps take ``seconds`` by the rows of the first device; and
    what is said.
    """
    graph, lines = capture(Chain(), torch.zeros(2, 4, 16, 16)), list[str]()
    base = make_plan(graph, ClusterProfile.from_devices(["cpu", "cpu@0.5"]))

    def lead(request: TimingRequest) -> Timings:
        took: dict[str, float] = {}
        for name, variant in request.variants.items():
            assert isinstance(variant, Plan)
            found = seconds(max((s.sizes for s in variant.splits.values()), key=sum)[0])
            if found is None:
                raise TrialFailedError("on rank 1: there is no more memory")
            took[name] = found
        return Timings([took] * request.rounds)

    store = Store(folder / "it.db", {}, resume=False)
    run: Any = SimpleNamespace(
        graph=graph,
        job=SimpleNamespace(mode="train", seed=0, trials=8),
        store=store,
        say=SimpleNamespace(
            stage=lambda *_: None,
            advance=lambda *_: None,
            line=lines.append,
            detail=lines.append,
        ),
        race=SimpleNamespace(lead=lead),
        device=torch.device("cpu"),
        conditions=conditions(torch.device("cpu")),
    )
    yield RatioSearch(run, base, "height", (8, 8), 1.0), lines
    store.close()


def tuned(
    folder: Path, seconds: Callable[[int], float | None]
) -> tuple[TunedRatio | None, list[str]]:
    with searching(folder, seconds) as (search, lines):
        return search.tune(lambda: False), lines


def test_the_fastest_weights_are_found(tmp_path: Path) -> None:
    found, (line,) = tuned(tmp_path, lambda rows: max(rows / 10, (16 - rows) / 6))
    assert found is not None
    assert (found.kind, found.weights) == ("height", (10, 6))
    assert (found.step_s, found.computed_step_s) == (1.0, 8 / 6)
    assert found.computed_weights == (8, 8)
    assert found.trials >= 3
    assert line == "height 10:6: 1000.0 ms a step; computed 8:8: 1333.3 ms"


def test_the_computed_weights_stay_where_none_are_faster(tmp_path: Path) -> None:
    found, _ = tuned(tmp_path, lambda rows: 1.0 + abs(rows - 8))
    assert found is not None
    assert (found.weights, found.step_s) == ((8, 8), found.computed_step_s)


def test_weights_that_were_merely_lucky_are_not_kept(tmp_path: Path) -> None:
    """Each seems faster when it is tried, and none is when it is tried again."""
    tried: set[int] = set()

    def seconds(rows: int) -> float:
        lucky = rows != 8 and rows not in tried
        tried.add(rows)
        return 0.8 if lucky else 1.0

    found, _ = tuned(tmp_path, seconds)
    assert found is not None
    assert (found.weights, found.step_s, found.computed_step_s) == ((8, 8), 1.0, 1.0)


@pytest.mark.parametrize("fails", ["computed", "others"])
def test_weights_that_fail_are_not_chosen(tmp_path: Path, fails: str) -> None:
    found, lines = tuned(
        tmp_path, lambda rows: None if (rows == 8) is (fails == "computed") else 1.0
    )
    if fails == "computed":
        assert found is None
        assert "the height ratio 8:8 is kept, for it failed on rank 1" in lines[0]
    else:
        assert found is not None
        assert found.weights == (8, 8)
