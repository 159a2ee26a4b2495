"""Steps that take turns, and what their paired ratios say."""

from __future__ import annotations

import functools
import time
from math import log

import pytest
import torch
import torch.distributed as dist

from hetconv.autotune.measure import paired_rounds as module
from hetconv.autotune.measure.paired_rounds import (
    LogRatio,
    Round,
    paired,
    paired_rounds,
    time_rounds,
    time_step,
)
from hetconv.comm.rank_group import rank_group_of
from tests.spawn import on_ranks

CPU = torch.device("cpu")


def rounds_of(*ratios: float) -> list[Round]:
    """In which a reference takes other times, as where a clock drifts."""
    drift = [1.0, 2.0, 0.5, 3.0, 0.1, 7.0, 1.5, 4.0]
    return [
        {"it": ratio * seconds, "reference": seconds}
        for ratio, seconds in zip(ratios, drift, strict=False)
    ]


def test_drift_cancels_in_paired_ratios() -> None:
    found = LogRatio.of(rounds_of(0.5, 0.5, 0.5, 0.5), "it", "reference")
    assert found == (pytest.approx(log(0.5)), pytest.approx(0.0))
    assert found.ratio == pytest.approx(0.5)


def test_rounds_in_which_only_one_ran_are_left_out() -> None:
    rounds = [*rounds_of(0.5, 0.5), {"reference": 9.0}]
    assert LogRatio.of(rounds, "it", "reference").ratio == 0.5


def test_more_rounds_make_a_ratio_surer() -> None:
    noisy = (0.8, 1.0)
    few, many = (
        LogRatio.of(rounds_of(*noisy * count), "it", "reference") for count in (2, 4)
    )
    assert many.error < few.error
    once = LogRatio.of(rounds_of(0.8), "it", "reference")
    assert not once.surely_below(0.0)


@pytest.mark.parametrize(
    ("value", "error", "above", "below"),
    [
        (0.1, 0.04, True, False),
        (0.1, 0.06, False, False),
        (-0.1, 0.06, False, False),
        (-0.1, 0.04, False, True),
        (0.0, 0.0, False, False),
    ],
)
def test_noise_does_not_tell_ratios_apart(
    value: float, error: float, above: bool, below: bool
) -> None:
    found = LogRatio(value, error)
    assert (found.surely_above(0.0), found.surely_below(0.0)) == (above, below)


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


def of_two_ranks() -> list[Round]:
    steps = {"it": lambda: time.sleep(0.05 * dist.get_rank()), "none": lambda: None}
    return paired_rounds(steps, 3, CPU)


def test_a_step_takes_as_long_as_its_slowest_rank_and_all_ranks_know() -> None:
    first, second = on_ranks(2, of_two_ranks)
    assert first == second
    assert len(first) == 3
    assert all(one["it"] >= 0.05 and one["none"] > 0 for one in first)


@pytest.fixture
def _rounds_of_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_one_round", lambda *_: {"a": 1.5, "b": 0.5})


def count(rounds: int, min_seconds: float = 0.0, stop_after: int = 99) -> int:
    def stop(found: object) -> bool:
        return len(found) >= stop_after  # type: ignore[arg-type]

    group: object = None
    return len(time_rounds({}, CPU, group, rounds, min_seconds, 4, stop))  # type: ignore[arg-type]


@pytest.mark.usefixtures("_rounds_of_two_seconds")
@pytest.mark.parametrize(
    ("min_seconds", "ran"), [(0.0, 2), (4.0, 2), (5.0, 3), (60.0, 4)]
)
def test_short_steps_run_in_more_rounds_but_not_in_too_many(
    min_seconds: float, ran: int
) -> None:
    assert count(2, min_seconds) == ran
    assert count(6, min_seconds) == 6


@pytest.mark.usefixtures("_rounds_of_two_seconds")
def test_rounds_end_early_when_they_tell_enough() -> None:
    assert count(4, stop_after=2) == 2
    assert count(1, min_seconds=60.0, stop_after=3) == 3


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
        time_step(step, CPU, group)
    return came, *times, time.monotonic()


def test_ranks_of_a_host_begin_a_step_and_end_it_together_without_the_backend() -> None:
    came, began, done, saw_all_done = zip(*on_ranks(2, a_step), strict=True)
    assert max(came) <= min(began)
    assert max(done) <= min(saw_all_done)
