"""The stage that measures whole plans beside the fastest device alone.

Promising plans are timed; what their steps take calibrates the profile; the planner
answers once more; if the likeliest plan has one ratio, a study refines it; and the
finalists race. What is surely faster than the device alone then is the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import exp, log
from statistics import median
from typing import NamedTuple

from hetconv.autotune.measure.calibrate import Observation, calibrate
from hetconv.autotune.measure.paired_rounds import MIN_ROUNDS, LogRatio
from hetconv.cost.estimator import StepEstimator
from hetconv.planner.candidates import Candidates, tuned_name
from hetconv.planner.make_plan import Contender, contenders, make_plan
from hetconv.planner.partition import whole_model
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import SINGLE_DEVICE, Plan
from hetconv.schemas.tuning_results import TunedPlan, TunedRatio

from .finalists import Confirmation, FinalRace, race_seconds
from .job import Run, part_of
from .race import (
    CANDIDATE,
    MAX_SLOWDOWN,
    REFERENCE,
    PlainModel,
    TimingRequest,
    Timings,
    TrialFailedError,
    Variant,
    plain_variants,
)
from .ratio_search import RatioSearch, ratio_of
from .record import COMPARED_WITH, PLANS, PlanTiming, with_drift
from .shortlist import MAX_PREDICTED_RATIO, even_split, key_of, shortlist
from .stages import PLANS_PART

MIN_TRIAL_S = 2.0
TIMED_PART = 0.7  # of a trial's seconds; the rest makes the model and tries it
RATIO_PART, MIN_TRIALS = 0.06, 4  # of the whole budget; fewer trials find nothing
MAX_CHALLENGERS = 4
MIN_RACE_STEPS = 3  # of a plan that was not timed: a trial, a first step and a round
# In logarithms, how much slower than the likeliest a challenger is expected to be.
MAX_EXPECTED_LOSS = 0.1
# The stage under which it is kept how often a plan was begun; ranks may be killed by it.
ATTEMPTS = "attempts"
MAX_ATTEMPTS = 2


class Reference(NamedTuple):
    """What plans are compared with: a device alone, or a plan where the model fits none."""

    contender: Contender
    variant: Variant


class Expected(NamedTuple):
    """A plan, and the logarithm of the ratio of its steps to the reference's."""

    log_ratio: float
    contender: Contender


def plans(run: Run, profile: ClusterProfile) -> ClusterProfile:
    """Measures whole plans. Collective.

    Args:
        run: the job.
        profile: what is known of devices and links.

    Returns:
        The profile, calibrated, with the tuned plan and its ratio.
    """
    return run.led(lambda: PlanSearch(run, profile).tune())


class PlanSearch:
    """The search on rank 0, which leads the other ranks' steps.

    Args:
        run: the job.
        profile: what is known of devices and links.
    """

    def __init__(self, run: Run, profile: ClusterProfile):
        self.run, self.profile = run, profile
        self.base = make_plan(run.graph, profile, mode=run.job.mode)
        self.timed: list[tuple[Contender, PlanTiming]] = []
        self.too_slow: dict[str, float] = {}  # seconds of a step, by `key_of` the plan

    def tune(self) -> ClusterProfile:
        """Returns the profile, calibrated, with the tuned plan and its ratio."""
        mode = self.run.job.mode
        planned = contenders(self.run.graph, self.profile, mode=mode)
        reference = self._find_reference(planned)
        if reference is None:
            self.run.say.line("no plan is tuned, for none runs")
            return self.profile
        whole_models = Candidates(self.run.graph, self.profile, mode).whole_models()
        even = even_split(whole_models, planned)
        self._time_all(shortlist(planned, even), reference)
        estimator = StepEstimator(self.run.graph, self.profile, mode)
        calibrated = calibrate(estimator, self._observations())
        calibrated = with_drift(calibrated, [timing for _, timing in self.timed])
        replanned = contenders(self.run.graph, calibrated, mode=mode)
        expected = self._expected(shortlist(replanned), reference)
        reference_s = self._reference_s(reference.contender.predicted.step_s)
        best = exp(expected[0].log_ratio) if expected else 0.0
        race_s = race_seconds(self.run, (1 + best) * reference_s)
        may_win = bool(expected) and expected[0].log_ratio < log(MAX_SLOWDOWN)
        ratio = self._tune_ratio(expected[0].contender, race_s) if may_win else None
        if ratio is not None and ratio.weights != ratio.computed_weights:
            expected.insert(0, self._with_ratio(ratio, expected[0]))
        affordable = max(int(race_s / (MIN_ROUNDS * reference_s)), 1)
        likely = expected[: min(affordable, MAX_CHALLENGERS)]
        finalists, guards = self._finalists(
            likely, (replanned[0], even), reference.contender
        )
        race = FinalRace(self.run, self.base, reference.variant, race_s)
        confirmed = race.confirm(finalists, guards)
        if confirmed is None:
            return calibrated
        plan = self._tuned_plan(confirmed, reference, even, calibrated)
        return replace(calibrated, plans=(plan,), tuned=(ratio,) if ratio else ())

    def _find_reference(self, planned: Sequence[Contender]) -> Reference | None:
        """Finds the fastest device alone, in its faster memory format.

        It is the first plan that runs where the model fits no device.
        """
        run = self.run
        alone = [c for c in planned if c.name.startswith(SINGLE_DEVICE)]
        alone.sort(key=lambda c: c.predicted.step_s)
        least_s = min((c.predicted.step_s for c in alone), default=0.0)
        limit_s = MAX_PREDICTED_RATIO * least_s
        options = {
            f"{c.name}, {variant.memory_format}": Reference(c, variant)
            for c in alone
            if c.predicted.step_s <= limit_s
            for variant in plain_variants(_rank_of(c), run.inputs)
        }
        known = run.known(COMPARED_WITH, "", str)
        if known in options:
            return options[known]
        options = self._running(options)
        if not options:
            run.say.line("the model runs on no device alone; a plan takes its place")
            for contender in shortlist(planned):
                plan = self._plan(contender)
                if self._runs(contender.name, plan):
                    run.keep(COMPARED_WITH, "", contender.name)
                    return Reference(contender, plan)
            return None
        variants = {name: reference.variant for name, reference in options.items()}
        request = TimingRequest("devices alone", variants, min_seconds=MIN_TRIAL_S)
        timings = run.race.lead(request)
        seconds = {
            name: median(one[name] for one in timings.rounds)
            for name in timings.rounds[-1]
        }
        best = min(seconds, key=seconds.__getitem__)
        run.keep(COMPARED_WITH, "", best)
        run.say.detail(f"{best}: {seconds[best] * 1e3:.1f} ms")
        return options[best]

    def _running(self, options: Mapping[str, Reference]) -> dict[str, Reference]:
        """Tries devices alone, while there is time to race all of them, one in any case."""
        running: dict[str, Reference] = {}
        for name, option in options.items():
            before_s = self.run.left_s
            running |= {name: option} if self._runs(name, option.variant) else {}
            trial_s = before_s - self.run.left_s
            if (
                MIN_RACE_STEPS * trial_s * (1 + len(running)) > self.run.left_s
                and running
            ):
                break
        return running

    def _time_all(self, promising: Sequence[Contender], reference: Reference) -> None:
        """Times plans one by one, for as long as the budget lasts."""
        run = self.run
        run.say.stage("plans", len(promising))
        part = part_of(run, PLANS_PART)
        left_s = (part - run.spent) * run.job.budget
        trial_s = max(MIN_TRIAL_S, TIMED_PART * left_s / max(len(promising), 1))
        took_s = 0.0
        for contender in promising:
            left_s, began = (part - run.spent) * run.job.budget, run.spent
            # One whatever is left: whether to split at all depends on it.
            if left_s < max(took_s, self._expected_s(contender)) and self.timed:
                break
            timing = self._time(contender, reference, trial_s)
            took_s = (run.spent - began) * run.job.budget
            self.timed.append((contender, timing))
            if timing.ratio is None:
                run.say.advance(f"{contender.name} failed {timing.failure}")
            else:
                ratio, baseline = timing.ratio.ratio, reference.contender.name
                run.say.advance(f"{contender.name} {ratio:.3f}x of {baseline}", ratio)

    def _time(
        self, contender: Contender, reference: Reference, trial_s: float
    ) -> PlanTiming:
        """Times a plan, unless that is known."""
        run, key = self.run, key_of(contender.splits)
        known = run.known(PLANS, key, PlanTiming)
        if known is not None:
            return known
        attempts = run.known(ATTEMPTS, key, int) or 0
        run.keep(ATTEMPTS, key, attempts + 1)
        ratios = [t.ratio.value for _, t in self.timed if t.ratio is not None]
        request = TimingRequest(
            contender.name,
            {REFERENCE: reference.variant, CANDIDATE: self._plan(contender)},
            min_seconds=trial_s,
            record_compute=CANDIDATE,
            give_up_above=min(ratios, default=None),
        )
        try:
            if attempts >= MAX_ATTEMPTS:
                raise TrialFailedError("as a rank was killed whenever it ran")
            rounds, compute_s, _ = self._lead(request, CANDIDATE)
        except TrialFailedError as e:
            timing = PlanTiming(contender.name, None, failure=str(e))
        else:
            ratio = LogRatio.of(rounds, CANDIDATE, REFERENCE)
            reference_s = median(one[REFERENCE] for one in rounds)
            timing = PlanTiming(contender.name, ratio, reference_s, compute_s)
        run.keep(PLANS, key, timing)
        return timing

    def _expected_s(self, contender: Contender) -> float:
        """Returns expected seconds of a step that was predicted, but not timed.

        What made every plan so far too slow, such as a link, does so to this one too:
        of these plans a calibration has learnt nothing.
        """
        slowdowns = [
            self.too_slow.get(key_of(c.splits), 0.0) / c.predicted.step_s
            for c, _ in self.timed
        ]
        return contender.predicted.step_s * max(min(slowdowns, default=1.0), 1.0)

    def _reference_s(self, predicted_s: float) -> float:
        """Returns median seconds of the reference's step in all trials, if any ran."""
        seconds = [t.reference_s for _, t in self.timed if t.ratio is not None]
        return median(seconds) if seconds else predicted_s

    def _observations(self) -> list[Observation]:
        """Returns steps as if the reference's had been equally long in all trials."""
        observations = []
        for contender, timing in self.timed:
            if timing.ratio is not None:
                reference_s = self._reference_s(timing.reference_s)
                drift = timing.reference_s / reference_s
                step_s = timing.ratio.ratio * reference_s
                compute_s = [seconds / drift for seconds in timing.compute_s]
                observations.append(
                    Observation(contender.splits, step_s, compute_s, timing.ratio.error)
                )
        return observations

    def _expected(
        self, replanned: Sequence[Contender], reference: Reference
    ) -> list[Expected]:
        """Returns plans as measured, or as predicted, those that failed left out.

        The likeliest to be the fastest comes first.
        """
        reference_s = self._reference_s(reference.contender.predicted.step_s)
        tried = [contender.splits for contender, _ in self.timed]
        expected = [
            Expected(log(self._expected_s(c) / reference_s), c)
            for c in replanned
            if c.splits not in tried
        ]
        expected += [
            Expected(timing.ratio.value, contender)
            for contender, timing in self.timed
            if timing.ratio is not None
        ]
        return sorted(expected, key=lambda plan: plan.log_ratio)

    def _tune_ratio(self, likeliest: Contender, race_s: float) -> TunedRatio | None:
        """Refines the ratio of a plan, if it has one and time is left before the race."""
        run = self.run
        found = ratio_of(likeliest.splits)
        spare_s = run.left_s - race_s
        trials_s = MIN_TRIALS * 2 * (1 + MIN_ROUNDS) * self._expected_s(likeliest)
        if found is None or not run.job.trials or spare_s < trials_s:
            return None
        part = part_of(run, RATIO_PART)
        trial_s = max(MIN_TRIAL_S, part * run.job.budget / run.job.trials)
        search = RatioSearch(run, self.base, *found, trial_s)
        lasts = min(part, spare_s / run.job.budget)
        return search.tune(run.passed(run.spent + lasts))

    def _with_ratio(self, ratio: TunedRatio, computed: Expected) -> Expected:
        """Returns the plan with a refined ratio, from the one with the computed ratio."""
        splits = whole_model(self.run.graph, ratio.kind, ratio.weights, (ratio.kind,))
        plan = computed.contender._replace(name=tuned_name(ratio), splits=splits)
        gain = log(ratio.step_s / ratio.computed_step_s)
        return Expected(computed.log_ratio + gain, plan)

    def _finalists(
        self,
        likely: Sequence[Expected],
        guards: Iterable[Contender | None],
        reference: Contender,
    ) -> tuple[dict[str, Contender], set[str]]:
        """Returns who races, by `key_of` the plan, and the keys of the ``guards``.

        The plans that are likely to be the fastest come first. Those that were not
        timed are tried, and left out where they fail.
        """
        challengers = [
            plan.contender
            for plan in likely
            if plan.log_ratio <= likely[0].log_ratio + MAX_EXPECTED_LOSS
        ]
        guarding = [c for c in guards if c and not c.name.startswith(SINGLE_DEVICE)]
        known = {key_of(c.splits): t.ratio is not None for c, t in self.timed}
        finalists: dict[str, Contender] = {}
        for contender in (*challengers[:1], *guarding, *challengers):
            key = key_of(contender.splits)
            if key not in known:
                in_time = (
                    MIN_RACE_STEPS * self._expected_s(contender) <= self.run.left_s
                )
                known[key] = in_time and self._runs(
                    contender.name, self._plan(contender)
                )
            if known[key] and contender.splits != reference.splits:
                finalists.setdefault(key, contender)
        return finalists, {key_of(c.splits) for c in guarding}

    def _tuned_plan(
        self,
        confirmed: Confirmation,
        reference: Reference,
        even: Contender | None,
        calibrated: ClusterProfile,
    ) -> TunedPlan:
        run, winner = self.run, confirmed.winner
        seconds = {
            name: median(one[name] for one in confirmed.rounds if name in one)
            for name in confirmed.rounds[0]
        }
        seconds[key_of(reference.contender.splits)] = seconds[REFERENCE]
        best = confirmed.finalists.get(winner, reference.contender)
        run.say.line(f"the plan is {best.name}: {seconds[winner] * 1e3:.1f} ms")
        even_s = (self.too_slow | seconds).get(key_of(even.splits)) if even else None
        alone = isinstance(reference.variant, PlainModel)
        estimator = StepEstimator(run.graph, calibrated, run.job.mode)
        return TunedPlan(
            run.graph.digest,
            run.job.mode,
            best.name,
            best.splits,
            seconds[winner],
            predicted_s=estimator.step_s(best.name, best.splits),
            trials=sum(timing.ratio is not None for _, timing in self.timed),
            alone=reference.contender.name if alone else None,
            alone_s=seconds[REFERENCE] if alone else None,
            measured=run.conditions,
            even=even.name if even is not None and even_s is not None else None,
            even_s=even_s,
        )

    def _runs(self, name: str, variant: Variant) -> bool:
        try:
            self._lead(TimingRequest(name, {name: variant}, rounds=0), name)
        except TrialFailedError as e:
            self.run.say.line(f"{name} failed {e}")
            return False
        return True

    def _lead(self, request: TimingRequest, name: str) -> Timings:
        """Has all ranks time variants; raises `TrialFailedError` if one is too slow."""
        timings, variant = self.run.race.lead(request), request.variants[name]
        if name in timings.too_slow and isinstance(variant, Plan):
            self.too_slow[key_of(variant.splits)] = timings.too_slow[name]
        timings.check(name)
        return timings

    def _plan(self, contender: Contender) -> Plan:
        return self.base.with_splits(contender.splits)


def _rank_of(alone: Contender) -> int:
    """Returns the rank of a device alone, from the name that `Candidates` gives it."""
    return int(alone.name.removeprefix(f"{SINGLE_DEVICE} (").partition(":")[0])
