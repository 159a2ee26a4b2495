"""Whole steps side by side on ranks, some of which fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetconv.autotune.measure.paired_rounds import MIN_ROUNDS
from hetconv.autotune.models.inputs import ModelInputs
from hetconv.autotune.search import race
from hetconv.autotune.search.race import (
    CANDIDATE,
    REFERENCE,
    PlainModel,
    Race,
    TimingRequest,
    Timings,
    TrialFailedError,
    plain_variants,
)
from hetconv.runtime import throttle
from hetconv.runtime.throttle import Computation
from hetconv.schemas.plan import Plan
from tests.nets import Chain, plan_of, splits_of
from tests.spawn import on_ranks

TIMEOUT_S = 3600.0  # a rank that failed is noticed before a test is over
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


def raced(model: nn.Module, *requests: TimingRequest) -> list[Timings | str]:
    """What comes of each request, on rank 0."""
    racing, found = Race(model, X, "train", TIMEOUT_S), list[Timings | str]()
    if dist.get_rank():
        racing.follow()
    else:
        for request in requests:
            try:
                found.append(racing.lead(request))
            except TrialFailedError as e:
                found.append(str(e))
        racing.end()
    return found


def test_every_variant_is_timed_in_every_round() -> None:
    variants = {
        "alone": PlainModel(0, "contiguous_format"),
        "other": PlainModel(1, "channels_last"),
        "trial": plan((3, 1)),
    }
    found, none = on_ranks(
        2,
        raced,
        Chain(),
        TimingRequest("all", variants, 3, record_compute="trial"),
        TimingRequest("all", variants, 1),
        TimingRequest("all", variants, 0),
    )
    assert none == []
    assert [len(timings.rounds) for timings in found] == [3, 1, 0]
    rounds = [one for timings in found for one in timings.rounds]
    assert all(one.keys() == variants.keys() for one in rounds)
    assert all(seconds > 0 for one in rounds for seconds in one.values())
    assert [len(timings.compute_s) for timings in found] == [2, 0, 0]
    assert min(found[0].compute_s) > 0


COMPUTATION = Computation(start=1.0, end=7.0, thread_s=2.0)
STEP_S, RECORDED_STEP_S = 5.0, 10.0  # a step, and one while a listener makes it wait


def compute_s_on(part: float, speed: float) -> tuple[float, ...]:
    """Seconds for which each rank computes, on a part of its core."""

    @contextmanager
    def listen(listener: Callable[[Computation], None]) -> Iterator[None]:
        yield
        listener(COMPUTATION)

    throttle.set_speed(speed)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(race, "core_share", lambda _: part)
            patch.setattr(race, "time_step", lambda *_: RECORDED_STEP_S)
            patch.setattr(race, "time_rounds", lambda *_, **__: [{"trial": STEP_S}])
            patch.setattr(race.throttle, "listen_to_computations", listen)
            request = TimingRequest(
                "it", {"trial": plan((2, 2))}, 1, record_compute="trial"
            )
            timings = raced(Chain(), request)
    finally:
        throttle.set_speed(1.0)
    return timings[0].compute_s if timings and isinstance(timings[0], Timings) else ()


@pytest.mark.parametrize(
    ("part", "speed", "compute_s"),
    [
        (1.0, 1.0, COMPUTATION.thread_s / 2),
        (0.5, 1.0, COMPUTATION.thread_s),
        (0.5, 0.9, (COMPUTATION.end - COMPUTATION.start) / 2),
    ],
)
def test_computing_is_timed_as_operators_are(
    part: float, speed: float, compute_s: float
) -> None:
    """By the own clock, over the part of the core; of a slowed device by the wall.

    All of these are in proportion to a step that nobody listens to.
    """
    assert on_ranks(2, compute_s_on, part, speed)[0] == (compute_s, compute_s)


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
    failing = TimingRequest(
        "it", {"trial": plan_of(Failing(rank, nth), prefixed, 2)}, 5
    )
    on_other = TimingRequest(
        "it", {"alone": PlainModel(1 - rank, "contiguous_format")}, 2
    )
    first, _ = on_ranks(2, raced, Failing(rank, nth), failing, on_other, failing)
    assert first[0] == first[2] == f"on rank {rank}: OutOfMemoryError: there is no"
    assert isinstance(first[1], Timings)


def given_up(limit: float) -> list[int]:
    """Rounds of a request that ends where the candidate takes more than ``limit``."""
    racing = Race(Chain(), X, "infer", TIMEOUT_S)
    if dist.get_rank():
        racing.follow()
        return []
    variants = {REFERENCE: plan((3, 1)), CANDIDATE: plan((2, 2))}
    found = racing.lead(
        TimingRequest("it", variants, MIN_ROUNDS + 3, give_up_above=limit)
    )
    racing.end()
    return [len(found.rounds)]


def test_all_ranks_give_a_candidate_up_that_is_surely_too_slow() -> None:
    assert on_ranks(2, given_up, -1e9) == [[MIN_ROUNDS], []]
    assert on_ranks(2, given_up, 1e9) == [[MIN_ROUNDS + 3], []]


@pytest.mark.parametrize(
    ("seconds", "is_given_up"),
    [
        ([2.0] * MIN_ROUNDS, True),
        ([2.0] * (MIN_ROUNDS - 1), False),
        ([1.0] * MIN_ROUNDS, False),
        ([0.5, 4.0] * MIN_ROUNDS, False),
    ],
)
def test_too_slow_is_told_from_noise(seconds: list[float], is_given_up: bool) -> None:
    rounds = [{REFERENCE: 1.0, CANDIDATE: s} for s in seconds]
    assert TimingRequest("it", {}, give_up_above=0.1).given_up(rounds) is is_given_up
    assert not TimingRequest("it", {}).given_up(rounds)


def test_images_have_two_formats() -> None:
    assert plain_variants(1, ModelInputs.of(torch.ones(1, 2, 3, 4))) == (
        PlainModel(1, "contiguous_format"),
        PlainModel(1, "channels_last"),
    )
    assert plain_variants(1, ModelInputs.of(torch.ones(1, 2, 3))) == (
        PlainModel(1, "contiguous_format"),
    )


def alone_at(speed: float) -> float:
    """Seconds of a round of the plain model, of a device at this speed."""
    throttle.set_speed(speed)
    try:
        (found,) = raced(
            nn.Conv2d(4, 64, 5),
            TimingRequest("it", {"alone": PlainModel(0, "contiguous_format")}, 9),
        )
    finally:
        throttle.set_speed(1.0)
    return min(one["alone"] for one in found.rounds)


def test_an_emulated_device_is_as_slow_alone() -> None:
    fast, slow = (on_one(speed) for speed in (1.0, 0.05))
    assert slow > 2 * fast


def on_one(speed: float) -> float:
    return on_ranks(1, alone_at, speed)[0]
