"""Whole steps of a model in several variants, timed side by side on all ranks.

A variant that fails on any rank fails on all of them, and the job goes on.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from hetconv.autotune.launch.supervisor import log_last_action
from hetconv.autotune.measure import timer
from hetconv.autotune.measure.cpu_share import core_share, uses_thread_clock
from hetconv.autotune.measure.paired_rounds import (
    MIN_ROUNDS,
    LogRatio,
    Round,
    Step,
    agreed_step_s,
    time_rounds,
    time_step,
)
from hetconv.autotune.models.build import formatted, has_images
from hetconv.autotune.models.inputs import ModelInputs
from hetconv.comm.rank_group import RankGroup, all_gather_object, destroy, rank_group_of
from hetconv.containers import tensors_in
from hetconv.nn.parallelize import parallelize
from hetconv.runtime import throttle
from hetconv.runtime.throttle import Computation, throttled
from hetconv.schemas.plan import Mode, Plan
from hetconv.sharding.conv_spec import MemoryFormat

# Names of the two variants of a request that may be given up.
CANDIDATE, REFERENCE = "candidate", "reference"
MAX_RECORDED_STEPS, MAX_RECORDED_S = 5, 1.0  # one step at least
# Times as long as the fastest step so far: what takes that does not run again, where
# its rounds would take more than this part of the seconds that are left.
MAX_SLOWDOWN, MAX_SLOW_PART = 3.0, 0.05


class TrialFailedError(Exception):
    """A variant raised an error, ran out of memory or took too long on some rank.

    All ranks are past it when this is raised.
    """


@dataclass(frozen=True)
class PlainModel:
    """The unsplit model on one rank's device, in one memory format; the others wait."""

    rank: int
    memory_format: MemoryFormat


Variant = Plan | PlainModel


class TimingRequest(NamedTuple):
    """What rank 0 has all ranks time.

    Attributes:
        what: what is said of it where a rank dies meanwhile.
        variants: those that take turns, by name.
        rounds: how many rounds at least; without any, every variant runs once.
        min_seconds: what all rounds take together at least.
        record_compute: the variant of which it is also recorded for how long each rank
            computes.
        give_up_above: the logarithm of the ratio of `CANDIDATE` to `REFERENCE` beyond
            which no more rounds are run, once it surely is there.
        left_s: how long all steps may take.
        rounds_in_any_case: how many rounds run however long they take.
    """

    what: str
    variants: Mapping[str, Variant]
    rounds: int = MIN_ROUNDS
    min_seconds: float = 0.0
    record_compute: str | None = None
    give_up_above: float | None = None
    left_s: float = inf
    rounds_in_any_case: int = 1

    def given_up(self, rounds: Sequence[Round]) -> bool:
        """Returns whether ``rounds`` tell enough of a candidate that is too slow."""
        if self.give_up_above is None or len(rounds) < MIN_ROUNDS:
            return False
        ratio = LogRatio.of(rounds, CANDIDATE, REFERENCE)
        return ratio.surely_above(self.give_up_above)


class Timings(NamedTuple):
    """What came of a request.

    Attributes:
        rounds: seconds of each variant in each round in which it ran.
        compute_s: seconds of the recorded variant's layers by rank.
        too_slow: seconds of a step of each variant that did not run again, as it is much
            slower than the fastest.
    """

    rounds: list[Round]
    compute_s: tuple[float, ...] = ()
    too_slow: Mapping[str, float] = {}

    def check(self, name: str) -> None:
        """Raises `TrialFailedError` for a variant that was too slow to run again."""
        if name in self.too_slow:
            step_s = self.too_slow[name]
            raise TrialFailedError(f"as a step takes {step_s:.3g} s, too long to go on")


class StepTimes:
    """Seconds of the steps of a request, the same on all ranks. Pure.

    Args:
        left_s: how long all steps may take.
        fastest_s: seconds of the fastest step before.
    """

    def __init__(self, left_s: float, fastest_s: float = inf):
        self.left_s, self.fastest_s = left_s, fastest_s
        self._seconds: dict[str, list[float]] = {}

    def add(self, one: Round) -> None:
        """Adds steps that ran, by name."""
        for name, seconds in one.items():
            self._seconds.setdefault(name, []).append(seconds)
        self.left_s -= sum(one.values())
        self.fastest_s = min([self.fastest_s, *one.values()])

    def fits(self, names: Collection[str]) -> bool:
        """Returns whether one more step of each is expected to end in time."""
        return sum(self._seconds[name][-1] for name in names) <= self.left_s

    def is_slow(self, name: str) -> bool:
        """Returns whether a variant has been much slower than the fastest so far.

        A slow one that costs next to nothing does not count. The `REFERENCE` never is.
        """
        seconds = min(self._seconds.get(name, [0.0]))
        rounds_s = MIN_ROUNDS * seconds
        costs = rounds_s > MAX_SLOW_PART * max(self.left_s, 0.0)
        return name != REFERENCE and costs and seconds > MAX_SLOWDOWN * self.fastest_s

    def needs_second(self, name: str) -> bool:
        """Returns whether a slow first step, which may have compiled, is to be repeated."""
        return self.is_slow(name) and self.fits([name])

    def too_slow(self) -> dict[str, float]:
        """Returns the seconds of a step of all that are slow."""
        return {n: min(s) for n, s in self._seconds.items() if self.is_slow(n)}


def step_of(model: nn.Module, inputs: ModelInputs, mode: Mode) -> Callable[[], None]:
    """Makes one step: an inference, or a forward and a backward pass.

    The loss is the mean square of the outputs.

    Args:
        model: the model, split or not.
        inputs: the arguments with which it is called.
        mode: what a step is.
    """

    def infer() -> None:
        with torch.no_grad():
            inputs.call(model)

    def train() -> None:
        model.zero_grad()
        outputs = [
            y
            for y in tensors_in(inputs.call(model), opaque=True)
            if y.is_floating_point()
        ]
        sum(y.square().mean() for y in outputs).backward()  # type: ignore[union-attr]

    return train if mode == "train" else infer


def plain_variants(rank: int, inputs: ModelInputs) -> tuple[PlainModel, ...]:
    """Lists the memory formats in which a plain model may run on a rank's device."""
    contiguous = PlainModel(rank, "contiguous_format")
    if not has_images(inputs):
        return (contiguous,)
    return contiguous, PlainModel(rank, "channels_last")


def plain_step(
    variant: PlainModel, model: nn.Module, inputs: ModelInputs, mode: Mode
) -> Step:
    """Makes `step_of` a copy of a plain model, which an emulated device slows as a whole.

    Args:
        variant: the memory format; the rank is this one.
        model: the model to copy, without splits.
        inputs: the arguments with which it is called.
        mode: what a step is.
    """
    model = copy.deepcopy(model)
    model, inputs = formatted(model, inputs, variant.memory_format)
    step, device = step_of(model, inputs, mode), device_of(model)
    return lambda: throttled(step, device)


def device_of(model: nn.Module) -> torch.device:
    """Returns where a model computes; one without parameters, on the CPU."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


class Race:
    """Timing of variants on all ranks: rank 0 leads, the others follow.

    Args:
        model: the plain model, on this rank's device.
        inputs: the arguments with which it is called.
        mode: what a step is.
        timeout_s: how long a rank waits for another one in the middle of a step.
        left_s: asked on rank 0, how long the steps of a request may take.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: ModelInputs,
        mode: Mode,
        timeout_s: float,
        left_s: Callable[[], float] = lambda: inf,
    ):
        self._model, self._inputs, self._mode = model, inputs, mode
        self._timeout = timedelta(seconds=timeout_s)
        self._device = device_of(model)
        self._group: RankGroup | None = None
        self._steps: dict[str, tuple[Variant, Step]] = {}
        self._left_s, self._fastest_s = left_s, inf

    def lead(self, request: TimingRequest) -> Timings:
        """Times variants on all ranks. Collective with `follow`.

        Raises:
            TrialFailedError: if a variant raised an error on any rank, or one waited
                too long.
        """
        request = request._replace(left_s=min(request.left_s, self._left_s()))
        timer.broadcast_object(request)
        return self._run(request)

    def end(self) -> None:
        """Ends `follow` on the other ranks."""
        timer.broadcast_object(None)
        self._release()

    def follow(self) -> None:
        """Takes part in what rank 0 leads, until it ends."""
        while (request := timer.broadcast_object(None)) is not None:
            try:
                self._run(request)
            except TrialFailedError:  # rank 0 says what comes of it
                continue
        self._release()

    def _run(self, request: TimingRequest) -> Timings:
        log_last_action(f"began to time {request.what}")
        timings, failure = Timings([]), None
        try:
            if self._group is None:  # connections of its own, which can be given up
                self._group = rank_group_of(dist.new_group(timeout=self._timeout))
            timings = self._time(request, self._group)
        except Exception as e:  # whatever a model may raise
            failure = time.time(), f"{type(e).__name__}: {e}".strip()
        if failure is not None:
            # Closes this rank's connections, so that others that wait for it learn of it.
            self._release()
        of_ranks = all_gather_object(rank_group_of(), failure)
        failed = [(*of, rank) for rank, of in enumerate(of_ranks) if of is not None]
        if failed:
            self._release()
            _, message, rank = min(failed)
            raise TrialFailedError(f"on rank {rank}: {message.splitlines()[0]}")
        return timings

    def _time(self, request: TimingRequest, group: RankGroup) -> Timings:
        self._steps = {
            name: known
            for name, known in self._steps.items()
            if request.variants.get(name) == known[0]
        }
        times = StepTimes(request.left_s, self._fastest_s)
        for name, variant in request.variants.items():
            if name not in self._steps:
                self._steps[name] = variant, self._step(variant, group)
                self._warm_up(name, times, group)
        rounds = self._rounds(request, times, group) if request.rounds else []
        self._fastest_s = times.fastest_s
        too_slow = times.too_slow()
        recorded = request.record_compute
        if recorded is None or recorded in too_slow or not rounds:
            return Timings(rounds, (), too_slow)
        step_s = median(one[recorded] for one in rounds)
        compute_s = self._compute_seconds(self._steps[recorded][1], step_s, group)
        return Timings(rounds, compute_s, too_slow)

    def _warm_up(self, name: str, times: StepTimes, group: RankGroup) -> None:
        """Runs the first step, and a second one where that may still be a fast variant."""
        step = self._steps[name][1]
        times.add({name: agreed_step_s(step, self._device, group)})
        if times.needs_second(name):
            times.add({name: agreed_step_s(step, self._device, group)})

    def _rounds(
        self, request: TimingRequest, times: StepTimes, group: RankGroup
    ) -> list[Round]:
        """Runs all that are not too slow in turn, for as long as they fit."""
        slow = times.too_slow()
        steps = {n: self._steps[n][1] for n in request.variants if n not in slow}

        def drop(one: Round) -> Collection[str]:
            times.add(one)
            return times.too_slow()

        def stop(rounds: Sequence[Round]) -> bool:
            left = [name for name in rounds[-1] if not times.is_slow(name)]
            nothing_to_compare = len(left) < min(len(request.variants), 2)
            enough = len(rounds) >= request.rounds_in_any_case
            out_of_time = enough and not times.fits(left)
            return nothing_to_compare or request.given_up(rounds) or out_of_time

        return time_rounds(
            steps,
            self._device,
            group,
            request.rounds,
            request.min_seconds,
            stop=stop,
            drop=drop,
        )

    def _compute_seconds(
        self, step: Step, step_s: float, group: RankGroup
    ) -> tuple[float, ...]:
        """Measures for how long each rank computes convolutions and linears in a step.

        A host that listens waits for its GPU, so that steps take longer meanwhile:
        what is found is scaled to a step of ``step_s``. On a CPU it is timed by the
        clock by which operators are, for others' turns on the core fall between
        computations too.
        """
        share = core_share(rank_group_of())
        own_clock = uses_thread_clock(self._device)
        count = min(max(int(MAX_RECORDED_S / step_s), 1), MAX_RECORDED_STEPS)
        found = []
        for _ in range(count):
            computations: list[Computation] = []
            with throttle.listen_to_computations(computations.append):
                seconds = time_step(step, self._device, group)
            if own_clock:
                compute_s = sum(c.thread_s for c in computations) / share
            else:
                compute_s = sum(c.end - c.start for c in computations)
            found.append(compute_s * step_s / seconds)
        return tuple(all_gather_object(group, median(found)))

    def _step(self, variant: Variant, group: RankGroup) -> Step:
        if isinstance(variant, Plan):
            model = parallelize(
                copy.deepcopy(self._model), variant, group=group.process_group
            )
            return step_of(model, self._inputs, self._mode)
        if variant.rank != group.rank:
            return lambda: None
        return plain_step(variant, self._model, self._inputs, self._mode)

    def _release(self) -> None:
        """Frees what variants hold, memory above all, and ends their connections."""
        self._steps = {}
        group, self._group = self._group, None
        if group is not None:
            destroy(group)
        del group
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
