"""The study of a plan's ratio: whole steps in other weights, beside the computed ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median
from typing import Literal, get_args

from optuna.trial import FrozenTrial

from hetconv.autotune.measure.device_info import conditions
from hetconv.autotune.measure.paired_rounds import Round
from hetconv.planner.partition import Splits, whole_model
from hetconv.schemas.cluster_profile import TunedRatio
from hetconv.schemas.plan import Plan
from hetconv.sharding.layer_rules import Split

from .job import Run
from .race import Order, Seconds, Usual
from .study import ROUNDS, WEIGHTS, WHY, Hopeless, TrialFailedError, Weights, refine

Cuts = Literal["sample", "depth", "height", "width"]
# of a step: what a ratio can hardly gain more than, once devices are measured; trials
# must tell as much
CLEAR = 0.03


def ratio_of(splits: Mapping[str, Split]) -> tuple[Cuts, Weights] | None:
    """Of splits that are all of one such kind: which, and the weights of the largest.
    None of others.
    """
    cut = [s for s in splits.values() if s.kind != "replicate"]
    kind = cut[0].kind if cut else "replicate"
    if kind not in get_args(Cuts) or any(s.kind != kind or s.nodes for s in cut):
        return None
    weights = max((s.sizes for s in cut), key=sum)
    return (kind, weights) if sum(w > 0 for w in weights) > 1 else None  # type: ignore[return-value]


def tells(noise: float) -> bool:
    """Whether steps with a standard error of ``noise``, in logarithms, beside others
    like it, show what is gained.
    """
    return sqrt(2) * noise < CLEAR


@dataclass(frozen=True)
class RatioStudy:
    """Rank 0's. ``base``: any plan of the model; ``trial_s``: seconds that a trial's
    rounds take at least.
    """

    run: Run
    base: Plan
    usual: Usual
    kind: Cuts
    computed: Weights
    trial_s: float

    def tuned(self, part: float) -> TunedRatio | None:
        """What is found in this part of the budget; None where the computed weights fail."""
        try:
            return self._tuned(part)
        except TrialFailedError as e:
            self.run.say.line(
                f"no ratio is refined, for the {self.kind} split that was computed failed {e}"
            )
            return None

    def _tuned(self, part: float) -> TunedRatio:
        run, job = self.run, self.run.job
        assert run.store is not None  # this is rank 0
        run.say.stage(f"{self.kind} ratio", job.trials)
        study = run.store.study(
            f"{self.kind} ratio from {said(self.computed)}", beside="the computed ratio"
        )
        enough = run.passed(run.spent + part)
        best, _, trials = refine(
            study, self.computed, self.rounds, job.trials, job.seed, enough, self.told
        )
        seconds = self.final(best)
        if (
            best != self.computed
            and median(s["trial"] / s["computed"] for s in seconds) > 1
        ):  # it was merely lucky
            best, seconds = (
                self.computed,
                [{"computed": s["computed"], "trial": s["computed"]} for s in seconds],
            )
        step_s, computed_s = (
            median(s[way] for s in seconds) for way in ("trial", "computed")
        )
        was = f"computed {said(self.computed)}: {computed_s * 1e3:.1f} ms"
        run.say.line(f"{self.kind} {said(best)}: {step_s * 1e3:.1f} ms a step; {was}")
        return TunedRatio(
            run.graph.digest,
            job.mode,
            self.kind,
            best,
            step_s,
            self.computed,
            computed_s,
            trials,
            conditions(run.device),
        )

    def rounds(self, weights: Weights, hopeless: Hopeless) -> Sequence[float]:
        """Of a trial, relative to the computed ratio's steps."""

        ways = self.ways(weights)

        def part(ran: Round) -> float:
            seconds = self.usual(ways, ran)
            return seconds["trial"] / seconds["computed"]

        order = Order(
            f"{self.kind} {said(weights)}", ways, ROUNDS, least_s=self.trial_s
        )
        return [
            part(ran)
            for ran in self.run.race.lead(order, lambda ran: hopeless(part(ran))).rounds
        ]

    def told(self, trial: FrozenTrial) -> None:
        how = (
            f"{trial.value:.3f}x of the computed ratio's step"
            if trial.value is not None
            else "failed"
        )
        text = f"{said(trial.user_attrs[WEIGHTS])} {how} {trial.user_attrs.get(WHY, '')}".strip()
        self.run.say.advance(text, trial.value)

    def final(self, best: Weights) -> list[Seconds]:
        """Once more, beside each other, the fastest one and the computed one, which may
        be the same.
        """
        ways = self.ways(best)
        if best == self.computed:
            ways.pop("trial")
        order = Order(
            f"{self.kind} {said(best)} again", ways, ROUNDS, least_s=self.trial_s
        )
        seconds = [self.usual(ways, ran) for ran in self.run.race.lead(order).rounds]
        return [{"trial": s["computed"]} | s for s in seconds]

    def ways(self, weights: Weights) -> dict[str, Plan]:
        both = {"computed": self.computed, "trial": weights}
        return {name: self.base.with_splits(self.splits(w)) for name, w in both.items()}

    def splits(self, weights: Weights) -> Splits:
        return whole_model(self.run.graph, self.kind, weights, (self.kind,))


def said(weights: Sequence[int]) -> str:
    return ":".join(map(str, weights))
