"""Whole steps, in turn, and how fast devices were within each."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from statistics import harmonic_mean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hetconv.autotune.launch import throttle
from hetconv.comm.rank_group import RankGroup, all_gather_object, rank_group_of

from .barrier import meet
from .timer import WARM_S, pulse, timed

MOST_ROUNDS = 31
BEATS = 4  # pulses before each step; as many within it tell more than these
EVERY = 20  # times as long as a pulse takes, it is to the next one within a step
Step = Callable[[], Any]


class Paced(NamedTuple):
    """A step: ``seconds`` until the last rank was done, but for pulses, and ``pulse_s``
    of each rank; if asked for.
    """

    seconds: float
    pulse_s: tuple[float, ...]


Round = Mapping[str, Paced]
"""A step of each of several ways, by name."""


def paired(
    steps: Mapping[str, Step], rounds: int, device: torch.device, longest: float = 0.0
) -> dict[str, list[float]]:
    """Seconds of `paced_rounds`, without pulses."""
    found = paced_rounds(steps, rounds, device, longest, pulses=False)
    return {name: [one[name].seconds for one in found] for name in steps}


def paced_rounds(
    steps: Mapping[str, Step],
    rounds: int,
    device: torch.device,
    longest: float = 0.0,
    most: int = MOST_ROUNDS,
    pulses: bool = True,
) -> list[Round]:
    """Collective: `one_round` after the other, once every step has run.

    So many ``rounds``, and more, up to ``most``, until all have together taken ``longest`` seconds.
    """
    for step in steps.values():
        step()
    found: list[Round] = []
    while len(found) < rounds or (
        len(found) < most
        and sum(step.seconds for one in found for step in one.values()) < longest
    ):  # alike on all ranks
        found.append(one_round(steps, len(found), device, rank_group_of(), pulses))
    return found


def one_round(
    steps: Mapping[str, Step],
    turn: int,
    device: torch.device,
    group: RankGroup,
    pulses: bool = True,
) -> Round:
    """Every step once, one after the other; what it says is the same on every rank.

    In each ``turn`` in another order, so that none is always the first, or always
    follows the same one.
    """
    order = random.Random(turn).sample([*steps], len(steps))
    own = {name: _timed(steps[name], device, group, pulses) for name in order}
    each = all_gather_object(group, own)
    return {name: _of_all([of_rank[name] for of_rank in each]) for name in steps}


def pulses_of(steps: Sequence[Paced]) -> tuple[float, ...]:
    """Of each rank, what a pulse takes at its mean speed within these."""
    return tuple(
        map(harmonic_mean, zip(*(step.pulse_s for step in steps), strict=True))
    )


def until_all_are_done(sharding: Step, device: torch.device, group: RankGroup) -> float:
    """Seconds of a step that all ranks begin together."""

    # Between hosts, and by NCCL, who waits gives up when the group's own connections do.
    all_here = (
        partial(meet, group)
        if group.one_host
        else partial(dist.barrier, group.process_group)
    )

    def together() -> None:
        timed(sharding, device)
        all_here()

    all_here()
    return timed(together, device)


class _Timed(NamedTuple):
    """One rank's: seconds of a step, for how many of them there were pulses, and those
    that tell how fast it was.
    """

    seconds: float
    beside_s: float
    pulse_s: tuple[float, ...]


def _timed(
    sharding: Step, device: torch.device, group: RankGroup, pulses: bool
) -> _Timed:
    if not pulses:
        return _Timed(until_all_are_done(sharding, device, group), 0.0, ())
    beat = pulse(device)
    before = [beat() for _ in range(BEATS)]
    with _Pulses.within(device) as own:
        seconds = until_all_are_done(sharding, device, group)
    return _Timed(
        seconds,
        own.took_s,
        (*([] if len(own.pulse_s) >= BEATS else before), *own.pulse_s),
    )


def _of_all(ranks: Sequence[_Timed]) -> Paced:
    """Ranks take their pulses at about the same time, so that the step is longer by
    those of one.
    """
    seconds = max(rank.seconds for rank in ranks) - max(rank.beside_s for rank in ranks)
    return Paced(
        seconds, tuple(harmonic_mean(rank.pulse_s) for rank in ranks if rank.pulse_s)
    )


class _Pulses:
    """Between the computations of a step: its speed changes within less time than the
    step takes, and what a device did before tells little of it.
    """

    def __init__(self, device: torch.device):
        self.pulse_s: list[float] = []
        self.took_s, self._beat, self._next = 0.0, pulse(device), 0.0

    def __call__(self) -> None:
        """As `throttle.visiting` calls it; a device that has just paused is left at that."""
        began = time.perf_counter()
        if began < self._next or throttle.at_work_s() < WARM_S:
            return
        self.pulse_s.append(self._beat())
        done = time.perf_counter()
        self.took_s += done - began
        self._next = done + EVERY * (done - began)

    @staticmethod
    @contextmanager
    def within(device: torch.device) -> Iterator[_Pulses]:
        """While a step runs; a GPU's host is ahead of it, and would have to wait for each."""
        found = _Pulses(device)
        with throttle.visiting(found) if device.type == "cpu" else nullcontext():
            yield found
