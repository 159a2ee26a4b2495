"""The split ratio that makes whole steps fastest: an Optuna study around the computed one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import optuna

from hetconv.layout import apportion

SPREAD = 1.5  # how far, as a factor, a device's weight may move from the computed one


class Study(Protocol):
    """What a study needs of the world: the step's seconds relative to the computed ratio's, measured side by side."""

    def __call__(self, weights: tuple[int, ...]) -> float: ...


def refine(
    computed: Sequence[int], relative: Study, trials: int, seed: int, enough: Callable[[], bool] = lambda: False
) -> tuple[tuple[int, ...], float, int]:
    """(weights, seconds relative to the computed ones, trials run): never worse than the computed ratio as measured.

    Weights keep their sum, a unit of which is a row (column, sample). Ratios that come to the same weights are measured
    once. A device with no share gets none.
    """
    total, start = sum(computed), tuple(computed)
    known: dict[tuple[int, ...], float] = {start: 1.0}
    free = [r for r, w in enumerate(computed) if w][:-1]

    def objective(trial: optuna.Trial) -> float:
        scale = {r: trial.suggest_float(f"rank{r}", 1 / SPREAD, SPREAD, log=True) for r in free}
        weights = apportion(total, tuple(w * scale.get(r, 1.0) for r, w in enumerate(computed)))
        if weights not in known:
            known[weights] = relative(weights)
        return known[weights]

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=5))
    study.enqueue_trial({f"rank{r}": 1.0 for r in free})
    ran = 0
    for _ in range(trials if free else 0):
        if enough():
            break
        study.optimize(objective, n_trials=1)
        ran += 1
    best = min(known, key=lambda w: (known[w], w != start))
    return best, known[best], ran
