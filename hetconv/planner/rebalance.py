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
Action = Literal["move", "revert"]
# Standard deviation of normal noise over its median absolute deviation, and of the
# median of many samples over that of their mean.
SIGMA_PER_DEVIATION, MEDIAN_ERROR = 1.4826, 1.2533
STEPS_PER_CHECK = 5


class PlanCosts(Protocol[P]):
    """What plans of one model cost on devices that may be slower than measured.

    A factor says how many times as long a device takes as its profile says.
    """

    def busy_s(self, plan: P) -> Sequence[float]:
        """Returns the seconds of a step that each device is busy, at factors of 1."""

    def step_s(self, plan: P, factors: Factors) -> float:
        """Returns the seconds of a step."""

    def plan_for(self, current: P, factors: Factors) -> P:
        """Returns the plan that is fastest at these factors, or ``current``."""

    def migration_s(self, current: P, new: P) -> float:
        """Returns the seconds that it takes to change from one plan to another."""


class Reading(NamedTuple):
    """What was measured in one step.

    Attributes:
        step_s: Seconds of the step.
        busy_s: Seconds in which each device did not wait for others.
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
        min_relative_gain: Part of a step that a change must at least save.
        significance: Standard errors by which a device must differ from the factor that
            the current plan was made for.
    """

    window_steps: int = 20
    horizon_steps: int = 500
    dwell_steps: int = 20
    min_relative_gain: float = 0.05
    significance: float = 5.0


@dataclass(frozen=True)
class Decision(Generic[P]):
    """Decision to change the plan.

    Attributes:
        action: "move" to another plan, or "revert" to the one before, which was faster.
        plan: The new plan.
        factors: How many times as long each device takes as its profile says.
        step_s: Median seconds of the last steps.
        predicted_step_s: Seconds that are expected of a step from now on.
        migration_s: Predicted seconds of the change.
        reason: The decision in words.
    """

    action: Action
    plan: P
    factors: Factors
    step_s: float
    predicted_step_s: float
    migration_s: float
    reason: str


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

    Attributes:
        plan: The plan in use, after the decisions so far.
        factors: Those that the plan was made for.
    """

    def __init__(self, costs: PlanCosts[P], plan: P, policy: RebalancePolicy):
        self._costs, self._policy = costs, policy
        self.plan, self._busy_s = plan, np.array(costs.busy_s(plan))
        self.factors: Factors = (1.0,) * len(self._busy_s)
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
            before, self._before = self._before, None
            if self._lost(before):
                return self._reverted(before)
        if self._resting_steps:
            return None
        return self._moved()

    def _moved(self) -> Decision[P] | None:
        """Returns the decision for a better plan, if there is one that pays."""
        factors = self._measured_factors()
        if factors == self.factors:
            return None
        plan = self._costs.plan_for(self.plan, factors)
        if plan == self.plan:
            return None
        now_s, then_s = (self._costs.step_s(p, factors) for p in (self.plan, plan))
        migration_s = self._costs.migration_s(self.plan, plan)
        step_s = self._step_s()
        gain = 1 - then_s / now_s
        saved_s = gain * step_s * self._policy.horizon_steps
        if gain < self._policy.min_relative_gain or saved_s < 2 * migration_s:
            return None
        decision = Decision(
            "move",
            plan,
            factors,
            step_s,
            step_s * (1 - gain),
            migration_s,
            f"{_described(factors)}; another split is predicted to save {gain:.0%} of a "
            f"step of {step_s * 1e3:.3g} ms",
        )
        self._before = _Before(self.plan, tuple(self._window))
        self._change(plan, factors)
        return decision

    def _lost(self, before: _Before[P]) -> bool:
        """Returns whether steps are significantly slower than before the last move."""
        old, new = (
            np.array([reading.step_s for reading in window])
            for window in (before.window, self._window)
        )
        error_s = hypot(_standard_error(old), _standard_error(new))
        slower_s = float(np.median(new) - np.median(old))
        return slower_s > self._policy.significance * error_s

    def _reverted(self, before: _Before[P]) -> Decision[P]:
        """Returns to the plan before the last move, and rests longer from now on."""
        old_s = median(r.step_s for r in before.window)
        step_s = self._step_s()
        decision = Decision(
            "revert",
            before.plan,
            self.factors,
            step_s,
            old_s,
            self._costs.migration_s(self.plan, before.plan),
            f"steps take {step_s * 1e3:.3g} ms since the last change, and took "
            f"{old_s * 1e3:.3g} ms before it",
        )
        self._dwell_steps *= 2
        # The factors stay: what was measured then is no reason to move once more.
        self._change(before.plan, self.factors)
        return decision

    def _change(self, plan: P, factors: Factors) -> None:
        self.plan, self._busy_s = plan, np.array(self._costs.busy_s(plan))
        self.factors = factors
        self._window.clear()
        self._resting_steps = self._dwell_steps

    def _step_s(self) -> float:
        return median(r.step_s for r in self._window)

    def _measured_factors(self) -> Factors:
        """Returns the factor of each device: the current one unless it surely differs."""
        busy_s = np.array([reading.busy_s for reading in self._window])
        # A device without work tells nothing of its speed.
        works = self._busy_s > 0
        ratios = busy_s / np.where(works, self._busy_s, 1.0)
        middle, current = np.median(ratios, axis=0), np.array(self.factors)
        middle = np.where(works, middle, 1.0)
        error = _standard_error(ratios)
        # Of many devices some seem steady by chance: none counts as steadier than most.
        typical = np.median((error / middle)[works]) * middle
        error = self._policy.significance * np.maximum(error, typical)
        differs = works & (abs(middle - current) > error)
        return tuple(np.where(differs, middle, current).tolist())


class _Before(NamedTuple, Generic[P]):
    """What was in use, and what was measured, before a move."""

    plan: P
    window: tuple[Reading, ...]


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
