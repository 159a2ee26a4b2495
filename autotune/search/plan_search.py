"""The stage that measures whole plans beside the fastest device alone: what it finds
fastest is the plan.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import inf, log
from statistics import median
from typing import NamedTuple

import optuna
from optuna.trial import FrozenTrial, TrialState

from hetconv.autotune.measure.statistics import log_error_of_median
from hetconv.cost.estimator import StepEstimator
from hetconv.planner.candidates import EVEN, Candidates, tuned_name
from hetconv.planner.make_plan import Contender, contenders, make_plan
from hetconv.planner.partition import Splits, whole_model
from hetconv.schemas.cluster_profile import ClusterProfile, TunedRatio
from hetconv.schemas.plan import SINGLE_DEVICE, Plan
from hetconv.schemas.tuning_results import TunedPlan
from hetconv.sharding.layer_rules import SplitKind

from .calibrate import (
    AtWork,
    Learnt,
    Observed,
    at_work,
    believed,
    corrected,
    with_learnt,
)
from .finalists import REFERENCE, Final, Rival, beside
from .job import Run
from .race import Alone, Order, Seconds, Usual, Way, formats
from .ratio_search import RatioStudy, ratio_of, tells
from .stages import PLANS_PART, part_of
from .study import NAME, ROUNDS, WHY, Hopeless, TrialFailedError, explore, judged

# by which a prediction may be off: who is predicted to take so much longer may yet be
# faster
ERROR = 0.25
MOST = 6  # plans that are measured, and as many again after what is learnt from them
FIRST = 3  # of them, measured before kinds that are only predicted to come near
FAR, FURTHEST = (
    2.0,
    4.0,
)  # times as long as the best: who is predicted to take that is measured last, or not at all


def even_split(
    whole_models: Mapping[str, Splits], found: Sequence[Contender]
) -> tuple[str, Contender] | None:
    """The one that is predicted to be the fastest of those that fit, by its name: what
    it equals may have another.
    """
    even = {
        name: splits for name, splits in whole_models.items() if name.startswith(EVEN)
    }
    fitting = [
        (name, c) for name, splits in even.items() for c in found if c.splits == splits
    ]
    return min(fitting, key=lambda known: known[1].predicted.step_s, default=None)


def near(found: Sequence[Contender], even: Contender | None = None) -> list[Contender]:
    """Who may be the fastest of those that split, as predictions err, and who shows
    what else whole steps take.

    First the likeliest, and one of each other kind, the ``even`` split among them, that
    may be the fastest: from these more is learnt than from plans that are much the
    same. Then the rest of the likeliest `FIRST`, kinds that are farther off, and others
    that may be the fastest; last what is too far off for that, for what is left of the
    budget. Nobody, if none comes near a device alone.
    """
    able = (
        c
        for c in found
        if not c.name.startswith(SINGLE_DEVICE) and prevalent(c) != "replicate"
    )
    split = sorted(able, key=lambda c: c.predicted.step_s)
    if not split or split[0].predicted.step_s > FAR * min(
        c.predicted.step_s for c in found
    ):
        return []
    best_s = split[0].predicted.step_s
    likely = [c for c in split[:MOST] if c.predicted.step_s <= (1 + ERROR) * best_s]
    seen = {prevalent(c) for c in likely[:1]}
    telling = [even] if even is not None else []
    for c in split:
        if prevalent(c) not in seen:
            telling.append(c)
            seen.add(prevalent(c))
    telling.sort(key=lambda c: c.predicted.step_s)

    def within(least: float, most: float) -> list[Contender]:
        return [
            c for c in telling if least * best_s < c.predicted.step_s <= most * best_s
        ]

    may, close, far = (
        within(0.0, 1 + ERROR),
        within(1 + ERROR, FAR),
        within(FAR, FURTHEST),
    )
    return [
        *{
            c.name: c
            for c in (*likely[:1], *may, *likely[:FIRST], *close, *likely, *far)
        }.values()
    ]


def prevalent(contender: Contender) -> SplitKind:
    """The kind of most layers that are split."""
    count: Counter[SplitKind] = Counter(
        s.kind for s in contender.splits.values() if s.kind != "replicate"
    )
    return max(count, key=lambda kind: (count[kind], kind), default="replicate")


# seconds that rounds of a plan beside the device alone take at least, more if the
# budget allows
TRIAL_S = 2.0
ROUNDS_PART = 0.7  # of a trial's seconds; the rest makes the model and tries it
# Of a trial, on devices as fast as they usually are: seconds of what it ran beside; its
# standard error, in logarithms.
REFERENCE_S, NOISE = "reference_s", "noise"
COMPUTING, COMPUTING_NOISE = (
    "computing",
    "computing_noise",
)  # by rank: for how many seconds of it, and as before
UNSTEADY = 0.1  # of that noise: more than steps vary by themselves
RATIO_PART = 0.06  # of the budget, from where the study of a ratio begins
Tried = tuple[Contender, FrozenTrial]


class Found(NamedTuple):
    """The fastest ``plan``, if any ran; what was ``learnt`` on the way; and the
    ``ratio``, if one was studied.
    """

    plan: TunedPlan | None
    learnt: Learnt
    ratio: TunedRatio | None = None


def plans(run: Run, profile: ClusterProfile) -> ClusterProfile:
    """The tuned plan, its ratio, and of each device what was learnt on the way."""
    plan, learnt, ratio = run.led(lambda: _Plans(run, profile).found())
    return replace(
        with_learnt(profile, learnt),
        plans=(plan,) if plan is not None else (),
        tuned=(ratio,) if ratio is not None else (),
    )


class _Plans:
    """Rank 0's study."""

    def __init__(self, run: Run, profile: ClusterProfile):
        self.run, self.profile = run, profile
        self.base = make_plan(run.graph, profile, mode=run.job.mode)
        self.enough = run.passed(part_of(run, PLANS_PART))
        self.pricer = StepEstimator(run.graph, profile, run.job.mode)
        self.usual = Usual(self.pricer)
        self.trial_s = TRIAL_S
        self.reference: Way | None = None
        self.alone: Contender | None = None
        self.even: tuple[str, Contender] | None = None
        self.failed: list[Splits] = []

    def found(self) -> Found:
        before = contenders(self.run.graph, self.profile, mode=self.run.job.mode)
        self.find_reference(before)
        self.even = even_split(
            Candidates(self.run.graph, self.profile, self.run.job.mode).whole_models(),
            before,
        )
        field = near(before, self.even[1] if self.even else None)
        left_s = (part_of(self.run, PLANS_PART) - self.run.spent) * self.run.job.budget
        self.trial_s = max(TRIAL_S, ROUNDS_PART * left_s / (len(field) + MOST))
        tried = self.measured(field, "plans")
        learnt = self.learnt(tried)
        if disturbed := self.disturbed(tried, learnt):
            tried = least_disturbed(self.measured(disturbed, "plans again", tried))
            learnt = self.learnt(tried)
        after = near(
            contenders(
                self.run.graph,
                with_learnt(self.profile, learnt),
                mode=self.run.job.mode,
            )
        )
        new = [c for c in after if all(c.splits != other.splits for other in field)]
        before_new, tried = tried, self.measured(new, "plans, corrected", tried)
        learnt = self.learnt(tried) if len(tried) > len(before_new) else learnt
        if self.reference is None:
            return Found(None, learnt)
        corrected = with_learnt(self.profile, learnt)
        final = Final(
            self.run, self.base, self.reference, self.alone, self.even, corrected
        )
        if not tried:
            why = (
                "no split ran"
                if field or new
                else "no split is predicted to come near it"
            )
            return Found(final.undisputed(why), learnt)
        known = [*self.failed, *(c.splits for c, _ in tried)]
        untried = [c for c in after if c.splits not in known]
        ran = [Rival(c, t.value, t.user_attrs[NOISE]) for c, t in tried if t.value]
        best = final.likeliest(ran)
        ratio = self.ratio(best)
        if ratio is not None and ratio.weights != ratio.computed_weights:
            splits = whole_model(
                self.run.graph, ratio.kind, ratio.weights, (ratio.kind,)
            )
            priced = StepEstimator(
                self.run.graph, corrected, self.run.job.mode
            ).estimate(splits)
            part = best.part * ratio.step_s / ratio.computed_step_s
            ran.append(
                Rival(Contender(tuned_name(ratio), splits, *priced), part, best.noise)
            )
        ended = final.plan(ran, untried)
        if ended is None:
            return Found(None, learnt, ratio)
        learnt = self.learnt(
            undisproved(tried, ended.seen), ended.seen, ended.reference_s
        )
        pricer = StepEstimator(
            self.run.graph, with_learnt(self.profile, learnt), self.run.job.mode
        )
        plan = replace(
            ended.plan, predicted_s=pricer.step_s(ended.plan.name, ended.plan.splits)
        )
        return Found(plan, learnt, ratio)

    def disturbed(self, tried: Sequence[Tried], learnt: Learnt) -> list[Contender]:
        """Whose steps vary too much, or took longer beside the device alone than
        predictions err: something else may have run meanwhile.
        """
        if self.alone is None:
            return []
        pricer = StepEstimator(
            self.run.graph, with_learnt(self.profile, learnt), self.run.job.mode
        )
        alone_s = pricer.step_s(self.alone.name, self.alone.splits)

        def surprising(c: Contender, part: float) -> bool:
            return part > (1 + ERROR) * pricer.step_s(c.name, c.splits) / alone_s

        return [
            c for c, t in tried if t.value and (unsteady(t) or surprising(c, t.value))
        ]

    def ratio(self, best: Rival) -> TunedRatio | None:
        """Of the plan that is likely to be the fastest, if it has one, and trials can
        tell what another gains.
        """
        found = ratio_of(best.contender.splits)
        if found is None or not self.run.job.trials:
            return None
        if not tells(best.noise):
            self.run.say.line(
                "no ratio is refined: steps vary by more than one could gain over the computed one"
            )
            return None
        return RatioStudy(self.run, self.base, self.usual, *found, self.trial_s).tuned(
            part_of(self.run, RATIO_PART)
        )

    def learnt(
        self,
        tried: Sequence[Tried],
        seen: Sequence[Rival] = (),
        reference_s: Sequence[float] = (),
    ) -> Learnt:
        """From steps beside the fastest device alone, and from its own; of who was
        ``seen`` since, from these steps.
        """
        observations = [
            observed(c._replace(costs=self.pricer.estimate(c.splits)[1]), t)
            for c, t in tried
        ]
        factors = corrected(self.profile.devices, observations)
        alone = self.alone
        if alone is None or not tried:
            return Learnt(factors)
        alone_s = median([*(t.user_attrs[REFERENCE_S] for _, t in tried), *reference_s])
        since = [rival.contender.splits for rival in seen]
        before = [
            Rival(c, t.value, t.user_attrs[NOISE])
            for c, t in tried
            if t.value and c.splits not in since
        ]
        ran = [*before, *seen]

        base = StepEstimator(
            self.run.graph,
            with_learnt(self.profile, Learnt(factors)),
            self.run.job.mode,
        )
        walked = [base.walk(rival.contender.splits) for rival in ran]

        @cache
        def sending(latency: float, of_bytes: float) -> StepEstimator:
            return base.over(
                with_learnt(self.profile, Learnt(factors, AtWork(latency, of_bytes)))
            )

        def steps(way: AtWork) -> list[float]:
            pricer = sending(way.latency, way.of_bytes)
            return [pricer.walked_s(of_plan, overlap=way.overlap) for of_plan in walked]

        took, noise = (
            [rival.part * alone_s for rival in ran],
            [rival.noise for rival in ran],
        )
        found = at_work(steps, took, noise, self.profile.overlap)
        return Learnt(factors, found, believed(alone_s / alone.predicted.step_s))

    def find_reference(self, found: Sequence[Contender]) -> None:
        """The fastest of the devices alone that may be, and of memory formats; a plan,
        where the model fits none.
        """
        run, alone = self.run, [c for c in found if c.name.startswith(SINGLE_DEVICE)]
        likely = min(
            ((1 + ERROR) ** 2 * c.predicted.step_s for c in alone), default=0.0
        )  # either may be that far off
        ways: dict[str, tuple[Contender, Alone]] = {}
        for c in alone:
            if c.predicted.step_s <= likely:
                rank = int(c.name.removeprefix(f"{SINGLE_DEVICE} (").partition(":")[0])
                ways |= {
                    f"{c.name}, {way.memory_format}": (c, way)
                    for way in formats(rank, run.inputs)
                }
        best = run.known(
            "plans", REFERENCE, str
        )  # of those that were measured beside it
        if best not in ways:
            able = {
                name: way for name, (_, way) in ways.items() if self.runs(name, way)
            }
            if not able:
                self.reference = next(
                    (
                        self.plan(c)
                        for c in near(found)
                        if self.runs(c.name, self.plan(c))
                    ),
                    None,
                )
                run.say.line(
                    "the model runs on no device alone; plans are measured beside the one "
                    "planned first"
                )
                return
            ran = run.race.lead(Order("devices alone", able, 3, least_s=TRIAL_S)).rounds
            seconds = [self.usual(able, one) for one in ran]
            took = {name: median(s[name] for s in seconds) for name in able}
            best = min(took, key=lambda name: took[name])
            run.keep("plans", REFERENCE, best)
            run.say.line(f"{best}: {took[best] * 1e3:.1f} ms")
        self.alone, self.reference = ways[best]

    def runs(self, name: str, way: Way) -> bool:
        try:
            self.run.race.lead(Order(name, {name: way}, 0))
        except TrialFailedError as e:
            self.run.say.line(f"{name} failed {e}")
            return False
        return True

    def measured(
        self, field: Sequence[Contender], name: str, tried: Sequence[Tried] = ()
    ) -> list[Tried]:
        """Those ``trial``, and the contenders that ran, beside the fastest device
        alone, or the first contender.
        """
        run = self.run
        assert run.store is not None  # this is rank 0
        if not field or self.reference is None:
            return [*tried]
        run.say.stage(name, len(field))
        study = run.store.study(f"{name} {digest(field)}", name, beside(self.alone))
        for k in range(len(field)):
            study.enqueue_trial({"plan": k}, skip_if_exists=True)

        def objective(trial: optuna.Trial) -> float:
            contender = field[trial.suggest_int("plan", 0, len(field) - 1)]
            trial.set_user_attr(NAME, contender.name)
            return judged(
                trial, lambda hopeless: self.rounds(contender, trial, hopeless)
            )

        def told(trial: FrozenTrial) -> None:
            how = (
                f"{trial.value:.3f}x of {beside(self.alone)}"
                if trial.value is not None
                else "failed"
            )
            name, why = field[trial.params["plan"]].name, trial.user_attrs.get(WHY, "")
            said = f"{name} {how} {why}".strip()
            run.say.advance(said, trial.value)

        def enough() -> (
            bool
        ):  # one is measured whatever is left of the budget: whether to split at all hangs on it
            return self.enough() and bool(
                tried or study.get_trials(states=(TrialState.COMPLETE, TrialState.FAIL))
            )

        explore(study, objective, len(field), run.job.seed, enough, told)
        self.failed += [
            field[t.params["plan"]].splits
            for t in study.get_trials(states=(TrialState.FAIL,))
            if t.params
        ]
        ran = study.get_trials(states=(TrialState.COMPLETE,))
        return [*tried, *((field[t.params["plan"]], t) for t in ran)]

    def rounds(
        self, contender: Contender, trial: optuna.Trial, hopeless: Hopeless
    ) -> list[float]:
        """Of the steps alone."""
        assert self.reference is not None

        ways = {REFERENCE: self.reference, "trial": self.plan(contender)}
        order = Order(contender.name, ways, ROUNDS, "trial", self.trial_s)

        def part(seconds: Seconds) -> float:
            return seconds["trial"] / seconds[REFERENCE]

        found = self.run.race.lead(
            order, lambda ran: hopeless(part(self.usual(ways, ran)))
        )
        rounds, slowness = (
            [self.usual(ways, ran) for ran in found.rounds],
            self.profile.slowness(found.pulse_s),
        )
        trial.set_user_attr(
            COMPUTING,
            [s / slow for s, slow in zip(found.computing, slowness, strict=True)],
        )
        trial.set_user_attr(COMPUTING_NOISE, found.noise)
        trial.set_user_attr(REFERENCE_S, median(s[REFERENCE] for s in rounds))
        trial.set_user_attr(NOISE, log_error_of_median([s["trial"] for s in rounds]))
        return [*map(part, rounds)]

    def plan(self, contender: Contender) -> Plan:
        return self.base.with_splits(contender.splits)


def unsteady(trial: FrozenTrial) -> bool:
    return bool(trial.user_attrs[NOISE] > UNSTEADY)


def least_disturbed(tried: Sequence[Tried]) -> list[Tried]:
    """Of plans that were measured twice what was steady, and then faster: what runs
    beside a step makes it longer.
    """
    best = sorted(tried, key=lambda known: (unsteady(known[1]), known[1].value or inf))
    first = {digest([c]): k for k, (c, _) in reversed([*enumerate(best)])}
    return [best[k] for k in sorted(first.values())]


def undisproved(tried: Sequence[Tried], seen: Sequence[Rival]) -> Sequence[Tried]:
    """Without those that took another part of the device alone's steps when they were
    ``seen`` again, in more rounds: something else ran beside the one or the other. All,
    if it is every one.
    """

    def disproved(c: Contender, part: float) -> bool:
        return any(
            abs(log(part / r.part)) > UNSTEADY
            for r in seen
            if r.contender.splits == c.splits
        )

    found = [(c, t) for c, t in tried if t.value and not disproved(c, t.value)]
    return found or tried


def digest(field: Sequence[Contender]) -> str:
    """Of the plans, in order: a study's trials name them by their place."""
    said = [
        [(name, s.kind, s.sizes, s.nodes, s.whole) for name, s in c.splits.items()]
        for c in field
    ]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]


def observed(contender: Contender, trial: FrozenTrial) -> Observed:
    """What was predicted of each rank's layers, and what they took."""
    world = len(contender.predicted.busy_s)
    predicted: list[dict[str, float]] = [{} for _ in range(world)]
    for name, split in contender.splits.items():
        cost = contender.costs[name]
        for rank in range(world):
            seconds = sum(
                by_rank[rank]
                for by_rank in (cost.forward_s, cost.backward_s)
                if by_rank
            )
            predicted[rank][split.kind] = predicted[rank].get(split.kind, 0.0) + seconds
    return Observed(
        predicted, trial.user_attrs[COMPUTING], trial.user_attrs[COMPUTING_NOISE]
    )
