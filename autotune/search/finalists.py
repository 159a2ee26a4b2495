"""The end of the stage of plans: those that were nearly the fastest, side by side, and
what the last one gains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, exp, hypot, log, log2
from statistics import fmean, median
from typing import NamedTuple

from hetconv.autotune.measure.device_info import conditions
from hetconv.autotune.measure.statistics import (
    inverse_variance_mean,
    log_error_of_median,
)
from hetconv.cost.estimator import StepEstimator
from hetconv.planner.candidates import EVEN
from hetconv.planner.make_plan import Contender
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import Plan
from hetconv.schemas.tuning_results import TunedPlan

from .calibrate import MISFIT
from .job import Run
from .race import Order, Seconds, Usual, Way
from .study import ROUNDS, TrialFailedError

REFERENCE = "alone"
RIVALS, HARDLY = (
    4,
    0.1,
)  # how many plans at most are compared once more, expected to take so much longer than the best
PREDICTED = 0.1  # how far predictions are off by then, in logarithms
# of the budget: for all heats, in which more rounds are run of fewer and fewer rivals
HEATS_PART = 0.1
STEADIEST = 0.005  # standard error of a heat's steps at least, in logarithms
OVERRUN, STEPS = (
    2.0,
    5,
)  # times as long as that they may take, of so many steps of each rival at least
CLOSING_ROUNDS, CLOSING_S = (
    9,
    4.0,
)  # of the plan that is left; seconds that they take at least, after heats
# Of the fastest device's step alone: a plan that takes more does not pay. Where others
# use the machine it changes by some hundredths from minute to minute: whatever disturbs
# one device, all wait for it.
WORTH = 0.96


class Rival(NamedTuple):
    """A plan, the ``part`` that its steps take of those that it runs beside, and the
    ``noise`` of that: its standard error, in logarithms.
    """

    contender: Contender
    part: float
    noise: float

    def seen(self, part: float, noise: float) -> Rival:
        """With what is known besides."""
        likely, unsure = inverse_variance_mean(
            (log(self.part), self.noise), (log(part), noise)
        )
        return Rival(self.contender, exp(likely), unsure)


Rivals = dict[str, Rival]
Heat = list[Seconds]  # its rounds, on devices as fast as they usually are


class Ended(NamedTuple):
    """The ``plan``, and what the heats and the closing tell: ``seen``, of all that ran
    in them, the even split too; ``reference_s``: in each, of what these ran beside.
    """

    plan: TunedPlan
    seen: Sequence[Rival]
    reference_s: Sequence[float]


def beside(alone: Contender | None) -> str:
    """What plans are measured beside, in words."""
    return alone.name if alone is not None else "the plan planned first"


@dataclass(frozen=True)
class Final:
    """Rank 0's. ``base``: any plan of the model.

    ``reference``: what plans are measured beside, ``alone`` if that is the plain model
    on a device. ``even``: the name of the even split that is predicted to be the
    fastest, and its splits. ``corrected``: the profile with what was learnt from
    trials: heats and the closing teach more, see `Ended`.
    """

    run: Run
    base: Plan
    reference: Way
    alone: Contender | None
    even: tuple[str, Contender] | None
    corrected: ClusterProfile

    def plan(
        self, tried: Sequence[Rival], untried: Sequence[Contender] = ()
    ) -> Ended | None:
        """Of all these the fastest, in more rounds than they had; a device alone, if it
        does not beat that.
        """
        rivals, name, heats = self._raced(tried, untried)
        best, least_s = (
            rivals[name].contender,
            CLOSING_S if heats else HEATS_PART * self.run.job.budget,
        )
        closing = self._closing(
            best.name, {REFERENCE: self.reference, name: self._way(best)}, least_s
        )
        if closing is None:
            return None
        heats.append(closing)
        part, step_s = median(_parts(name, heats)), _median(closing, name)
        if self.alone is not None and part > WORTH:
            best, step_s = self.alone, _median(closing, REFERENCE)
        said = f"the fastest split took {part:.3f}x of {beside(self.alone)}"
        self.run.say.line(f"the plan is {best.name}: {step_s * 1e3:.1f} ms; {said}")
        entry = self._entry(best, step_s, len(tried), closing)
        return Ended(
            entry,
            self._seen(rivals, heats),
            [_median(heat, REFERENCE) for heat in heats],
        )

    def likeliest(self, tried: Sequence[Rival]) -> Rival:
        """Of these to be the fastest, by what was predicted and measured."""
        return min(tried, key=lambda ran: self._tried(ran).part)

    def undisputed(self, why: str) -> TunedPlan | None:
        """The device alone, if the model runs on any."""
        if self.alone is None:
            return None
        closing = self._closing(self.alone.name, {REFERENCE: self.reference}, CLOSING_S)
        if closing is None:
            return None
        alone_s = _median(closing, REFERENCE)
        self.run.say.line(
            f"the plan is {self.alone.name}: {alone_s * 1e3:.1f} ms; {why}"
        )
        return self._entry(self.alone, alone_s, 0, closing)

    def _raced(
        self, tried: Sequence[Rival], untried: Sequence[Contender]
    ) -> tuple[Rivals, str, list[Heat]]:
        """Who raced, who is left of them, and the heats, if there were any."""
        rivals: Rivals = {}
        for others in (
            (untried, ()) if untried else ((),)
        ):  # who was not tried may not run at all
            rivals = self._rivals(tried, others)
            try:
                return rivals, *self._fastest(rivals)
            except TrialFailedError as e:
                self.run.say.line(
                    f"the fastest plans were not run side by side, that failed {e}"
                )
        return rivals, next(iter(rivals)), []

    def _seen(self, rivals: Rivals, heats: Sequence[Heat]) -> list[Rival]:
        """What heats, and the closing among them, tell of each plan once: the even
        split may have been a rival too.
        """
        ran = {name: rival.contender for name, rival in rivals.items()} | (
            {EVEN: self.even[1]} if self.even else {}
        )
        seen = []
        for name, contender in ran.items():
            same = [n for n, other in ran.items() if other.splits == contender.splits]
            parts = [part for n in same for part in _parts(n, heats)]
            if name == same[0] and parts:
                seen.append(Rival(contender, median(parts), log_error_of_median(parts)))
        return seen

    def _rivals(self, tried: Sequence[Rival], untried: Sequence[Contender]) -> Rivals:
        """By a name of their own, fastest first, those that may be the fastest by what
        was predicted and measured.

        No more than the budget has time for: one that was tried, if it has none for two.
        """
        ran = sorted(map(self._tried, tried), key=lambda rival: rival.part)
        most = min(
            RIVALS,
            int(OVERRUN * HEATS_PART * self.run.job.budget / (STEPS * self._beside_s))
            - 1,
        )
        if most < 2:
            return {f"0: {ran[0].contender.name}": ran[0]}
        order = sorted(
            [*ran, *map(self._predicted, untried)], key=lambda rival: rival.part
        )
        near = [
            rival
            for rival in order[:most]
            if rival.part <= (1 + HARDLY) * order[0].part
        ]
        near += [ran[0]] if ran[0] not in near else []  # one that did run
        return {f"{k}: {rival.contender.name}": rival for k, rival in enumerate(near)}

    def _tried(self, ran: Rival) -> Rival:
        return self._predicted(ran.contender).seen(ran.part, hypot(MISFIT, ran.noise))

    def _predicted(self, contender: Contender) -> Rival:
        part = self._pricer.step_s(contender.name, contender.splits) / self._beside_s
        return Rival(contender, part, PREDICTED)

    @cached_property
    def _beside_s(self) -> float:
        """What a step is predicted to take that plans are measured beside."""
        if self.alone is not None:
            return self._pricer.step_s(self.alone.name, self.alone.splits)
        assert isinstance(self.reference, Plan)
        return self._pricer.step_s(self.reference.chosen, self.reference.splits)

    @cached_property
    def _pricer(self) -> StepEstimator:
        return StepEstimator(self.run.graph, self.corrected, self.run.job.mode)

    @cached_property
    def _usual(self) -> Usual:
        return Usual(self._pricer)

    def _fastest(self, rivals: Rivals) -> tuple[str, list[Heat]]:
        """After each heat the slower half is out (successive halving: Karnin et al., 2013).

        All its rounds count, as sure as they are, and all that was known before.
        """
        left, heats, count = [*rivals], list[Heat](), ceil(log2(len(rivals)))
        for _ in range(count):
            ways = {
                REFERENCE: self.reference,
                **{name: self._way(rivals[name].contender) for name in left},
            }
            order = Order(
                "the fastest plans",
                ways,
                ROUNDS,
                least_s=HEATS_PART * self.run.job.budget / count,
            )
            heats.append(
                [self._usual(ways, one) for one in self.run.race.lead(order).rounds]
            )
            parts = {name: _parts(name, heats) for name in left}
            noise = max(
                fmean(log_error_of_median(of_plan) ** 2 for of_plan in parts.values())
                ** 0.5,
                STEADIEST,
            )
            now = {
                name: rivals[name].seen(median(of_plan), noise).part
                for name, of_plan in parts.items()
            }
            left = sorted(left, key=now.__getitem__)[: ceil(len(left) / 2)]
        return left[0], heats

    def _closing(
        self, name: str, ways: Mapping[str, Way], least_s: float
    ) -> Heat | None:
        """Rounds of these beside the even split, where that runs; or none."""
        for more in ({EVEN: self._way(self.even[1])}, {}) if self.even else ({},):
            order = Order(
                f"{name} again", {**ways, **more}, CLOSING_ROUNDS, least_s=least_s
            )
            try:
                return [
                    self._usual(order.ways, one)
                    for one in self.run.race.lead(order).rounds
                ]
            except TrialFailedError as e:
                self.run.say.line(
                    f"{name}{f' beside an {EVEN}' * bool(more)} failed {e}"
                )
        return None

    def _way(self, contender: Contender) -> Plan:
        return self.base.with_splits(contender.splits)

    def _entry(
        self, best: Contender, step_s: float, trials: int, closing: Heat
    ) -> TunedPlan:
        even = self.even[0] if self.even and EVEN in closing[0] else None
        return TunedPlan(
            self.run.graph.digest,
            self.run.job.mode,
            best.name,
            best.splits,
            step_s,
            predicted_s=self._pricer.step_s(best.name, best.splits),
            trials=trials,
            alone=self.alone.name if self.alone is not None else None,
            alone_s=_median(closing, REFERENCE) if self.alone is not None else None,
            measured=conditions(self.run.device),
            even=even,
            even_s=_median(closing, EVEN) if even is not None else None,
        )


def _median(heat: Heat, name: str) -> float:
    return median(seconds[name] for seconds in heat)


def _parts(name: str, heats: Sequence[Heat]) -> list[float]:
    """Of the reference's steps, what a plan's took in each round in which it ran."""
    return [
        seconds[name] / seconds[REFERENCE]
        for heat in heats
        for seconds in heat
        if name in seconds
    ]
