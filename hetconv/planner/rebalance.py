"""Decides while a model runs whether another split would be faster.

The controller gets, after each step, the seconds that every device was busy. It knows no
clock, no rank and no model, so the same code runs on a cluster and in a simulation: what
plans cost comes from a `PlanCosts`, such as the planner's own estimates.

Source: Tavarageri et al., Automatic Model Parallelism for Deep Neural Networks with
Compiler and Hardware Support, 2019, for the adjustment at run time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot, sqrt
from statistics import median
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

P = TypeVar("P")
Factors = tuple[float, ...]
Action = Literal["move", "keep", "revert"]
# Standard deviation of normal noise over its median absolute deviation, and of the
# median of many samples over that of their mean.
SIGMA_PER_DEVIATION, MEDIAN_ERROR = 1.4826, 1.2533
STEPS_PER_CHECK = 5
PREDICTION_ERROR = 0.3
"""By which a device may take longer than the fastest one, relative to what was predicted,
in the first steps of a plan without counting as slower: predictions err.
"""


class PlanCosts(Protocol[P]):
    """What plans of one model cost on devices that may be slower than measured.

    A factor says how many times as long a device takes as its profile says.
    """

    def busy_s(self, plan: P) -> Sequence[float]:
        """Returns the seconds of a step that each device is busy, at factors of 1.

        It is 0 for a device that has too little work to tell its speed.
        """

    def gain(self, current: P, new: P, factors: Factors) -> float:
        """Returns the part of a step that another plan saves."""

    def plan_for(self, current: P, factors: Factors) -> P:
        """Returns the plan that is fastest at these factors, or ``current``."""

    def migration_s(self, current: P, new: P) -> float:
        """Returns the seconds that it takes to change from one plan to another."""


class Reading(NamedTuple):
    """What was measured in one step.

    Attributes:
        step_s: Seconds of the step.
        busy_s: Seconds in which each device did not wait for others. Of a device with
            little work, how many times as long it takes for something else than at
            first; 0 if that is not known.
    """

    step_s: float
    busy_s: tuple[float, ...]


@dataclass(frozen=True)
class RebalancePolicy:
    """When a change of plan is worth it.

    Attributes:
        window_steps: Steps whose medians count.
        horizon_steps: Steps within which a change must pay for its migration twice.
        dwell_steps: Steps after a change in which nothing changes. It doubles after each
            change that made steps slower.
        min_relative_gain: Part of a step that a change must at least save, unless all
            devices are as fast as at first again. Devices whose factors change by less
            are not looked at, since no change could save as much.
        significance: Standard errors by which a device must differ from the factor that
            was looked at last.
        loss_significance: Standard errors by which steps must be slower after a change
            for it to be reverted.
    """

    window_steps: int = 20
    horizon_steps: int = 500
    dwell_steps: int = 20
    min_relative_gain: float = 0.15
    significance: float = 5.0
    loss_significance: float = 2.0


@dataclass(frozen=True)
class Decision(Generic[P]):
    """Decision about the plan.

    Attributes:
        action: "move" to another plan; later either "keep" it, or "revert" to the one
            before, which was faster.
        plan: The plan from now on.
        factors: How many times as long each device takes as its profile says.
        step_s: Median seconds of the last steps.
        predicted_step_s: Seconds that are expected of a step from now on.
        migration_s: Predicted seconds of the change.
        measured_gain: Part of a step that the last change saved; None for a "move".
        reason: The decision in words.
    """

    action: Action
    plan: P
    factors: Factors
    step_s: float
    predicted_step_s: float
    migration_s: float
    measured_gain: float | None
    reason: str


def best_plan(costs: PlanCosts[P], current: P, factors: Factors) -> tuple[P, float]:
    """Returns the fastest plan at these factors, and the part of a step that it saves."""
    plan = costs.plan_for(current, factors)
    return plan, costs.gain(current, plan, factors)


class RebalanceController(Generic[P]):
    """Chooses when to change the plan, from what each step measured.

    Noise causes no change: a device counts as slower, or as recovered, when the median
    of its last steps differs significantly from what the current plan was made for.
    After each change the steps are compared with those before, and a change that lost is
    reverted.

    Args:
        costs: What plans cost.
        plan: The plan in use.
        policy: When a change is worth it.
        dry_run: Whether decisions are only told, and the plan stays.

    Attributes:
        plan: The plan in use, after the decisions so far.
        factors: Those for which it was last asked whether another plan is faster.
        gain: Part of a step that another plan was predicted to save then.
    """

    def __init__(
        self,
        costs: PlanCosts[P],
        plan: P,
        policy: RebalancePolicy,
        *,
        dry_run: bool = False,
    ):
        self._costs, self._policy, self._dry_run = costs, policy, dry_run
        self.plan, self._busy_s = plan, np.array(costs.busy_s(plan))
        self.factors: Factors = (1.0,) * len(self._busy_s)
        self._predicted: NDArray[np.float64] | None = None
        self._calibrations: dict[tuple[bool, ...], NDArray[np.float64]] = {}
        self.gain = 0.0
        self._window: deque[Reading] = deque(maxlen=policy.window_steps)
        self._dwell_steps, self._resting_steps = policy.dwell_steps, 0
        self._steps = 0
        self._before: _Before[P] | None = None

    def observe(self, reading: Reading) -> Decision[P] | None:
        """Takes the measurement of one step.

        Args:
            reading: What was measured, the same on all ranks.

        Returns:
            The decision to change the plan before the next step, or None.
        """
        self._window.append(reading)
        self._steps += 1
        self._resting_steps = max(self._resting_steps - 1, 0)
        is_full = len(self._window) == self._policy.window_steps
        if not is_full or self._steps % STEPS_PER_CHECK:
            return None
        if self._before is not None:
            return self._judged(self._before)
        if self._resting_steps:
            return None
        factors = self._measured_factors()
        return None if factors == self.factors else self._moved(factors)

    def _moved(self, factors: Factors) -> Decision[P] | None:
        """Returns the decision for a better plan, if there is one that pays."""
        self.factors, self._resting_steps = factors, self._dwell_steps
        plan, gain = best_plan(self._costs, self.plan, factors)
        self.gain = gain
        migration_s = self._costs.migration_s(self.plan, plan)
        step_s = self._step_s()
        saved_s = gain * step_s * self._policy.horizon_steps
        # Back to where all began, any gain is welcome: the first plan was measured.
        least = self._policy.min_relative_gain if any(f != 1 for f in factors) else 0.0
        if gain <= least or saved_s < 2 * migration_s:
            return None
        decision = Decision(
            "move",
            plan,
            factors,
            step_s,
            step_s * (1 - gain),
            migration_s,
            None,
            f"{_described(factors)}; another split is predicted to save {gain:.0%} of a "
            f"step of {step_s * 1e3:.3g} ms",
        )
        if not self._dry_run:
            self._before = _Before(self.plan, tuple(self._window), decision)
            self._change(plan)
        return decision

    def _judged(self, before: _Before[P]) -> Decision[P]:
        """Returns whether the last move stays, from what was measured since."""
        self._before = None
        lost = self._lost(before)
        if lost:
            # What was measured before the move is no reason to make it once more.
            self._dwell_steps *= 2
        old_s, step_s = before.decision.step_s, self._step_s()
        said = (
            f"steps take {step_s * 1e3:.3g} ms since the last change, and took "
            f"{old_s * 1e3:.3g} ms before it; {before.decision.predicted_step_s * 1e3:.3g} ms "
            "were predicted"
        )
        decision = Decision(
            "revert" if lost else "keep",
            before.plan if lost else self.plan,
            self.factors,
            step_s,
            old_s if lost else before.decision.predicted_step_s,
            self._costs.migration_s(self.plan, before.plan) if lost else 0.0,
            1 - step_s / old_s,
            said,
        )
        if lost:
            self._change(before.plan)
        return decision

    def _lost(self, before: _Before[P]) -> bool:
        """Returns whether steps are significantly slower than before the last move."""
        old, new = (
            np.array([reading.step_s for reading in window])
            for window in (before.window, self._window)
        )
        error_s = hypot(_standard_error(old), _standard_error(new))
        slower_s = float(np.median(new) - np.median(old))
        return slower_s > self._policy.loss_significance * error_s

    def _change(self, plan: P) -> None:
        self.plan, self._busy_s = plan, np.array(self._costs.busy_s(plan))
        self.gain = 0.0
        self._window.clear()
        self._resting_steps = self._dwell_steps

    def _step_s(self) -> float:
        return median(r.step_s for r in self._window)

    def _measured_factors(self) -> Factors:
        """Returns the factor of each device: that of the last look unless it surely differs."""
        ratios = self._ratios() / self._calibration()
        middle, current = np.median(ratios, axis=0), np.array(self.factors)
        known = middle > 0
        middle = np.where(known, middle, 1.0)
        error = _standard_error(ratios)
        # Of many devices some seem steady by chance: none counts as steadier than most.
        typical = np.median((error / middle)[known]) * middle
        # What it is compared with was measured over as many steps: both err.
        error = self._policy.significance * sqrt(2) * np.maximum(error, typical)
        least = self._policy.min_relative_gain * current
        # The window may have begun before the change.
        recent = np.median(ratios[len(ratios) // 2 :], axis=0)
        differs = (
            known
            & (abs(middle - current) > np.maximum(error, least))
            & (abs(recent - current) > least)
        )
        # Predictions err for other shares than the first ones. Under the first plan it is
        # seen again how fast a device that has nearly recovered really is.
        is_near_first = (abs(current - 1) <= PREDICTION_ERROR).all()
        tolerance = (
            self._policy.min_relative_gain if is_near_first else PREDICTION_ERROR
        )
        recent = np.where(abs(recent - 1) <= tolerance, 1.0, recent)
        return tuple(np.where(differs, recent, current).tolist())

    def _ratios(self) -> NDArray[np.float64]:
        """Returns measured over predicted busy seconds, (steps, P)."""
        busy_s = np.array([reading.busy_s for reading in self._window])
        return busy_s / np.where(self._busy_s > 0, self._busy_s, 1.0)

    def _calibration(self) -> NDArray[np.float64]:
        """Returns the ratios that devices have, at factors of 1, under the current plan.

        How predictions err depends on which devices work, so the first window with these
        tells it.
        """
        works = self._busy_s > 0
        key = tuple(works.tolist())
        if key not in self._calibrations:
            middle = np.median(self._ratios(), axis=0)
            self._calibrations[key] = (
                self._first_calibration(works, middle)
                if self._predicted is None
                else self._next_calibration(works, middle, self._predicted)
            )
        return self._calibrations[key]

    def _first_calibration(
        self, works: NDArray[np.bool_], middle: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Returns the part of the very first ratios that counts as error of prediction.

        A device with little work is taken for as fast as its profile says.
        """
        common = float(middle[works].min()) if works.any() else 1.0
        errs = works & (middle <= common * (1 + PREDICTION_ERROR))
        self._predicted = np.where(errs, middle, common)
        return np.where(works | (middle == 0), self._predicted, middle)

    def _next_calibration(
        self,
        works: NDArray[np.bool_],
        middle: NDArray[np.float64],
        predicted: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """Returns the calibration when other devices work than before.

        Each is as fast as when this was decided, unless it differs by more than
        predictions err.
        """
        expected = np.where(works, predicted, 1.0)
        found = middle / np.array(self.factors)
        error, most = found / expected, 1 + PREDICTION_ERROR
        errs = (1 / most <= error) & (error <= most)
        return np.where(errs, found, expected)


class _Before(NamedTuple, Generic[P]):
    """What was in use, and what was measured, before a move, which is the decision."""

    plan: P
    window: tuple[Reading, ...]
    decision: Decision[P]


def _standard_error(samples: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the standard error of the medians, from the samples' absolute deviations.

    Args:
        samples: (steps,) or (steps, P).

    Returns:
        One error, or (P,).
    """
    deviation = np.median(abs(samples - np.median(samples, axis=0)), axis=0)
    error: NDArray[np.float64] = (
        MEDIAN_ERROR * SIGMA_PER_DEVIATION * deviation / sqrt(len(samples))
    )
    return error


def _described(factors: Factors) -> str:
    """Describes the device that is slowed the most."""
    slowest = max(range(len(factors)), key=factors.__getitem__)
    return (
        f"rank {slowest} takes {factors[slowest]:.2f} times as long as its profile says"
    )
