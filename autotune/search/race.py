"""Whole steps of a model, run in several ways side by side. One that fails on any rank
fails on all, and no more.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetconv.autotune.launch import throttle
from hetconv.autotune.launch.supervisor import log_last_action
from hetconv.autotune.launch.throttle import Computation, stretched
from hetconv.autotune.measure import timer
from hetconv.autotune.measure.barrier import parts_of_core
from hetconv.autotune.measure.model_inputs import ModelInputs
from hetconv.autotune.measure.models import channels_last, has_images
from hetconv.autotune.measure.paired_rounds import (
    MOST_ROUNDS,
    Paced,
    Round,
    Step,
    one_round,
    pulses_of,
    until_all_are_done,
)
from hetconv.autotune.measure.statistics import log_error_of_median
from hetconv.comm.rank_group import RankGroup, all_gather_object, destroy, rank_group_of
from hetconv.containers import map_tensors, tensors_in
from hetconv.cost.estimator import StepEstimator
from hetconv.nn.parallelize import parallelize
from hetconv.planner.candidates import Candidates
from hetconv.planner.make_plan import PLANNED
from hetconv.schemas.plan import SINGLE_DEVICE, Mode, Plan
from hetconv.sharding.layer_rules import Split

from .study import TrialFailedError

LISTENED, LISTENED_S = 3, 1.0  # steps at most on GPUs, and seconds; one at least
LEAST_ROUNDS, PATIENCE = (
    3,
    0.8,
)  # enough once they took so many seconds for each that was asked for
Seconds = dict[str, float]


@dataclass(frozen=True)
class Alone:
    """The plain model on one rank's device, in one memory format; the others wait."""

    rank: int
    memory_format: Literal["channels_last", "contiguous"]


Way = Plan | Alone


class Order(NamedTuple):
    """``what`` rank 0 has all ranks do, in so many ``rounds``: fewer of long steps,
    which vary less.

    ``listen``: of which way the time in which each rank computes is wanted too.
    ``least_s``: seconds that all rounds take at least, short steps in up to
    `rounds.MOST_ROUNDS`.
    """

    what: str
    ways: Mapping[str, Way]
    rounds: int
    listen: str | None = None
    least_s: float = 0.0


class Outcome(NamedTuple):
    """``rounds``: of each way a step; of the one that was listened to, for how many
    seconds each rank computed.

    These are as on devices that took ``pulse_s`` for a pulse, their mean while it ran.
    ``noise``: their standard error, in logarithms.
    """

    rounds: list[Round]
    computing: tuple[float, ...] = ()
    noise: tuple[float, ...] = ()
    pulse_s: tuple[float, ...] = ()


def step_of(model: nn.Module, inputs: ModelInputs, mode: Mode) -> Callable[[], None]:
    """One inference, or one forward and backward with the mean square of the outputs as loss."""

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


def step_alone(model: nn.Module, inputs: ModelInputs, mode: Mode) -> Step:
    """`step_of` a plain model, all of which takes longer where the device is emulated.

    Those who are `throttle.visiting` are called between its modules. The ``model`` is
    this step's own from now on.
    """

    def between(_: nn.Module, __: Any, y: Any) -> None:
        throttle.interlude()
        if isinstance(y, Tensor) and y.requires_grad:
            y.register_hook(lambda _: throttle.interlude())

    for module in model.modules():
        if next(module.children(), None) is None:
            module.register_forward_hook(between)
    step, device = step_of(model, inputs, mode), device_of(model)
    return lambda: stretched(step, device)


def formats(rank: int, inputs: ModelInputs) -> tuple[Alone, ...]:
    """The ways to run the plain model on a rank's device."""
    contiguous = Alone(rank, "contiguous")
    return (
        (contiguous, Alone(rank, "channels_last"))
        if has_images(inputs)
        else (contiguous,)
    )


def step_in(way: Alone, model: nn.Module, inputs: ModelInputs, mode: Mode) -> Step:
    """`step_alone` of a copy of a plain ``model`` in the way's memory format, on this rank."""
    model = copy.deepcopy(model)
    if way.memory_format == "channels_last":
        return step_alone(*channels_last(model, inputs), mode)
    model = model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    return step_alone(model, map_tensors(torch.Tensor.contiguous, inputs), mode)


def device_of(model: nn.Module) -> torch.device:
    """Where it computes: a model without parameters, which nobody plans, on the CPU."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


class Race:
    """Rank 0 leads, the others follow. ``limit``: seconds that a rank waits for another
    in the middle of a step.
    """

    def __init__(self, model: nn.Module, inputs: ModelInputs, mode: Mode, limit: float):
        self._model, self._inputs, self._mode, self._limit = (
            model,
            inputs,
            mode,
            timedelta(seconds=limit),
        )
        self._device = device_of(model)
        self._group: RankGroup | None = None
        self._steps: dict[str, tuple[Way, Step]] = {}

    def lead(
        self, order: Order, enough: Callable[[Round], bool] = lambda _: False
    ) -> Outcome:
        """Collective with `follow`. Stops after a round of which ``enough`` says so, if
        `Order.least_s` are over.

        Raises `TrialFailedError` if a way raised an error on any rank, or one waited
        too long; all are past it then.
        """
        timer.told(order)
        return self._run(order, enough)

    def end(self) -> None:
        """Lets the others off."""
        timer.told(None)
        self._clear()

    def follow(self) -> None:
        while (order := timer.told(None)) is not None:
            try:
                self._run(order, lambda _: False)
            except TrialFailedError:  # rank 0 says what comes of it
                continue
        self._clear()

    def _run(self, order: Order, enough: Callable[[Round], bool]) -> Outcome:
        log_last_action(f"began to time {order.what}")
        found, why = Outcome([]), None
        try:
            if self._group is None:  # connections of its own, which can be given up
                self._group = rank_group_of(dist.new_group(timeout=self._limit))
            found = self._ran(order, enough, self._group)
        except Exception as e:  # whatever a model may raise
            why = time.time(), f"{type(e).__name__}: {e}".strip()
        if why is not None:
            self._clear()  # closes this rank's connections: others that wait for it learn of it
        said = all_gather_object(rank_group_of(), why)
        failed = [
            (*of_rank, rank) for rank, of_rank in enumerate(said) if of_rank is not None
        ]
        if failed:
            self._clear()
            _, first, rank = min(failed)
            raise TrialFailedError(f"on rank {rank}: {first.splitlines()[0]}")
        return found

    def _ran(
        self, order: Order, enough: Callable[[Round], bool], group: RankGroup
    ) -> Outcome:
        self._steps = {
            n: old for n, old in self._steps.items() if order.ways.get(n) == old[0]
        }
        for name, way in order.ways.items():
            if name not in self._steps:
                self._steps[name] = way, self._step(way, group)
                self._steps[name][1]()
        steps: dict[str, Step] = {name: self._steps[name][1] for name in order.ways}
        heard, waits = self._heard(order, steps, group)
        rounds: list[Round] = []
        more = order.rounds > 0
        while more:
            rounds.append(one_round(steps, len(rounds), self._device, group))
            more = not _ended(rounds, order, enough(rounds[-1]))
            said = [more]
            dist.broadcast_object_list(said, group=group.control, group_src=0)
            (more,) = said
        if heard is None:
            return Outcome(rounds)
        ran = [one[heard.name] for one in rounds]
        mean_s = pulses_of(ran)
        if waits:
            own_s = _after(
                heard, median(step.seconds for step in ran), self._device, group
            )
        else:
            slow = [step.pulse_s[group.rank] / mean_s[group.rank] for step in ran]
            own_s = [
                seconds / times
                for seconds, times in zip(heard.seconds, slow, strict=True)
            ]
        computing, noise = zip(
            *all_gather_object(group, (median(own_s), log_error_of_median(own_s))),
            strict=True,
        )
        return Outcome(rounds, computing, noise, mean_s)

    def _heard(
        self, order: Order, steps: dict[str, Step], group: RankGroup
    ) -> tuple[_Heard | None, bool]:
        """Who listens, in place of the step, if anybody; and whether that makes a host
        wait for its device.

        Where it does, the step stays as it is, to be heard when all rounds are over.
        """
        if order.listen is None:
            return None, False
        part = parts_of_core(rank_group_of()).together
        heard = _Heard(
            order.listen,
            steps[order.listen],
            part if timer.by_own_clock(self._device) else None,
        )
        waits = "cuda" in all_gather_object(group, self._device.type)
        if not waits:
            steps[order.listen] = heard
        return heard, waits

    def _step(self, way: Way, group: RankGroup) -> Step:
        if isinstance(way, Plan):
            return step_of(
                parallelize(copy.deepcopy(self._model), way, group=group.process_group),
                self._inputs,
                self._mode,
            )
        return (
            step_in(way, self._model, self._inputs, self._mode)
            if way.rank == group.rank
            else lambda: None
        )

    def _clear(self) -> None:
        """Frees what ways hold, memory above all, and ends the connections that they used."""
        self._steps = {}
        group, self._group = self._group, None
        if group is not None:
            destroy(group)
        del group
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _ended(rounds: Sequence[Round], order: Order, told: bool) -> bool:
    """``all_gather_uneven``: whether they need not go on."""
    count, took = (
        len(rounds),
        sum(step.seconds for one in rounds for step in one.values()),
    )
    long = count >= LEAST_ROUNDS and took > PATIENCE * order.rounds
    done = told or long or count >= order.rounds
    return done and (took >= order.least_s or count >= MOST_ROUNDS)


class _Heard:
    """A step that notes how long this rank computes convolutions and linears.

    ``part``: of the core, if it is timed by its own clock, as operators are: others'
    turns fall between computations too, so that the wall does not see all that these
    take longer.
    """

    def __init__(self, name: str, sharding: Step, part: float | None):
        self.name, self._step, self._part = name, sharding, part
        self.seconds = list[float]()

    def __call__(self) -> None:
        self.seconds.append(0.0)
        with throttle.listening(self._note):
            self._step()

    def _note(self, computation: Computation) -> None:
        start, end, own_s = computation
        self.seconds[-1] += (
            own_s / self._part if self._part is not None else end - start
        )


def _after(
    heard: _Heard, step_s: float, device: torch.device, group: RankGroup
) -> list[float]:
    """What it hears in some more steps, in seconds of one that takes ``step_s`` while
    nobody listens.
    """
    count = min(
        max(int(LISTENED_S / step_s), 1), LISTENED
    )  # alike on all ranks, as rounds are
    took = [until_all_are_done(heard, device, group) for _ in range(count)]
    return [
        step_s * own / seconds for own, seconds in zip(heard.seconds, took, strict=True)
    ]


class Usual:
    """Of a model's steps, as many times as long, or as short, as is predicted for the
    pulses that there were within.
    """

    def __init__(self, pricer: StepEstimator):
        self._pricer, self._candidates = (
            pricer,
            Candidates(pricer.graph, pricer.profile, pricer.mode),
        )
        self._usual_s: dict[Hashable, float] = {}

    def __call__(self, ways: Mapping[str, Way], ran: Round) -> Seconds:
        return {
            name: self.seconds(*self._named(way), ran[name])
            for name, way in ways.items()
        }

    def seconds(self, name: str, splits: Mapping[str, Split], ran: Paced) -> float:
        """Of a step of the plan of this name, see `StepEstimator.of`."""
        plan = name, frozenset(splits.items())
        if plan not in self._usual_s:  # the same for all of its steps
            self._usual_s[plan] = self._pricer.step_s(name, splits)
        return ran.seconds * (
            self._usual_s[plan] / self._pricer.step_s(name, splits, ran.pulse_s)
        )

    def _named(self, way: Way) -> tuple[str, Mapping[str, Split]]:
        if isinstance(way, Plan):
            return PLANNED, way.splits
        splits = self._candidates.single_device(way.rank)
        assert splits is not None  # it would not have run
        return SINGLE_DEVICE, splits
