"""The race of the finalists, on made-up seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetconv.autotune.measure.paired_rounds import MIN_ROUNDS
from hetconv.autotune.search.finalists import Confirmation, FinalRace, race_seconds
from hetconv.autotune.search.race import (
    REFERENCE,
    PlainModel,
    TimingRequest,
    Timings,
    TrialFailedError,
)
from hetconv.planner.make_plan import Contender, make_plan
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import Prediction
from hetconv.tracing.tracer import capture
from tests.nets import Chain, splits_of

GUARDS = {"even", "computed"}
BUDGET_S = 12.0


class Steps:
    """Stands for the race of all ranks, in which variants take made-up seconds, in each
    round by its number; ``most``: how many plans run side by side.
    """

    def __init__(
        self, seconds: Mapping[str, float | Callable[[int], float]], most: int = 99
    ):
        self.seconds, self.most = seconds, most
        self.ran: list[set[str]] = []
        self.min_seconds: list[float] = []
        self.rounds = 0

    def lead(self, request: TimingRequest) -> Timings:
        plans = request.variants.keys() - {REFERENCE}
        if len(plans) > self.most:
            raise TrialFailedError("on rank 1: there is no memory")
        self.ran.append({*plans})
        self.min_seconds.append(request.min_seconds)
        assert request.rounds_in_any_case == MIN_ROUNDS
        return Timings([self._round(request) for _ in range(request.rounds)])

    def _round(self, request: TimingRequest) -> dict[str, float]:
        self.rounds += 1
        return {
            name: s(self.rounds) if callable(s := self.seconds[name]) else s
            for name in request.variants
        }


def confirmed(
    steps: Steps, left_s: float = 99.0, predicted: Mapping[str, float] | None = None
) -> Confirmation | None:
    """What comes of a race of all whose seconds are known, in this order."""
    graph = capture(Chain(), torch.zeros(2, 4, 16, 16))
    base = make_plan(graph, ClusterProfile.from_devices(["cpu", "cpu@0.5"]))
    say = SimpleNamespace(line=lambda _: None)
    run: Any = SimpleNamespace(race=steps, say=say, left_s=left_s)
    plans = {
        name: Contender(
            name,
            splits_of(Chain(), ("height",), (15 - k, 1 + k)),
            Prediction((predicted or {}).get(name, 1.0), 0.0, (), (), ()),
            {},
        )
        for k, name in enumerate(steps.seconds)
        if name != REFERENCE
    }
    race = FinalRace(run, base, PlainModel(0, "contiguous_format"), BUDGET_S)
    return race.confirm(plans, GUARDS & plans.keys())


def winner(steps: Steps) -> str:
    found = confirmed(steps)
    assert found is not None
    return found.winner


ALL = {
    REFERENCE: 1.0,
    "a": 0.63,
    "even": 0.9,
    "computed": 0.8,
    "b": 0.62,
    "c": 0.61,
    "d": 0.60,
}


def test_the_slower_half_goes_after_each_rung_and_guards_stay() -> None:
    steps = Steps(ALL)
    assert winner(steps) == "d"
    assert steps.ran == [
        {"a", "b", "c", "d", *GUARDS},
        {"c", "d", *GUARDS},
        {"d", *GUARDS},
    ]
    assert sum(steps.min_seconds) == pytest.approx(BUDGET_S)


@pytest.mark.parametrize("guard", sorted(GUARDS))
def test_what_a_guard_is_faster_than_is_not_the_plan(guard: str) -> None:
    assert winner(Steps(ALL | {guard: 0.5})) == guard


@pytest.mark.parametrize(("seconds", "name"), [(1.01, REFERENCE), (0.99, "a")])
def test_the_reference_stays_unless_it_is_beaten(seconds: float, name: str) -> None:
    assert winner(Steps({REFERENCE: 1.0, "a": seconds, "even": 1.2})) == name


@pytest.mark.parametrize(
    ("left_s", "even_s", "ran"),
    [
        (99.0, 2.0, {"a", "even"}),  # there is time for all
        (20.0, 2.0, {"a"}),
        (20.0, 1.5, {"a", "even"}),  # it may be the faster one
    ],
)
def test_a_guard_that_would_lose_does_not_take_the_time_of_a_decision(
    left_s: float, even_s: float, ran: set[str]
) -> None:
    steps = Steps({REFERENCE: 1.0, "a": 0.6, "even": 0.9})
    confirmed(steps, left_s, {"even": even_s})
    assert steps.ran == [ran]


def test_noise_does_not_beat_the_reference() -> None:
    def noisy(turn: int) -> float:
        return 0.5 if turn % 3 else 1.9

    assert winner(Steps({REFERENCE: 1.0, "a": noisy})) == REFERENCE


def test_drift_does_not_hide_who_is_faster() -> None:
    def drifting(factor: float) -> Callable[[int], float]:
        return lambda turn: factor * 2**turn

    steps = Steps({REFERENCE: drifting(1.0), "a": drifting(0.97)})
    assert winner(steps) == "a"


def test_who_was_lucky_in_the_first_rung_must_win_the_last_one() -> None:
    def lucky(turn: int) -> float:
        return 0.1 if turn <= MIN_ROUNDS else 0.85

    assert winner(Steps(ALL | {"a": lucky})) == "computed"


def test_guards_alone_are_compared_too() -> None:
    steps = Steps({REFERENCE: 1.0, "even": 0.9, "computed": 0.8})
    assert winner(steps) == "computed"
    assert steps.ran == [GUARDS]
    assert winner(Steps({REFERENCE: 1.0})) == REFERENCE


@pytest.mark.parametrize(
    ("most", "ran", "name"),
    [
        (3, [{"a", *GUARDS}], "a"),
        (2, [{"a"}], "a"),
        (0, [set()], REFERENCE),
    ],
)
def test_the_likeliest_half_runs_where_not_all_fit_side_by_side(
    most: int, ran: list[set[str]], name: str
) -> None:
    steps = Steps(ALL, most)
    assert winner(steps) == name
    assert steps.ran == ran


def test_there_is_no_plan_where_nothing_runs() -> None:
    assert confirmed(Steps(ALL, -1)) is None


@pytest.mark.parametrize(
    ("left_s", "others"),
    [
        (-1.0, ["a"]),
        (0.0, ["a"]),
        (1e9, ["a", "b", "c"]),
        (3 * (1 + MIN_ROUNDS) + 1, ["a", "b"]),
    ],
)
def test_without_time_the_likeliest_one_races_the_guards(
    left_s: float, others: list[str]
) -> None:
    """Each takes a second a step; the guard takes part in any case."""
    steps = Steps({REFERENCE: 1.0, "even": 0.9, "a": 0.5, "b": 0.6, "c": 0.7})
    found = confirmed(steps, left_s)
    assert found is not None
    assert steps.ran[0] == {"even", *others}
    assert found.winner == "a"


@pytest.mark.parametrize(
    ("round_s", "expected"), [(0.1, 10.0), (2.0, 16.0), (5.0, 30.0)]
)
def test_long_steps_race_until_they_differ_or_the_time_is_up(
    round_s: float, expected: float
) -> None:
    run: Any = SimpleNamespace(job=SimpleNamespace(budget=100.0), left_s=30.0)
    assert race_seconds(run, round_s) == expected
