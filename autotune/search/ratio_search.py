"""The Optuna study of a plan's split ratio: whole steps in other weights than the computed ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log
from statistics import median
from typing import Literal, get_args

import optuna
from optuna.samplers import GPSampler
from optuna.trial import FrozenTrial, TrialState

from hetconv.autotune.measure.paired_rounds import LogRatio
from hetconv.planner.partition import Splits, whole_model
from hetconv.schemas.plan import Plan
from hetconv.schemas.tuning_results import TunedRatio
from hetconv.sharding.layout import apportion
from hetconv.sharding.split import Split, ratio_text

from .job import Run
from .race import CANDIDATE, REFERENCE, TimingRequest, TrialFailedError
from .record import FAILURE, WEIGHTS

RatioKind = Literal["sample", "depth", "height", "width"]
Weights = tuple[int, ...]
MAX_WEIGHT_FACTOR = 1.5  # of a device's weight, beside the computed one
# A study ends after so many trials that together gained less than this part of a step.
MAX_TRIALS_WITHOUT_GAIN, MIN_GAIN = 4, 0.01
MIN_TRIALS_TO_MODEL = 3
# Part of all work that the first trials move to and from each device, so that the
# sampler has something to go by.
PROBED_PART = 0.08
RETRIED = "retried"  # attribute of a second attempt, after a rank was killed


def ratio_of(splits: Mapping[str, Split]) -> tuple[RatioKind, Weights] | None:
    """Returns the kind of a plan's splits and the weights of the largest one.

    None unless all are of one kind that has a ratio for the whole model, among two
    devices at least.
    """
    cut = [s for s in splits.values() if s.kind != "replicate"]
    kind = cut[0].kind if cut else "replicate"
    if kind not in get_args(RatioKind) or any(s.kind != kind or s.nodes for s in cut):
        return None
    weights = max((s.sizes for s in cut), key=sum)
    return (kind, weights) if sum(w > 0 for w in weights) > 1 else None  # type: ignore[return-value]


@dataclass(frozen=True)
class RatioSearch:
    """Search of a ratio on rank 0, which leads the other ranks' steps.

    Attributes:
        run: the job.
        base: any plan of the model.
        kind: the dimension that all layers are split along.
        computed: the weights that the planner computed.
        trial_s: seconds that the rounds of a trial take at least.
    """

    run: Run
    base: Plan
    kind: RatioKind
    computed: Weights
    trial_s: float

    def tune(self, enough: Callable[[], bool]) -> TunedRatio | None:
        """Searches until it is ``enough``; returns None where the computed weights fail."""
        run, job = self.run, self.run.job
        assert run.store is not None  # this is rank 0
        computed = ratio_text(self.computed)
        run.say.stage(f"{self.kind} ratio", job.trials)
        study = run.store.study(
            f"{self.kind} ratio from {computed}", "the computed ratio"
        )
        best, trials = refine(
            study, self.computed, self.time, job.trials, job.seed, enough, self._report
        )
        try:
            weights, step_s, computed_s = self._confirm(best)
        except TrialFailedError as e:
            run.say.detail(
                f"the {self.kind} ratio {computed} is kept, for it failed {e}"
            )
            return None
        run.say.detail(
            f"{self.kind} {ratio_text(weights)}: {step_s * 1e3:.1f} ms a step; "
            f"computed {computed}: {computed_s * 1e3:.1f} ms"
        )
        return TunedRatio(
            run.graph.digest,
            job.mode,
            self.kind,
            weights,
            step_s,
            self.computed,
            computed_s,
            trials,
            run.conditions,
        )

    def time(self, weights: Weights, give_up_above: float | None = None) -> LogRatio:
        """Times steps in other weights beside those in the computed ones.

        Args:
            weights: those to time.
            give_up_above: see `TimingRequest`.

        Raises:
            TrialFailedError: if they fail on any rank.
        """
        timings = self.run.race.lead(self._request(weights, give_up_above))
        timings.check(CANDIDATE)
        return LogRatio.of(timings.rounds, CANDIDATE, REFERENCE)

    def splits(self, weights: Weights) -> Splits:
        """Splits the whole model in these weights."""
        return whole_model(self.run.graph, self.kind, weights, (self.kind,))

    def _confirm(self, best: Weights) -> tuple[Weights, float, float]:
        """Times the best weights once more, for they may merely have been lucky.

        Returns the weights, the computed ones unless the best are surely faster, their
        seconds, and those of the computed ones.
        """
        rounds, _, too_slow = self.run.race.lead(self._request(best))
        computed_s = median(one[REFERENCE] for one in rounds)
        if CANDIDATE in too_slow:
            return self.computed, computed_s, computed_s
        step_s = median(one[CANDIDATE] for one in rounds)
        if LogRatio.of(rounds, CANDIDATE, REFERENCE).surely_below(0.0):
            return best, step_s, computed_s
        return self.computed, computed_s, computed_s

    def _request(
        self, weights: Weights, give_up_above: float | None = None
    ) -> TimingRequest:
        variants = {
            REFERENCE: self.base.with_splits(self.splits(self.computed)),
            CANDIDATE: self.base.with_splits(self.splits(weights)),
        }
        return TimingRequest(
            f"{self.kind} {ratio_text(weights)}",
            variants,
            min_seconds=self.trial_s,
            give_up_above=give_up_above,
        )

    def _report(self, trial: FrozenTrial) -> None:
        weights = ratio_text(trial.user_attrs[WEIGHTS])
        if trial.value is None:
            note = f"{weights} failed {trial.user_attrs[FAILURE]}"
        else:
            note = f"{weights} {trial.value:.3f}x of the computed ratio's step"
        self.run.say.advance(note, trial.value)


def refine(
    study: optuna.Study,
    computed: Weights,
    time: Callable[[Weights, float], LogRatio],
    trials: int,
    seed: int,
    enough: Callable[[], bool] = lambda: False,
    report: Callable[[FrozenTrial], None] = lambda _: None,
) -> tuple[Weights, int]:
    """Runs trials until there is hardly more to gain.

    Weights keep their sum, a unit of which is a row (column, sample). Ratios that come
    to the same weights are timed once. A device without a share gets none.

    Args:
        study: goes on from the trials that it has had.
        computed: the weights to start from; two devices at least have a share.
        time: compares weights with the computed ones, and gives up beyond a limit.
        trials: how many there may be in all.
        seed: of the sampler.
        enough: whether to stop before the next trial.
        report: is called with every trial that has ended.

    Returns:
        The best weights as measured, and how many trials there have been.
    """
    free = [rank for rank, w in enumerate(computed) if w][:-1]
    known: dict[Weights, float] = {computed: 1.0}

    def weights_of(parameters: Mapping[str, float]) -> Weights:
        factors = [parameters.get(f"rank{rank}", 1.0) for rank in range(len(computed))]
        wanted = tuple(w * factor for w, factor in zip(computed, factors, strict=True))
        return apportion(sum(computed), wanted)

    def objective(trial: optuna.Trial) -> float:
        for rank in free:
            trial.suggest_float(
                f"rank{rank}", 1 / MAX_WEIGHT_FACTOR, MAX_WEIGHT_FACTOR, log=True
            )
        weights = weights_of(trial.params)
        trial.set_user_attr(WEIGHTS, weights)
        if weights not in known:
            try:
                known[weights] = time(weights, log(min(known.values()))).ratio
            except TrialFailedError as e:
                trial.set_user_attr(FAILURE, str(e))
                raise
        return known[weights]

    for trial in study.get_trials(states=(TrialState.COMPLETE,)):
        known.setdefault(weights_of(trial.params), trial.value or 1.0)
    _retry_interrupted(study)
    for parameters in probes(computed, free):
        study.enqueue_trial(parameters, skip_if_exists=True)
    study.sampler = GPSampler(
        seed=seed + len(study.trials), n_startup_trials=MIN_TRIALS_TO_MODEL
    )
    while _ended(study) < trials and not enough() and not _exhausted(study):
        study.optimize(
            objective,
            n_trials=1,
            catch=(TrialFailedError,),
            callbacks=[lambda _, trial: report(trial)],
        )
    return min(known, key=lambda w: (known[w], w != computed)), _ended(study)


def probes(weights: Weights, free: Sequence[int]) -> list[dict[str, float]]:
    """Returns the parameters of the first trials.

    These are the computed weights, and those with one device `PROBED_PART` of all work
    up or down.

    Args:
        weights: the computed ones.
        free: ranks that have a parameter.
    """
    total = sum(weights)
    step = max(round(total * PROBED_PART), 1)
    computed = {f"rank{rank}": 1.0 for rank in free}
    found = [computed]
    for rank in free:
        for w in (weights[rank] - step, weights[rank] + step):
            factor = w * (total - weights[rank]) / (max(total - w, 1) * weights[rank])
            factor = min(max(factor, 1 / MAX_WEIGHT_FACTOR), MAX_WEIGHT_FACTOR)
            found.append(computed | {f"rank{rank}": factor})
    return found


def _retry_interrupted(study: optuna.Study) -> None:
    """Tries once more what ran when a rank was killed."""
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)
        if RETRIED not in trial.user_attrs and trial.params:
            study.enqueue_trial(trial.params, user_attrs={RETRIED: True})


def _ended(study: optuna.Study) -> int:
    """Counts trials, one that was tried again once."""
    ended = study.get_trials(
        deepcopy=False, states=(TrialState.COMPLETE, TrialState.FAIL)
    )
    return len(ended) - sum(RETRIED in t.user_attrs for t in ended)


def _exhausted(study: optuna.Study) -> bool:
    """Returns whether the latest trials have gained next to nothing."""
    if study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
        return False
    completed = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    values = [trial.value or 1.0 for trial in completed]
    earlier = values[:-MAX_TRIALS_WITHOUT_GAIN]
    return bool(earlier) and min(values) > (1 - MIN_GAIN) * min(earlier)
