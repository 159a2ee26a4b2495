"""Whole steps side by side on ranks, some of which fail."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetconv.autotune.launch import throttle
from hetconv.autotune.measure.barrier import Parts
from hetconv.autotune.measure.model_inputs import ModelInputs
from hetconv.autotune.measure.paired_rounds import Round
from hetconv.autotune.search.race import LEAST_ROUNDS, Alone, Order, Outcome, Race
from hetconv.autotune.search.study import TrialFailedError
from hetconv.schemas.plan import Plan
from tests.nets import Chain, plan_of, splits_of
from tests.spawn import on_ranks

LIMIT = 60.0  # seconds; a rank that failed is noticed long before
X = ModelInputs.of(torch.ones(2, 4, 16, 16))


def plan(sizes: tuple[int, ...]) -> Plan:
    return plan_of(Chain(), splits_of(Chain(), ("filter",), sizes), 2)


class Failing(nn.Module):
    """A net that runs out of memory on one rank in its nth step, after the others began
    to wait for it.
    """

    def __init__(self, rank: int, nth: int):
        super().__init__()
        self.net, self.rank, self.left = Chain(), rank, nth

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left < 0 and dist.get_rank() == self.rank:
            raise torch.OutOfMemoryError("there is no\nmore memory")
        return self.net(x)


def raced(model: nn.Module, *orders: Order) -> tuple[list[Outcome | str], float]:
    """What comes of each order, on rank 0, and the seconds that all took."""
    race, found = Race(model, X, "train", LIMIT), list[Outcome | str]()
    start = time.monotonic()
    if dist.get_rank():
        race.follow()
    else:
        for order in orders:
            try:
                found.append(race.lead(order))
            except TrialFailedError as e:
                found.append(str(e))
        race.end()
    return found, time.monotonic() - start


def test_every_way_is_timed_in_every_round() -> None:
    ways = {
        "alone": Alone(0, "contiguous"),
        "other": Alone(1, "channels_last"),
        "trial": plan((3, 1)),
    }
    (first, _), (none, _) = on_ranks(
        2, raced, Chain(), Order("all", ways, 3, "trial"), Order("all", ways, 1)
    )
    assert none == []
    assert [len(outcome.rounds) for outcome in first] == [3, 1]
    assert all(one.keys() == ways.keys() for outcome in first for one in outcome.rounds)
    steps = [
        step for outcome in first for one in outcome.rounds for step in one.values()
    ]
    assert all(
        step.seconds > 0 and len(step.pulse_s) == 2 and min(step.pulse_s) > 0
        for step in steps
    )
    assert [len(outcome.computing) for outcome in first] == [2, 0]
    assert min(first[0].computing) > 0
    assert [len(outcome.noise) for outcome in first] == [2, 0]
    assert [len(outcome.pulse_s) for outcome in first] == [2, 0]


def computing_on(part: float, speed: float) -> tuple[float, ...]:
    """Seconds in which each rank computes, on a part of its core."""
    throttle.set_speed(speed)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "hetconv.autotune.search.race.parts_of_core", lambda _: Parts(part, 1.0)
            )
            outcomes, _ = raced(
                Chain(), Order("it", {"trial": plan((2, 2))}, 9, "trial")
            )
    finally:
        throttle.set_speed(1.0)
    return (
        outcomes[0].computing if outcomes and isinstance(outcomes[0], Outcome) else ()
    )


def test_computing_is_heard_as_operators_are_timed() -> None:
    """By the own clock, over the part of the core; of a slowed device by the wall."""
    (whole, _), (part, _) = (
        on_ranks(2, computing_on, part, 1.0) for part in (1.0, 0.01)
    )
    assert all(b > 20 * a > 0 for a, b in zip(whole, part, strict=True))
    (slowed, _) = on_ranks(2, computing_on, 0.01, 0.9)
    assert all(a < b / 5 for a, b in zip(slowed, part, strict=True))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("nth", [0, 3])
def test_what_fails_on_one_rank_fails_on_all_and_the_next_trial_runs(
    rank: int, nth: int
) -> None:
    """In the first step, which no round times, and in the middle of a round."""
    prefixed = {
        f"net.{name}": split
        for name, split in splits_of(Chain(), ("filter",), (3, 1)).items()
    }
    failing = Order("it", {"trial": plan_of(Failing(rank, nth), prefixed, 2)}, 5)
    on_other = Order("it", {"alone": Alone(1 - rank, "contiguous")}, 2)
    (first, took), _ = on_ranks(
        2, raced, Failing(rank, nth), failing, on_other, failing
    )
    assert first[0] == first[2] == f"on rank {rank}: OutOfMemoryError: there is no"
    assert isinstance(first[1], Outcome)
    assert took < LIMIT / 4


def stopped() -> list[int]:
    race, asked = Race(Chain(), X, "infer", LIMIT), list[Round]()

    def enough(ran: Round) -> bool:
        asked.append(ran)
        return len(asked) == 2

    if dist.get_rank():
        race.follow()
        return []
    found = race.lead(Order("it", {"trial": plan((3, 1))}, 9), enough).rounds
    race.end()
    return [len(found), len(asked)]


def test_a_race_ends_early_when_told() -> None:
    assert on_ranks(2, stopped) == [[2, 2], []]


def impatient() -> list[int]:
    """Rounds of an order that took too long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hetconv.autotune.search.race.PATIENCE", 0.0)
        outcomes, _ = raced(
            Chain(),
            *(Order("it", {"trial": plan((3, 1))}, rounds) for rounds in (9, 2)),
        )
    return [len(outcome.rounds) for outcome in outcomes if isinstance(outcome, Outcome)]


def test_long_steps_run_in_fewer_rounds() -> None:
    assert on_ranks(2, impatient) == [[LEAST_ROUNDS, 2], []]


def timed_for(least_s: float, most: int) -> list[int]:
    """Rounds of an order that is told to end after the first."""
    race, order = (
        Race(Chain(), X, "infer", LIMIT),
        Order("it", {"trial": plan((3, 1))}, 2, least_s=least_s),
    )
    if dist.get_rank():
        race.follow()
        return []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hetconv.autotune.search.race.MOST_ROUNDS", most)
        found = race.lead(order, lambda _: True).rounds
    race.end()
    return [len(found), sum(one["trial"].seconds for one in found) >= least_s]


def test_short_steps_run_in_more_rounds() -> None:
    assert on_ranks(2, timed_for, 60.0, 7)[0] == [7, False]
    (rounds, enough), _ = on_ranks(2, timed_for, 1e-9, 7)
    assert (rounds, enough) == (1, True)


def alone_at(speed: float) -> float:
    """Seconds of a round of the plain model, of a device at this speed."""
    throttle.set_speed(speed)
    try:
        (found,), _ = raced(
            nn.Conv2d(4, 64, 5), Order("it", {"alone": Alone(0, "contiguous")}, 9)
        )
    finally:
        throttle.set_speed(1.0)
    return min(one["alone"].seconds for one in found.rounds)


def test_an_emulated_device_is_as_slow_alone() -> None:
    fast, slow = (on_one(speed) for speed in (1.0, 0.05))
    assert slow > 2 * fast


def on_one(speed: float) -> float:
    return on_ranks(1, alone_at, speed)[0]
