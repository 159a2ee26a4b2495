"""What makes whole steps fastest: Optuna studies around what was computed, until there
is hardly more to gain.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from statistics import median
from typing import Protocol

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.pruners import BasePruner, WilcoxonPruner
from optuna.samplers import GPSampler
from optuna.study import StudyDirection
from optuna.terminator import BaseImprovementEvaluator, RegretBoundEvaluator
from optuna.trial import FrozenTrial, TrialState

from hetconv.sharding.layout import apportion

SPREAD = 1.5  # how far, as a factor, a device's weight may move from the computed one
GAIN = (
    0.01  # of a step: a study ends where no more is to be expected from further trials
)
# of all work, moved to and from each device first, so that the sampler has something to
# go by
PROBE = 0.08
MODELLED = 3  # trials, from which on a model of them is asked what to try next
LEAST = 5  # trials, from which on it is asked whether to
ROUNDS = 5  # of a trial, in each of which it runs beside what it is compared with
DOUBT = 0.1  # chance by which a trial that is given up, for being slower than the best one, is not
AGAIN = "again"  # marks the second attempt at a trial in which a rank was killed
WEIGHTS, NAME, WHY = (
    "weights",
    "name",
    "why",
)  # what a trial asked for, or of which plan; why it failed
Weights = tuple[int, ...]
Enough = Callable[[], bool]
Hopeless = Callable[[float], bool]
"""Told the outcome of each round: whether the rounds so far are enough to give the trial up."""


class TrialFailedError(Exception):
    """A trial that raised an error, ran out of memory or took too long on any rank; all
    ranks are past it.
    """


class Rounds(Protocol):
    """What a study needs of the world: steps in these weights beside the computed
    ones', round after round.

    Gives the seconds relative to the computed ones', of each round. Raises `TrialFailedError`.
    """

    def __call__(self, weights: Weights, hopeless: Hopeless) -> Sequence[float]: ...


def refine(
    study: optuna.Study,
    computed: Sequence[int],
    rounds: Rounds,
    trials: int,
    seed: int,
    enough: Enough = lambda: False,
    told: Callable[[FrozenTrial], None] = lambda _: None,
) -> tuple[Weights, float, int]:
    """(weights, seconds relative to the computed ones, trials so far): never worse than
    the computed ratio as measured.

    Weights keep their sum, a unit of which is a row (column, sample). Ratios that come
    to the same weights are measured once. A device with no share gets none. A study
    that has had trials goes on from there. ``all_gather_uneven`` of every trial that is finished,
    and kept, with its `WEIGHTS`.
    """
    start, free = tuple(computed), [rank for rank, w in enumerate(computed) if w][:-1]
    known: dict[Weights, float] = {start: 1.0}

    def weights(of: dict[str, float]) -> Weights:
        return apportion(
            sum(computed),
            tuple(w * of.get(f"rank{rank}", 1.0) for rank, w in enumerate(computed)),
        )

    def objective(trial: optuna.Trial) -> float:
        for rank in free:
            trial.suggest_float(f"rank{rank}", 1 / SPREAD, SPREAD, log=True)
        asked = weights(trial.params)
        trial.set_user_attr(WEIGHTS, asked)
        if asked not in known:
            known[asked] = judged(trial, lambda hopeless: rounds(asked, hopeless))
        else:
            for step in range(ROUNDS):  # for the pruner, which compares round by round
                trial.report(known[asked], step)
        return known[asked]

    for t in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        known.setdefault(weights(t.params), t.value or 1.0)
    ran = 0
    if free:
        for parameters in probes(start, free):
            study.enqueue_trial(parameters, skip_if_exists=True)
        ran = explore(study, objective, trials, seed, enough, told)
    best = min(known, key=lambda w: (known[w], w != start))
    return best, known[best], ran


def probes(weights: Weights, free: Sequence[int]) -> list[dict[str, float]]:
    """The computed weights, and those with one device a step up or down, as a study's
    parameters.
    """
    total = sum(weights)
    step = max(round(total * PROBE), 1)
    found = [{f"rank{rank}": 1.0 for rank in free}]
    for rank in free:
        for w in (weights[rank] - step, weights[rank] + step):
            factor = w * (total - weights[rank]) / (max(total - w, 1) * weights[rank])
            found.append(
                found[0] | {f"rank{rank}": min(max(factor, 1 / SPREAD), SPREAD)}
            )
    return found


def judged(trial: optuna.Trial, rounds: Callable[[Hopeless], Sequence[float]]) -> float:
    """The median of the rounds, fewer of them where the trial is surely worse than the
    best one so far.
    """
    seen: list[float] = []

    def hopeless(outcome: float) -> bool:
        trial.report(outcome, len(seen))
        seen.append(outcome)
        with (
            warnings.catch_warnings()
        ):  # short steps run in more rounds than others: those in common are compared
            warnings.filterwarnings("ignore", "WilcoxonPruner finds steps")
            return trial.should_prune()

    try:
        return median(rounds(hopeless))
    except TrialFailedError as e:
        trial.set_user_attr(WHY, str(e))
        raise


def explore(
    study: optuna.Study,
    objective: Callable[[optuna.Trial], float],
    trials: int,
    seed: int,
    enough: Enough,
    told: Callable[[FrozenTrial], None],
) -> int:
    """Runs trials until there have been as many, it is ``enough``, or little is left to
    gain; how many there have been.

    One in which a rank was killed is tried once more, one that failed is not.
    """
    for t in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.tell(t.number, state=TrialState.FAIL)
        if AGAIN not in t.user_attrs and t.params:
            study.enqueue_trial(t.params, user_attrs={AGAIN: True})
    study.sampler = GPSampler(seed=seed + len(study.trials), n_startup_trials=MODELLED)
    study.pruner, regret = _of_optuna()
    while _tried(study) < trials and not enough() and not _exhausted(study, regret):
        study.optimize(
            objective,
            n_trials=1,
            catch=(TrialFailedError,),
            callbacks=[lambda _, trial: told(trial)],
        )
    return _tried(study)


def _of_optuna() -> tuple[BasePruner, BaseImprovementEvaluator]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        return WilcoxonPruner(
            p_threshold=DOUBT, n_startup_steps=4
        ), RegretBoundEvaluator(seed=0)


def _tried(study: optuna.Study) -> int:
    done: list[FrozenTrial] = study.get_trials(
        deepcopy=False, states=(TrialState.COMPLETE, TrialState.FAIL)
    )
    return len(done) - sum(AGAIN in t.user_attrs for t in done)


def _exhausted(study: optuna.Study, regret: BaseImprovementEvaluator) -> bool:
    """Whether, by a Gaussian process over the trials, none can be much better than the best one."""
    done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    waiting = study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
    return (
        not waiting
        and len(done) >= LEAST
        and regret.evaluate(done, StudyDirection.MINIMIZE) < GAIN
    )
