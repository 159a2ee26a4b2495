"""The study of split ratios, on functions instead of a stopwatch."""

from __future__ import annotations

import random

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState

from hetconv.autotune.search.study import (
    AGAIN,
    ROUNDS,
    SPREAD,
    Hopeless,
    TrialFailedError,
    Weights,
    probes,
    refine,
)


class Makespan:
    """Devices of these speeds; seconds relative to those of the ratio that was
    computed, more or less.
    """

    def __init__(
        self,
        speeds: tuple[float, ...],
        computed: Weights,
        noise: float = 0.0,
        seed: int = 0,
    ):
        self._speeds, self._first, self._noise = (
            speeds,
            self._seconds(speeds, computed),
            noise,
        )
        self._random = random.Random(seed)
        self.asked: list[Weights] = []
        self.rounds: list[int] = []

    @staticmethod
    def _seconds(speeds: tuple[float, ...], weights: Weights) -> float:
        return max(w / s for w, s in zip(weights, speeds, strict=True))

    def __call__(self, weights: Weights, hopeless: Hopeless) -> list[float]:
        self.asked.append(weights)
        found: list[float] = []
        while len(found) < ROUNDS:
            off = 1 + self._random.uniform(-self._noise, self._noise)
            found.append(self._seconds(self._speeds, weights) / self._first * off)
            if hopeless(found[-1]):
                break
        self.rounds.append(len(found))
        return found


def new() -> optuna.Study:
    return optuna.create_study()


@pytest.mark.parametrize("seed", range(5))
def test_a_wrong_ratio_is_mended_in_few_trials(seed: int) -> None:
    rounds = Makespan((1.0, 0.5), (58, 42), 0.01, seed)
    weights, gain, ran = refine(new(), (58, 42), rounds, 30, seed)
    assert gain < 0.82
    assert abs(weights[0] - 67) <= 2
    assert (58, 42) not in rounds.asked, "the computed ratio needs no run beside itself"
    assert ran < 12, "it goes on although there is nothing left to gain"


def test_three_devices_have_two_ratios() -> None:
    rounds = Makespan((1.0, 0.6, 0.3), (90, 76, 34), 0.005)
    weights, gain, _ = refine(new(), (90, 76, 34), rounds, 30, 0)
    assert gain == pytest.approx(200 / 1.9 / (76 / 0.6), abs=0.03)
    assert sum(weights) == 200


@pytest.mark.parametrize("seed", range(3))
def test_the_result_is_never_worse_than_the_computed_ratio(seed: int) -> None:
    weights, gain, _ = refine(new(), (20, 10), lambda w, hopeless: [1.5], 10, seed)
    assert weights == (20, 10)
    assert gain == 1.0


def test_the_first_trials_move_work_to_and_from_each_device() -> None:
    rounds = Makespan((1.0, 0.5), (50, 50))
    refine(new(), (50, 50), rounds, 3, 0)
    assert rounds.asked == [(42, 58), (58, 42)]
    assert probes((50, 0, 50), [0]) == [
        {"rank0": 1.0},
        {"rank0": 42 / 58},
        {"rank0": 58 / 42},
    ]
    assert probes((4, 3), [0]) == [
        {"rank0": 1.0},
        {"rank0": 1 / SPREAD},
        {"rank0": SPREAD},
    ]  # a row is too much


def test_no_ratio_is_measured_twice_and_the_sum_stays() -> None:
    rounds = Makespan((1.0, 0.6, 0.3), (10, 6, 4))
    refine(new(), (10, 6, 4), rounds, 25, 0)
    assert len(rounds.asked) == len(set(rounds.asked)) > 2
    assert {sum(w) for w in rounds.asked} == {20}


def test_a_device_without_a_share_gets_none() -> None:
    rounds = Makespan((1.0, 1.0, 1.0), (60, 0, 40))
    refine(new(), (60, 0, 40), rounds, 15, 0)
    assert rounds.asked
    assert all(w[1] == 0 for w in rounds.asked)


def test_a_trial_that_is_surely_worse_is_given_up() -> None:
    rounds = Makespan((1.0, 0.5), (67, 33), 0.01)
    refine(new(), (67, 33), rounds, 8, 0)
    assert max(rounds.rounds) <= ROUNDS
    assert min(rounds.rounds) < ROUNDS, "each of them is slower than the computed ratio"


def test_the_study_repeats_under_its_seed_and_stops_when_told() -> None:
    first, second = Makespan((1.0, 0.5), (60, 40)), Makespan((1.0, 0.5), (60, 40))
    assert refine(new(), (60, 40), first, 8, 3) == refine(new(), (60, 40), second, 8, 3)
    assert first.asked == second.asked
    assert refine(new(), (60, 40), first, 12, 3, lambda: True) == ((60, 40), 1.0, 0)


def test_one_device_leaves_nothing_to_refine() -> None:
    assert refine(new(), (8, 0), lambda w, hopeless: [0.5], 10, 0) == ((8, 0), 1.0, 0)


def test_a_trial_that_fails_is_told_and_the_others_go_on() -> None:
    told: list[FrozenTrial] = []
    rounds = Makespan((1.0, 0.5), (58, 42))

    def failing(weights: Weights, hopeless: Hopeless) -> list[float]:
        if weights[0] > 60:
            raise TrialFailedError("on rank 1: there is no memory")
        return list(rounds(weights, hopeless))

    study = new()
    weights, _, ran = refine(study, (58, 42), failing, 9, 0, told=told.append)
    assert weights == max(rounds.asked)
    assert [t.number for t in told] == [*range(ran)]
    failed = [t for t in told if t.state is TrialState.FAIL]
    assert failed
    assert {t.user_attrs["why"] for t in failed} == {"on rank 1: there is no memory"}
    assert {t.state for t in study.trials} == {TrialState.COMPLETE, TrialState.FAIL}


class KilledError(BaseException):
    """In place of a signal."""


def test_a_study_goes_on_where_it_was_killed_and_runs_that_trial_again_but_once() -> (
    None
):
    study, rounds = new(), Makespan((1.0, 0.5), (58, 42), 0.01)

    def killed(weights: Weights, hopeless: Hopeless) -> list[float]:
        rounds(weights, hopeless)
        if len(rounds.asked) > 1:
            raise KilledError
        return rounds(weights, hopeless)

    for _ in range(
        2
    ):  # both times in the second of the two trials that are asked for first
        with pytest.raises(KilledError):
            refine(study, (58, 42), killed, 9, 0)
    before = [t for t in study.trials if t.state is TrialState.COMPLETE]
    known = set(rounds.asked)
    first = len(rounds.asked)
    weights, _, ran = refine(study, (58, 42), rounds, 9, 0)
    assert study.trials[: len(before)] == before
    assert abs(weights[0] - 67) <= 2
    assert ran <= 9
    again = [t for t in study.trials if AGAIN in t.user_attrs]
    assert len(again) == 1
    assert not {
        w for w in rounds.asked[first:] if w in known and w != rounds.asked[first]
    }
    assert not [t for t in study.trials if t.state is TrialState.RUNNING]
