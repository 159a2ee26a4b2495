"""Search of the fastest tile of one pass of a convolution.

It is an Optuna study that starts from the predicted times and corrects them.

Hundreds of tiles, of which a few dozen can be measured, are too few for a sampler that
learns from nothing. After 15 % of the tiles of eight passes that an H100 measured, 52 to
133 tiles each, the sampler here was 0.1 % off the best on average; the plain order of
the predictions 0.5 %, a random order 13 %, and the default tile alone 5 %.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, log2
from typing import Any, Literal

import numpy as np
import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    IntDistribution,
)
from optuna.trial import FrozenTrial, TrialState, create_trial

from hetconv.errors import HetConvError
from hetconv.kernels import Tile, tiles
from hetconv.kernels.chip import Chip
from hetconv.kernels.tiles import GemmShape
from hetconv.kernels.triton.backend import is_usable

Choice = Tile | Literal["aten"]
Numbers = np.ndarray[Any, Any]
TRIALS, MAX_TRIALS_WITHOUT_GAIN = 32, 12
MIN_GAIN_FACTOR = 0.99  # of the best so far: a smaller gain may be noise
# Of the Gaussian process, in logarithms: standard deviation of the cost model's error,
# the distance of sizes over which it is alike, and the deviation of measurements.
MODEL_DEVIATION, LENGTH_SCALE, NOISE_DEVIATION = 0.2, 1.5, 0.05
# How many standard deviations below its expected seconds a tile is hoped to take.
CONFIDENCE_DEVIATIONS = 2.5

MAX_TILES = 256  # of a study: those that are predicted fastest
POWERS = (
    "n",
    "k",
    "warps",
)  # sizes that are powers of two: a study counts them by their logarithms
DIMENSIONS: dict[str, BaseDistribution] = {
    "kind": CategoricalDistribution(["tma", "pointer", "aten"]),
    "m": IntDistribution(0, 512),
    **dict.fromkeys(POWERS, IntDistribution(0, 8)),
    "stages": IntDistribution(1, 16),
    "split_k": IntDistribution(1, tiles.MAX_SPLIT_K, log=True),
}


class WrongResultError(HetConvError):
    """A tile that computes something else: it is never tried again."""


@dataclass(frozen=True)
class Trial:
    """A choice as tried: its seconds, or None and why it has none."""

    choice: Choice
    seconds: float | None
    why: str = ""


@dataclass(frozen=True)
class Found:
    """Result of a search.

    Attributes:
        choice: the fastest one.
        seconds: its own.
        heuristic_s: the heuristic tile's seconds; None where it did not run.
        trials: all of them, to go on from.
    """

    choice: Choice
    seconds: float
    heuristic_s: float | None
    trials: tuple[Trial, ...]


def space(works: Sequence[GemmShape], chip: Chip) -> dict[Tile, float]:
    """Lists tiles, with splits, that can compute all of a pass's products.

    They are those that are predicted fastest, at most `MAX_TILES`.

    Args:
        works: sizes of the products.
        chip: the GPU.

    Returns:
        The `tiles.estimated_seconds` of each tile.
    """
    longest = _longest(works, chip)
    space = list(tiles.search_space(longest, chip))
    found = [
        t
        for t in tiles.with_splits(space, longest, chip)
        if all(is_usable(t, w, chip) for w in works)
    ]
    by_work = [tiles.estimated_seconds(found, w, chip) for w in works]
    seconds: Numbers = np.sum(by_work, axis=0)
    order = np.argsort(seconds)[:MAX_TILES]
    return {found[i]: float(seconds[i]) for i in order}


def heuristic(works: Sequence[GemmShape], chip: Chip) -> Tile:
    """Returns `tiles.default_tile` of the longest of a pass's products."""
    return tiles.default_tile(_longest(works, chip), chip)


def _longest(works: Sequence[GemmShape], chip: Chip) -> GemmShape:
    return max(
        works,
        key=lambda w: _seconds(tiles.default_tile(w, chip), w, chip),
    )


def _seconds(tile: Tile, work: GemmShape, chip: Chip) -> float:
    return float(tiles.estimated_seconds([tile], work, chip)[0])


def search(
    costs: Mapping[Tile, float],
    first: Tile,
    evaluate: Callable[[Choice], float],
    *,
    trials: int = TRIALS,
    patience: int = MAX_TRIALS_WITHOUT_GAIN,
    known: Sequence[Trial] = (),
    obstacle: Callable[[Tile], str | None] = lambda _: None,
    enough: Callable[[], bool] = lambda: False,
) -> Found | None:
    """Searches the fastest tile.

    Args:
        costs: a rough cost of each tile, in any unit.
        first: the heuristic tile, tried first beside ATen; of equals it wins.
        evaluate: returns a choice's seconds, or raises what makes it a failed trial.
        trials: evaluations, at most.
        patience: how many evaluations in a row may be without a gain.
        known: earlier trials, which are not repeated.
        obstacle: why a tile is not to be evaluated, if it is not.
        enough: whether to stop early.

    Returns:
        The fastest choice that was measured; None if none ran.
    """
    study = _Study(
        {first: costs.get(first, min(costs.values(), default=1.0)), **costs}, known
    )
    study.enqueue(first, "aten")
    best, ran, idle = study.best, 0, 0
    while ran < trials and idle < patience and not enough() and study.unfinished:
        choice, tell = study.ask()
        if (
            choice not in (first, "aten")
            and (why := _against(choice, obstacle)) is not None
        ):
            tell(Trial(choice, None, why))
            continue
        tell(_tried(choice, evaluate))
        ran, idle = (
            ran + 1,
            0
            if study.best < MIN_GAIN_FACTOR * best or choice in (first, "aten")
            else idle + 1,
        )
        best = min(best, study.best)
    seconds = {t.choice: t.seconds for t in study.trials if t.seconds is not None}
    if not seconds:
        return None
    choice = min(seconds, key=lambda c: (seconds[c], c != first))
    return Found(choice, seconds[choice], seconds.get(first), tuple(study.trials))


def _against(choice: Choice, obstacle: Callable[[Tile], str | None]) -> str | None:
    assert choice != "aten"
    try:
        why = obstacle(choice)
    except Exception as e:
        return _failed(e)
    return None if why is None else f"pruned: {why}"


def _failed(e: Exception) -> str:
    return f"failed: {type(e).__name__}: {' '.join(str(e).split())}"[:200]


def _tried(choice: Choice, evaluate: Callable[[Choice], float]) -> Trial:
    try:
        return Trial(choice, evaluate(choice))
    except WrongResultError as e:
        return Trial(choice, None, f"wrong: {e}")
    except Exception as e:  # a launch that fails must not take the others with it
        return Trial(choice, None, _failed(e))


class _Study:
    """An Optuna study of choices, each of which is asked for once."""

    def __init__(self, costs: Mapping[Tile, float], known: Iterable[Trial]):
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._costs, self.trials, self._queue = costs, list(known), 0
        self._study = optuna.create_study(sampler=_Residuals(costs))
        for t in self.trials:
            fixed = _parameters(t.choice)
            kinds = {name: DIMENSIONS[name] for name in fixed}
            state = TrialState.COMPLETE if t.seconds is not None else TrialState.FAIL
            self._study.add_trial(
                create_trial(
                    state=state, value=t.seconds, params=fixed, distributions=kinds
                )
            )

    @property
    def best(self) -> float:
        return min(
            (t.seconds for t in self.trials if t.seconds is not None), default=inf
        )

    @property
    def unfinished(self) -> bool:
        return self._queue > 0 or not self._costs.keys() <= {
            t.choice for t in self.trials
        }

    def enqueue(self, *choices: Choice) -> None:
        for choice in choices:
            if all(t.choice != choice for t in self.trials):
                self._study.enqueue_trial(_parameters(choice))
                self._queue += 1

    def ask(self) -> tuple[Choice, Callable[[Trial], None]]:
        """What to try next, and what to call with its outcome."""
        asked = self._study.ask()
        self._queue = max(self._queue - 1, 0)
        choice = _choice(
            {name: asked._suggest(name, kind) for name, kind in DIMENSIONS.items()}
        )

        def tell(t: Trial) -> None:
            self._study.tell(
                asked,
                t.seconds,
                TrialState.COMPLETE if t.seconds is not None else TrialState.FAIL,
            )
            self.trials.append(t)

        return choice, tell


class _Residuals(optuna.samplers.BaseSampler):
    """The tile with the least seconds that can be hoped for.

    log(seconds) is log(cost) plus a Gaussian process over the logarithms of a tile's
    sizes, so that what the cost model gets wrong of one tile is expected of its
    neighbours too (GP-LCB: Srinivas et al., 2010).
    """

    def __init__(self, costs: Mapping[Tile, float]):
        self._tiles = list(costs)
        self._at = {t: i for i, t in enumerate(self._tiles)}
        self._expected: Numbers = np.log(np.array(list(costs.values())))
        where = np.array([_where(t) for t in self._tiles])
        apart = ((where[:, None] - where[None]) ** 2).sum(-1)
        self._alike = (
            MODEL_DEVIATION**2 * np.exp(-apart / (2 * LENGTH_SCALE**2)) + 1.0
        )  # 1: seconds in a unit of cost, almost unknown

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return DIMENSIONS

    def sample_relative(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        search_space: dict[str, BaseDistribution],
    ) -> dict[str, Any]:
        seen: dict[int, float | None] = {}
        for t in study.get_trials(
            deepcopy=False, states=(TrialState.COMPLETE, TrialState.FAIL)
        ):
            choice = _choice(t.params)
            if choice != "aten" and choice in self._at:
                seen[self._at[choice]] = t.value
        hoped = self._hoped({i: s for i, s in seen.items() if s is not None})
        hoped[list(seen)] = inf
        return _parameters(self._tiles[int(np.argmin(hoped))])

    def _hoped(self, seconds: Mapping[int, float]) -> Numbers:
        if not seconds:
            return self._expected.copy()
        known = list(seconds)
        across = self._alike[:, known]
        errors = np.log(np.array(list(seconds.values()))) - self._expected[known]
        unit = (
            errors.mean()
        )  # of the cost: centred, so that the wide prior around it is around nothing
        weights = np.linalg.solve(
            self._alike[np.ix_(known, known)] + NOISE_DEVIATION**2 * np.eye(len(known)),
            across.T,
        )
        variance = np.diagonal(self._alike) - (across * weights.T).sum(1)
        mean = self._expected + unit + weights.T @ (errors - unit)
        hoped: Numbers = mean - CONFIDENCE_DEVIATIONS * np.sqrt(
            np.maximum(variance, 0) + NOISE_DEVIATION**2
        )
        return hoped

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, name: str, kind: BaseDistribution
    ) -> Any:
        raise NotImplementedError("every parameter is sampled together with the others")


def _where(tile: Tile) -> tuple[float, ...]:
    sizes = (log2(v) for v in (tile.m, tile.n, tile.k, tile.split_k))
    return float(tile.kind == "tma"), *sizes, tile.stages / 2


def _parameters(choice: Choice) -> dict[str, Any]:
    """A choice as a study has it; ATen has no sizes."""
    if choice == "aten":
        return (
            {"kind": "aten"}
            | dict.fromkeys(("m", *POWERS), 0)
            | {
                "stages": 1,
                "split_k": 1,
            }
        )
    sizes: dict[str, Any] = {
        name: getattr(choice, name).bit_length() - 1 for name in POWERS
    }
    return {
        "kind": choice.kind,
        "m": choice.m,
        "stages": choice.stages,
        "split_k": choice.split_k,
    } | sizes


def _choice(parameters: Mapping[str, Any]) -> Choice:
    if parameters["kind"] == "aten":
        return "aten"
    sizes = {name: 1 << parameters[name] for name in POWERS}
    return Tile(
        parameters["kind"],
        m=parameters["m"],
        **sizes,
        stages=parameters["stages"],
        split_k=parameters["split_k"],
    )
