"""The end of the stage of plans: those that were nearly the fastest, side by side, and what the last one gains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log2
from statistics import median

from hetconv.candidates import EVEN
from hetconv.plan import Plan
from hetconv.planner import Contender
from hetconv.pricing import Pricer
from hetconv.profile import ClusterProfile
from hetconv.tuned import TunedPlan

from .job import Run
from .machine import conditions
from .race import Order, Outcome, Way
from .shares import ROUNDS, TrialFailedError

REFERENCE = "alone"
RIVALS, HARDLY = 4, 0.08  # how many plans at most are compared once more, which took so much longer than the best one
HEATS_PART = 0.15  # of the budget: for all heats, in which more rounds are run of fewer and fewer rivals
CLOSING_ROUNDS, CLOSING_S = 9, 4.0  # of the plan that is left; seconds that they take at least
WORTH = 0.98  # of the fastest device's step alone: a plan that takes more does not pay
Ran = tuple[float, Contender]
"""Its steps as a part of those that it ran beside, and a plan."""


@dataclass(frozen=True)
class Final:
    """Rank 0's. ``base``: any plan of the model.

    ``reference``: what plans are measured beside, ``alone`` if that is the plain model on a device. ``even``: the name
    of the even split that is predicted to be the fastest, and its splits. ``corrected``: the profile with all that was
    learnt from whole steps.
    """

    run: Run
    base: Plan
    reference: Way
    alone: Contender | None
    even: tuple[str, Contender] | None
    corrected: ClusterProfile

    def plan(self, tried: Sequence[Ran]) -> TunedPlan | None:
        """The fastest of those that ran, by more rounds than they had; a device alone, if it does not beat that."""
        order = sorted(tried, key=lambda ran: ran[0])
        close = [c for part, c in order[:RIVALS] if part <= (1 + HARDLY) * order[0][0]]
        rivals = {f"{k}: {c.name}": c for k, c in enumerate(close)}
        name, parts = self._fastest(rivals)
        best = rivals[name]
        closing = self._closing(best.name, {REFERENCE: self.reference, name: self._way(best)})
        if closing is None:
            return None
        part = median([*parts, *(s[name] / s[REFERENCE] for s in closing.rounds)])
        step_s = _median(closing, name)
        if self.alone is not None and part > WORTH:
            best, step_s = self.alone, _median(closing, REFERENCE)
        beside = self.alone.name if self.alone is not None else "the plan planned first"
        self.run.say.line(f"the plan is {best.name}: {step_s * 1e3:.1f} ms; what splits took {part:.3f}x of {beside}")
        return self._entry(best, step_s, len(tried), closing)

    def undisputed(self, why: str) -> TunedPlan | None:
        """The device alone, if the model runs on any."""
        if self.alone is None:
            return None
        closing = self._closing(self.alone.name, {REFERENCE: self.reference})
        if closing is None:
            return None
        alone_s = _median(closing, REFERENCE)
        self.run.say.line(f"the plan is {self.alone.name}: {alone_s * 1e3:.1f} ms; {why}")
        return self._entry(self.alone, alone_s, 0, closing)

    def _fastest(self, rivals: Mapping[str, Contender]) -> tuple[str, list[float]]:
        """The one that is left of some, fastest first, and its steps as parts of the reference's, round by round.

        After each heat the slower half is out (successive halving: Karnin et al., 2013); all its rounds count.
        """
        parts: dict[str, list[float]] = {name: [] for name in rivals}
        left, heats = [*rivals], ceil(log2(len(rivals)))
        for _ in range(heats):
            ways = {REFERENCE: self.reference, **{name: self._way(rivals[name]) for name in left}}
            order = Order("the fastest plans", ways, ROUNDS, least_s=HEATS_PART * self.run.job.budget / heats)
            try:
                rounds = self.run.race.lead(order).rounds
            except TrialFailedError as e:  # each ran by itself, but there may be no memory for all
                self.run.say.line(f"the fastest plans were not run side by side, that failed {e}")
                break
            for name in left:
                parts[name] += [s[name] / s[REFERENCE] for s in rounds]
            left = sorted(left, key=lambda name: median(parts[name]))[: ceil(len(left) / 2)]
        return left[0], parts[left[0]]

    def _closing(self, name: str, ways: Mapping[str, Way]) -> Outcome | None:
        """Rounds of these beside the even split, where that runs; or none."""
        for more in ({EVEN: self._way(self.even[1])}, {}) if self.even else ({},):
            order = Order(f"{name} again", {**ways, **more}, CLOSING_ROUNDS, least_s=CLOSING_S)
            try:
                return self.run.race.lead(order)
            except TrialFailedError as e:
                self.run.say.line(f"{name}{f' beside an {EVEN}' * bool(more)} failed {e}")
        return None

    def _way(self, contender: Contender) -> Plan:
        return self.base.with_splits(contender.splits)

    def _entry(self, best: Contender, step_s: float, trials: int, closing: Outcome) -> TunedPlan:
        pricer = Pricer(self.run.graph, self.corrected.at_pulses(closing.pulse_s), self.run.job.mode)
        even = self.even[0] if self.even and EVEN in closing.rounds[0] else None
        return TunedPlan(
            self.run.graph.digest, self.run.job.mode, best.name, best.splits, step_s,
            predicted_s=pricer.of(best.name).price(best.splits)[0].step_s,
            trials=trials,
            alone=self.alone.name if self.alone is not None else None,
            alone_s=_median(closing, REFERENCE) if self.alone is not None else None,
            measured=conditions(self.run.device),
            even=even,
            even_s=_median(closing, EVEN) if even is not None else None,
            pulse_s=closing.pulse_s,
        )  # fmt: skip


def _median(closing: Outcome, name: str) -> float:
    return median(seconds[name] for seconds in closing.rounds)
