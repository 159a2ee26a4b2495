"""What a profile predicts of whole steps, beside what they take."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from scipy.stats import kendalltau
from torch import Tensor, nn

from hetconv.candidates import ALONE
from hetconv.emulate import stretched
from hetconv.graph import Graph
from hetconv.parallel import parallelize
from hetconv.plan import Mode
from hetconv.planner import make_plan
from hetconv.pricing import Pricer
from hetconv.profile import ClusterProfile
from hetconv.rules import Split
from hetconv.transport import team_of

from .measure import paired
from .race import step_of


@dataclass(frozen=True)
class Check:
    """Seconds of a step by plan: (predicted, measured)."""

    steps: Mapping[str, tuple[float, float]]

    @property
    def errors(self) -> list[float]:
        """Of the predictions, as parts of what was measured, in rising order."""
        return sorted(abs(predicted - measured) / measured for predicted, measured in self.steps.values())

    @property
    def figures(self) -> dict[str, float]:
        """Median and 90 % quantile of the errors, and Kendall's tau of the two orders, 1 if they are the same."""
        errors = self.errors
        ninetieth = quantiles(errors, n=10, method="inclusive")[-1] if len(errors) > 1 else errors[0]
        tau = kendalltau(*zip(*self.steps.values(), strict=True)).statistic
        return {"median error": median(errors), "p90 error": ninetieth, "tau": float(tau)}


def predicted_and_measured(
    model: nn.Module,
    x: Tensor,
    graph: Graph,
    profile: ClusterProfile,
    mode: Mode,
    plans: Mapping[str, Mapping[str, Split]],
    rounds: int,
) -> Check:
    """Collective: steps of a plain ``model`` under these splits, all in turn in every round.

    The splits of a device alone, by the name that `Candidates` gives them, run as the plain model on that rank.
    """
    plan, pricer, lone = (
        make_plan(graph, profile, mode=mode),
        Pricer(graph, profile, mode),
        Pricer(graph, profile.alone(), mode),
    )
    predicted: dict[str, float] = {}
    steps: dict[str, Callable[[], Any]] = {}
    for name, splits in plans.items():
        if name.startswith(ALONE):
            busy = lone.price(splits)[0].busy_s
            predicted[name] = max(busy)
            works = team_of().rank == busy.index(max(busy))
            steps[name] = _slowed(step_of(model, x, mode), x) if works else lambda: None
        else:
            predicted[name] = pricer.price(splits)[0].step_s
            steps[name] = step_of(parallelize(copy.deepcopy(model), plan.with_splits(splits)), x, mode)
    times = paired(steps, rounds, x.device)
    return Check({name: (predicted[name], median(times[name])) for name in plans})


def _slowed(step: Callable[[], None], x: Tensor) -> Callable[[], None]:
    """All of the plain model's step takes longer where ``x``'s device is emulated."""
    return lambda: stretched(step, x.device)
