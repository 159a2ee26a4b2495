"""What a tuning job leaves to be looked at, in plain numbers: the profile, and what it was made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import optuna
from optuna.trial import TrialState

from hetconv.autotune.measure.sampling import Passes
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.json_files import adapter
from hetconv.tracing.graph import Graph

from .journal import BESIDE, TITLE, Store
from .study import NAME, WEIGHTS, WHY

Samples = Mapping[float, Passes]
"""Of a rank: by share, or by bytes."""
OPERATORS = "operators"  # the stage under which the store has them


class Trial(NamedTuple):
    """``what`` was tried; seconds relative to what it ran beside; or, of one that failed, why."""

    what: str
    value: float | None
    why: str = ""


class Study(NamedTuple):
    """Trials in order, relative to ``beside``."""

    title: str
    beside: str
    trials: tuple[Trial, ...]


@dataclass(frozen=True)
class Record:
    """``stage_s``: seconds of each stage, none of one that an earlier run had finished. ``samples``: of each rank."""

    profile: ClusterProfile
    graph: Graph
    stage_s: Mapping[str, float | None]
    samples: Mapping[str, Sequence[Samples]]
    studies: tuple[Study, ...]


def samples_of(store: Store) -> dict[str, list[Samples]]:
    """By operator."""
    read = adapter(list[dict[float, Passes]]).validate_python
    return {key: list(read(value)) for (stage, key), value in store.known.items() if stage == OPERATORS}


def studies_of(store: Store) -> tuple[Study, ...]:
    return tuple(map(study_of, store.studies()))


def study_of(study: optuna.Study) -> Study:
    """Of those trials that have come to an end."""
    trials = []
    for trial in study.get_trials(states=(TrialState.COMPLETE, TrialState.FAIL)):
        known = trial.user_attrs
        what = known.get(NAME) or ":".join(map(str, known.get(WEIGHTS, ())))
        why = known.get(WHY, "interrupted") if trial.value is None else ""
        trials.append(Trial(what, trial.value, why))
    known = study.user_attrs
    return Study(known.get(TITLE, study.study_name), known.get(BESIDE, ""), tuple(trials))
