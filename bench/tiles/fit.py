"""Fit of the time model's constants to measured tiles.

The loss has the error of the predicted times, mostly of fast tiles, and the time of the
tile that is predicted fastest, of the fastest one's, made smooth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from scipy.optimize import differential_evolution, minimize

from hetconv.kernels.chip import Chip
from hetconv.kernels.tiles import Pass
from hetconv.kernels.tiles.time_model import (
    Numbers,
    TimeModel,
    Workload,
    joined,
    predicted_seconds,
)

from .measured import MeasuredPass

# Start, least and most of each constant.
BOUNDS: dict[str, tuple[float, float, float]] = {
    "efficiency": (0.9, 0.7, 1.0),
    "narrow": (0.1, 0.001, 1.0),
    "eight_warps": (1.0, 0.8, 1.3),
    "sharing": (1.1, 1.0, 2.0),
    "step_cycles": (150, 20, 800),
    "latency_cycles": (1300, 300, 3000),
    "miss_cycles": (2000, 10, 7000),
    "l2_bytes": (64, 35, 90),
    "l2_miss_bytes": (80, 20, 1000),
    "fill_cycles": (2500, 300, 7000),
    "stage_cycles": (120, 20, 700),
    "store_cycles": (0.08, 0.01, 1.0),
    "memory": (0.75, 0.5, 0.95),
    "reread": (0.1, 0.001, 2.0),
    "launch_s": (1.5e-6, 0.5e-6, 3.5e-6),
    "split_s": (2e-6, 0.5e-6, 4e-6),
    "split_memory": (1.2, 0.3, 2.5),
}
NAMES = tuple(f.name for f in fields(TimeModel))
OF_WEIGHT_GRADIENTS = ("step_cycles", "fill_cycles", "store_cycles", "reread")
"""Constants that differ between weight gradients and other passes; the rest is hardware."""
START, LEAST, MOST = (
    np.log([BOUNDS[name][i] for name in (*NAMES, *OF_WEIGHT_GRADIENTS)])
    for i in range(3)
)
CHOICE_WEIGHT = 2.0  # of the chosen tile's time in the loss
CHOICE_WIDTH = 0.03  # relative difference of predicted times that counts as equal
WORST_POWER = 4  # of the mean over passes of the chosen tile's time
PRIOR_WEIGHT = 0.03  # of the distance from the start
KINK = 0.1  # relative error from which on it counts linearly
GENERATIONS, POPULATION, SEEDS = 200, 4, 3


@dataclass(frozen=True)
class Models:
    """Fitted constants: of weight gradients, and of other passes."""

    other: TimeModel
    weight_gradient: TimeModel

    def of(self, what: Pass) -> TimeModel:
        """Returns the constants of a kind of pass."""
        return self.weight_gradient if what == "weight gradient" else self.other


class Data:
    """Measured passes as arrays.

    Args:
        passes: The passes, one at least.
    """

    def __init__(self, passes: Sequence[MeasuredPass]) -> None:
        self.passes = passes
        self.seconds = np.array([s for p in passes for s in p.seconds])
        ends = np.cumsum([len(p.tiles) for p in passes])
        self._pass_ends = ends[:-1]
        products = [
            (p, work, end)
            for p, end in zip(passes, ends, strict=True)
            for work in p.workloads()
        ]
        rows = [np.arange(end - len(p.tiles), end) for p, _, end in products]
        self._tile_of_row = np.concatenate(rows)
        counts = [len(p.tiles) for p, _, _ in products]
        kinds = [(p.what, p.chip) for p, _, _ in products]
        self._parts: list[tuple[Numbers, Workload, Pass, Chip]] = []
        for kind in dict.fromkeys(kinds):
            is_of_kind = [other == kind for other in kinds]
            of_kind = [work for p, work, _ in products if (p.what, p.chip) == kind]
            self._parts.append((np.repeat(is_of_kind, counts), joined(of_kind), *kind))

    def predicted(self, models: Models) -> Numbers:
        """Returns the predicted seconds of all tiles, one pass after the other."""
        seconds = np.empty(len(self._tile_of_row))
        for rows, work, what, chip in self._parts:
            seconds[rows] = predicted_seconds(work, chip, models.of(what))
        total = np.bincount(self._tile_of_row, seconds, len(self.seconds))
        return total.astype(np.float64)

    def by_pass(self, values: Numbers) -> list[Numbers]:
        """Returns values of all tiles, split into passes."""
        return np.split(values, self._pass_ends)

    def regrets(self, models: Models) -> dict[Pass, list[float]]:
        """Returns the regret of each pass, by its kind."""
        found: dict[Pass, list[float]] = {}
        predicted = self.by_pass(self.predicted(models))
        for p, seconds in zip(self.passes, predicted, strict=True):
            found.setdefault(p.what, []).append(p.regret(list(seconds)))
        return found


def fitted(passes: Sequence[MeasuredPass]) -> Models:
    """Returns the models that fit measured passes; the random search is seeded."""
    data = Data(passes)
    found = [_searched(data, seed) for seed in range(SEEDS)]
    return _models(min(found, key=lambda x: _loss(data, x)))


def _searched(data: Data, seed: int) -> Numbers:
    def loss(x: Numbers) -> float:
        return _loss(data, x)

    bounds = list(zip(LEAST, MOST, strict=True))
    found = differential_evolution(
        loss,
        bounds,
        x0=START,
        maxiter=GENERATIONS,
        popsize=POPULATION,
        mutation=(0.3, 0.9),
        recombination=0.8,
        polish=False,
        rng=seed,
    )
    polished: Numbers = minimize(loss, found.x, method="Powell", bounds=bounds).x
    return polished


def _models(x: Numbers) -> Models:
    # Three digits are more than the data tells.
    values = [float(f"{v:.3g}") for v in np.exp(np.clip(x, LEAST, MOST))]
    other = TimeModel(*values[: len(NAMES)])
    own = dict(zip(OF_WEIGHT_GRADIENTS, values[len(NAMES) :], strict=True))
    return Models(other, replace(other, **own))


def _loss(data: Data, x: Numbers) -> float:
    predicted = data.predicted(_models(x))
    of_times = of_choice = 0.0
    pairs = zip(data.by_pass(predicted), data.by_pass(data.seconds), strict=True)
    for guess, seconds in pairs:
        of_times += _error(guess, seconds)
        of_choice += _chosen(guess, seconds) ** WORST_POWER
    count = len(data.passes)
    choice = np.log(of_choice / count) / WORST_POWER
    prior = PRIOR_WEIGHT * np.mean((x - START) ** 2)
    return float(of_times / count + CHOICE_WEIGHT * choice + prior)


def _error(predicted: Numbers, seconds: Numbers) -> float:
    """Mean error of the logarithms, the faster a tile the more it counts."""
    weights = (seconds.min() / seconds) ** 2
    off = np.abs(np.log(predicted / seconds))
    huber = np.where(off < KINK, off**2 / (2 * KINK), off - KINK / 2)
    return float(np.average(huber, weights=weights))


def _chosen(predicted: Numbers, seconds: Numbers) -> float:
    """Time of the tile that is predicted fastest, of the fastest one's, made smooth."""
    logits = -np.log(predicted / predicted.min()) / CHOICE_WIDTH
    chances = np.exp(logits)
    return float((chances * seconds).sum() / chances.sum() / seconds.min())
