"""What a tuning job leaves for whoever looks at it later: a read-only view of its journal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

import optuna
from optuna.trial import TrialState

from hetconv.autotune.measure.pace import disturbances
from hetconv.autotune.measure.paired_rounds import LogRatio
from hetconv.autotune.measure.sampling import Passes
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.json_files import adapter
from hetconv.tracing.graph import Graph

from .journal import BASELINE, TITLE, Store

# Stages under which a journal has samples of operators, the name of what plans are
# compared with, and measured plans.
OPERATORS, COMPARED_WITH, PLANS = "operators", "compared with", "plans"
# Attributes of an Optuna trial: the weights that it asked for; why it failed.
WEIGHTS, FAILURE = "weights", "failure"
Samples = Mapping[float, Passes]
"""Of a rank: by share, or by bytes."""


class PlanTiming(NamedTuple):
    """A plan as measured beside the fastest device alone.

    Attributes:
        name: what the planner calls it.
        ratio: its steps' seconds over those of the device alone; None if it failed.
        reference_s: median seconds of a step of the device alone.
        compute_s: seconds in which each rank computed layers.
        failure: why it has no ratio.
    """

    name: str
    ratio: LogRatio | None
    reference_s: float = 0.0
    compute_s: tuple[float, ...] = ()
    failure: str = ""


def with_drift(
    profile: ClusterProfile, timings: Sequence[PlanTiming]
) -> ClusterProfile:
    """Adds to a profile's disturbances that the device alone changed its speed.

    Args:
        profile: what is known so far.
        timings: of plans, each beside the same steps of that device.
    """
    seconds = [timing.reference_s for timing in timings if timing.ratio is not None]
    slower = max(seconds) / median(seconds) if seconds else 1.0
    return replace(profile, disturbed=profile.disturbed + disturbances("plans", slower))


class Trial(NamedTuple):
    """What was tried: the ratio of its steps to the baseline's, or why there is none."""

    what: str
    value: float | None
    why: str = ""


class Study(NamedTuple):
    """Trials in order, and the baseline to which they are relative."""

    title: str
    baseline: str
    trials: tuple[Trial, ...]


@dataclass(frozen=True)
class Record:
    """A finished job.

    Attributes:
        profile: what it wrote.
        graph: the model.
        stage_s: seconds of each stage; None of one that an earlier run had finished.
        samples: by operator, those of each rank.
        studies: of plans and ratios.
    """

    profile: ClusterProfile
    graph: Graph
    stage_s: Mapping[str, float | None]
    samples: Mapping[str, Sequence[Samples]]
    studies: tuple[Study, ...]


def samples_of(store: Store) -> dict[str, list[Samples]]:
    """Reads the samples of each rank, by operator."""
    read = adapter(list[dict[float, Passes]]).validate_python
    found = store.of_stage(OPERATORS)
    return {key: list(read(value)) for key, value in found.items()}


def studies_of(store: Store) -> tuple[Study, ...]:
    """Reads what was tried: plans first, if any were, then the Optuna studies."""
    plans = _plans_of(store)
    return (*plans, *map(_study_of, store.studies()))


def _plans_of(store: Store) -> list[Study]:
    read = adapter(PlanTiming).validate_python
    timings = [read(value) for value in store.of_stage(PLANS).values()]
    trials = [
        Trial(t.name, t.ratio.ratio if t.ratio is not None else None, t.failure)
        for t in timings
    ]
    baseline = store.known.get((COMPARED_WITH, ""), "")
    return [Study(PLANS, baseline, tuple(trials))] if trials else []


def _study_of(study: optuna.Study) -> Study:
    """Reads the trials that have come to an end."""
    trials = []
    for trial in study.get_trials(states=(TrialState.COMPLETE, TrialState.FAIL)):
        what = ":".join(map(str, trial.user_attrs.get(WEIGHTS, ())))
        failure = trial.user_attrs.get(FAILURE, "interrupted")
        why = failure if trial.value is None else ""
        trials.append(Trial(what, trial.value, why))
    known = study.user_attrs
    return Study(known[TITLE], known[BASELINE], tuple(trials))
