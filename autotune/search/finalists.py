"""The end of the stage of plans: finalists race side by side by successive halving."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from math import ceil, log2
from typing import NamedTuple

from hetconv.autotune.measure.paired_rounds import MIN_ROUNDS, LogRatio, Round
from hetconv.planner.make_plan import Contender
from hetconv.schemas.plan import Plan

from .job import Run
from .race import REFERENCE, TimingRequest, TrialFailedError, Variant
from .shortlist import MAX_PREDICTED_RATIO

RACE_PART = 0.1  # of the budget, for the race
DECISIVE_ROUNDS = 8  # that tell one plan from another one by a tenth, mostly

Finalists = Mapping[str, Contender]
"""Plans by a name of their own, those that are likely to be the fastest first."""


class Confirmation(NamedTuple):
    """The last rung.

    Attributes:
        finalists: who ran in it.
        rounds: seconds of their steps and of the `REFERENCE`.
    """

    finalists: Finalists
    rounds: list[Round]

    @property
    def winner(self) -> str:
        """The fastest finalist, if it surely beats the reference, or the `REFERENCE`."""
        ratios = {
            name: LogRatio.of(self.rounds, name, REFERENCE) for name in self.finalists
        }
        best = min(ratios, key=lambda name: ratios[name].value, default=REFERENCE)
        if best in ratios and ratios[best].surely_below(0.0):
            return best
        return REFERENCE


def race_seconds(run: Run, round_s: float) -> float:
    """Returns for how long finalists race: where steps are long, until they differ.

    Args:
        run: the job.
        round_s: seconds of a step of the reference and of the likeliest plan.
    """
    return max(RACE_PART * run.job.budget, min(DECISIVE_ROUNDS * round_s, run.left_s))


@dataclass(frozen=True)
class FinalRace:
    """A race on rank 0, which leads the other ranks' steps.

    Attributes:
        run: the job.
        base: any plan of the model.
        reference: what all are compared with in every round.
        seconds: what all rungs take together at least.
    """

    run: Run
    base: Plan
    reference: Variant
    seconds: float

    def confirm(self, finalists: Finalists, guards: Set[str]) -> Confirmation | None:
        """Drops the slower half of the finalists after each rung until one is left.

        That is successive halving (Karnin et al., 2013). The last rung is by itself, for
        who came so far may merely have been lucky. What is much too slow goes at once,
        guards too. Where little time is left, fewer finalists take part, and there is one
        rung, which always has the rounds that a decision takes. Where not all run side by
        side, as for want of memory, the less likely half of all does not take part.

        Args:
            finalists: the plans.
            guards: names of those that take part in every rung. What wins has beaten
                them in the last one.

        Returns:
            The last rung, or None if not even the reference runs.
        """
        left, rounds = self._in_time(finalists, guards), list[Round]()
        rungs = 1 + ceil(log2(max(len(left.keys() - guards), 1)))
        while True:
            try:
                last, too_slow = self._rung(left, self.seconds / rungs)
            except TrialFailedError as e:
                self.run.say.line(f"{len(left)} plans side by side failed {e}")
                if not left:
                    return None
                left, rounds = _first(left, len(left) // 2), []
                continue
            rounds += last
            left = {name: c for name, c in left.items() if name not in too_slow}
            slower = _slower_half(left.keys() - guards, rounds)
            if not slower or self.run.left_s <= 0:
                return Confirmation(left, last)
            left = {name: c for name, c in left.items() if name not in slower}

    def _in_time(self, finalists: Finalists, guards: Set[str]) -> dict[str, Contender]:
        """Returns the guards, and as many others as are expected to race in time, one at least.

        Guards that are predicted to lose by far leave their time to the others where the
        rounds that a decision takes would not fit.
        """
        left_s = self.run.left_s
        step_s = {name: c.predicted.step_s for name, c in finalists.items()}
        guards_s = sum(step_s[name] for name in guards & step_s.keys())
        least_s = min(step_s.values(), default=0.0)
        is_short = (1 + DECISIVE_ROUNDS) * (guards_s + 2 * least_s) > left_s
        found: dict[str, Contender] = {}
        for name, contender in finalists.items():
            if (
                name in guards
                and is_short
                and step_s[name] > MAX_PREDICTED_RATIO * least_s
            ):
                continue
            left_s -= (1 + MIN_ROUNDS) * step_s[name]
            if name in guards or left_s > 0 or not found.keys() - guards:
                found[name] = contender
        return found

    def _rung(
        self, finalists: Finalists, seconds: float
    ) -> tuple[list[Round], Mapping[str, float]]:
        """Returns the rounds, and seconds of those that were too slow to go on."""
        plans = {n: self.base.with_splits(c.splits) for n, c in finalists.items()}
        variants = {REFERENCE: self.reference, **plans}
        request = TimingRequest(
            "the fastest plans",
            variants,
            min_seconds=seconds,
            rounds_in_any_case=MIN_ROUNDS,
        )
        timings = self.run.race.lead(request)
        return timings.rounds, timings.too_slow


def _first(finalists: Finalists, count: int) -> dict[str, Contender]:
    return dict([*finalists.items()][:count])


def _slower_half(names: Set[str], rounds: list[Round]) -> set[str]:
    """Returns the slower ones, all rounds in which they ran counted; none of one."""
    order = sorted(
        sorted(names), key=lambda name: LogRatio.of(rounds, name, REFERENCE).value
    )
    return set(order[ceil(len(order) / 2) :])
