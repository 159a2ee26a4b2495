"""Whole steps that are timed in turn, and what their paired ratios say.

Variants that are compared run in the same round, one right after the other, so that a
clock that drifts or a neighbour that comes and goes changes both alike and cancels in
their ratio.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from math import exp, log
from statistics import median
from typing import Any, NamedTuple

import torch

from hetconv.comm.rank_group import RankGroup, all_gather_object, rank_group_of

from .barrier import barrier, tight_barrier
from .sampling import log_error_of_median
from .timer import timed

MIN_ROUNDS, MAX_ROUNDS = 4, 31
# A ratio is told from another one that is at least so many standard errors away.
SURE_STANDARD_ERRORS = 2.0
Step = Callable[[], Any]
Round = Mapping[str, float]
"""Seconds of one step of each variant, by name."""


class LogRatio(NamedTuple):
    """Median of the logarithms of paired step-time ratios, and its standard error."""

    value: float
    error: float

    @classmethod
    def of(cls, rounds: Sequence[Round], name: str, reference: str) -> LogRatio:
        """Compares two variants, round by round.

        Args:
            rounds: those in which both ran; others are left out.
            name: the variant whose seconds are the numerator.
            reference: the variant whose seconds are the denominator.
        """
        ratios = [one[name] / one[reference] for one in rounds if name in one]
        return cls(log(median(ratios)), log_error_of_median(ratios))

    @property
    def ratio(self) -> float:
        """The ratio itself."""
        return exp(self.value)

    def surely_above(self, limit: float) -> bool:
        """Returns whether noise does not explain that this is more than ``limit``."""
        return self.value - SURE_STANDARD_ERRORS * self.error > limit

    def surely_below(self, limit: float) -> bool:
        """Returns whether noise does not explain that this is less than ``limit``."""
        return self.value + SURE_STANDARD_ERRORS * self.error < limit


def paired(
    steps: Mapping[str, Step],
    rounds: int,
    device: torch.device,
    min_seconds: float = 0.0,
) -> dict[str, list[float]]:
    """Returns the seconds of each step in every one of the `paired_rounds`."""
    found = paired_rounds(steps, rounds, device, min_seconds)
    return {name: [one[name] for one in found] for name in steps}


def paired_rounds(
    steps: Mapping[str, Step],
    rounds: int,
    device: torch.device,
    min_seconds: float = 0.0,
    max_rounds: int = MAX_ROUNDS,
) -> list[Round]:
    """Times steps in turn, among all ranks, once each has run. See `time_rounds`."""
    for step in steps.values():
        step()
    return time_rounds(steps, device, rank_group_of(), rounds, min_seconds, max_rounds)


def time_rounds(
    steps: Mapping[str, Step],
    device: torch.device,
    group: RankGroup,
    rounds: int = MIN_ROUNDS,
    min_seconds: float = 0.0,
    max_rounds: int = MAX_ROUNDS,
    stop: Callable[[Sequence[Round]], bool] = lambda _: False,
    drop: Callable[[Round], Collection[str]] = lambda _: (),
) -> list[Round]:
    """Times rounds of steps that have run before.

    Collective; the rounds are the same on every rank, and so is when they end.

    Args:
        steps: the variants, by name.
        device: the one on which this rank computes.
        group: the ranks that run the steps.
        rounds: how many rounds at least.
        min_seconds: what all rounds take together at least, in more rounds of short
            steps.
        max_rounds: how many rounds are run for ``min_seconds`` at most.
        stop: whether the rounds so far are enough, whatever else is asked for.
        drop: names of those that do not run again, after each round.
    """
    found: list[Round] = []
    seconds, left = 0.0, dict(steps)
    while len(found) < rounds or (seconds < min_seconds and len(found) < max_rounds):
        found.append(_one_round(left, len(found), device, group))
        seconds += sum(found[-1].values())
        dropped = drop(found[-1])
        left = {name: step for name, step in left.items() if name not in dropped}
        if stop(found):
            break
    return found


def _one_round(
    steps: Mapping[str, Step], turn: int, device: torch.device, group: RankGroup
) -> Round:
    """Runs every step once.

    In each ``turn`` the order is another one, so that no step is always the first, or
    always follows the same one.
    """
    order = random.Random(turn).sample([*steps], len(steps))
    own = {name: time_step(steps[name], device, group) for name in order}
    of_ranks = all_gather_object(group, own)
    return {name: max(seconds[name] for seconds in of_ranks) for name in steps}


def agreed_step_s(step: Step, device: torch.device, group: RankGroup) -> float:
    """Times a step as `time_step` does, and returns what the slowest rank saw."""
    return max(all_gather_object(group, time_step(step, device, group)))


def time_step(step: Step, device: torch.device, group: RankGroup) -> float:
    """Times a step that all ranks begin together, until the last one has ended it.

    Args:
        step: this rank's part of it.
        device: the one on which this rank computes.
        group: the ranks that run it.

    Returns:
        The seconds, as this rank saw them.
    """
    # Between hosts, and by NCCL, who waits gives up when the group's own connections do.
    all_here = partial(tight_barrier if group.one_host else barrier, group)

    def together() -> None:
        timed(step, device)
        all_here()

    all_here()
    return timed(together, device)
