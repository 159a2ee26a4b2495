"""Reports of what each rank's steps take beside what its plan predicts."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hetconv.comm.consensus import assert_consensus, validate_together
from hetconv.comm.rank_group import RankGroup, all_gather_object, all_gather_small
from hetconv.errors import HetConvError, PlanError, few
from hetconv.nn.parameters import required_group, split_layers
from hetconv.planner.plan_costs import EstimatedCosts
from hetconv.planner.rebalance import Factors, PlanCosts, best_plan
from hetconv.runtime.step_monitor import StepMonitor, event_marks
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import Plan
from hetconv.tracing.graph import Graph

log = logging.getLogger("hetconv")
WINDOW_STEPS = 100
SAME_FACTOR = 0.05
"""Devices whose slow-down differs by less from the last report have the gain of that report."""


@dataclass(frozen=True)
class StepReport:
    """What the last steps took on each rank, as medians.

    Attributes:
        steps: Steps that were made so far.
        step_s: Seconds of a step, by rank.
        busy_s: Seconds of it in which the rank computed, or copied messages.
        waited_s: Seconds of it in which the rank waited for others.
        predicted_busy_s: What the plan predicts of ``busy_s``; None without a plan.
        gain: Part of a step that the best split for these slow-downs is predicted to
            save; None if graph or profile were not given.
    """

    steps: int
    step_s: tuple[float, ...]
    busy_s: tuple[float, ...]
    waited_s: tuple[float, ...]
    predicted_busy_s: tuple[float, ...] | None = None
    gain: float | None = None

    @property
    def slowdowns(self) -> tuple[float, ...] | None:
        """How many times as long each rank computes as its plan predicts; 1 if it has no work."""
        if self.predicted_busy_s is None:
            return None
        pairs = zip(self.busy_s, self.predicted_busy_s, strict=True)
        return tuple(busy / planned if planned else 1.0 for busy, planned in pairs)

    def __str__(self) -> str:
        said = f"step {self.steps}: {max(self.step_s) * 1e3:.3g} ms; busy "
        said += ", ".join(
            f"rank {rank} {busy * 1e3:.3g} ms" for rank, busy in enumerate(self.busy_s)
        )
        if (slow := self.slowdowns) is not None:
            rank = max(range(len(slow)), key=slow.__getitem__)
            said += f"; rank {rank} takes {slow[rank]:.2f} times as long as planned"
        if self.gain is not None:
            said += f"; another split would save {self.gain:.0%} of a step"
        return said


class Monitor:
    """Measures the steps of a parallelized model; see `monitor`."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan | None = None,
        costs: PlanCosts[Plan] | None = None,
        log_every: int = 0,
    ):
        self.group = required_group(model)
        self.plan, self._costs, self._log_every = plan, costs, log_every
        self._contexts = {layer.context for layer in split_layers(model)} - {None}
        device = next(model.parameters()).device
        self._passes = StepMonitor(event_marks(device))
        self.steps = 0
        self._own: deque[tuple[float, float, float]] = deque(maxlen=WINDOW_STEPS)
        self._gain: tuple[Factors, float] | None = None
        self.start()

    def start(self) -> None:
        """Starts measuring, as a new monitor does."""
        for context in self._contexts:
            context.monitor = self._passes
        self.resume()

    def stop(self) -> None:
        """Stops measuring."""
        for context in self._contexts:
            context.monitor = None

    def resume(self) -> None:
        """Begins the next step now: what ran since the last one does not count.

        Call it after an evaluation, or when a checkpoint was written.
        """
        self._passes.discard()
        self._last_s = time.perf_counter()

    def step(self) -> StepReport | None:
        """Ends a step.

        Returns:
            A report after each ``log_every`` steps, which are collective; else None.
        """
        times, now_s = self._passes.take(), time.perf_counter()
        step_s, self._last_s = now_s - self._last_s, now_s
        self.steps += 1
        self._own.append((step_s, *times))
        if not self._log_every or self.steps % self._log_every:
            return None
        report = self.report()
        if self.group.rank == 0:
            log.info("%s", report)
        return report

    def last(self, steps: int) -> Tensor:
        """Returns seconds of steps, of their busy part and of their waits: (steps, 3)."""
        return torch.tensor(
            list(self._own)[-steps:], dtype=torch.float64, device="cpu"
        ).reshape(-1, 3)

    def forget(self) -> None:
        """Drops what was measured, and begins the next step now."""
        self._own.clear()
        self.resume()

    def report(self) -> StepReport:
        """Returns what the last steps took on all ranks; collective."""
        group = self.group
        assert_consensus(group, "Monitor.report", f"step {self.steps}")
        own = self.last(WINDOW_STEPS)
        medians = own.median(0).values if len(own) else own.new_zeros(3)
        seconds = all_gather_small(group, medians).t().tolist()
        step_s, busy_s, waited_s = map(tuple, seconds)
        told = self.plan.predicted if self.plan is not None else None
        predicted = told.busy_s if told is not None else None
        report = StepReport(self.steps, step_s, busy_s, waited_s, predicted)
        if self._costs is None or not len(own):
            return report
        gain = self._gain_of(report.slowdowns) if group.rank == 0 else None
        return replace(report, gain=all_gather_object(group, gain)[0])

    def _gain_of(self, slowdowns: Factors | None) -> float | None:
        if slowdowns is None or self._costs is None or self.plan is None:
            return None
        if self._gain is not None and all(
            abs(now / then - 1) < SAME_FACTOR
            for now, then in zip(slowdowns, self._gain[0], strict=True)
        ):
            return self._gain[1]
        _, gain = best_plan(self._costs, self.plan, slowdowns)
        self._gain = slowdowns, gain
        return gain


def monitor(
    model: nn.Module,
    plan: Plan | None = None,
    *,
    graph: Graph | None = None,
    profile: ClusterProfile | None = None,
    log_every: int = 0,
) -> Monitor:
    """Measures how long each rank computes, and waits for others; collective.

    Call its `step` after each step. On GPUs, times come from events on their streams,
    and nothing waits for them. What runs outside of the model's forward and backward
    passes, such as a data loader, counts as neither.

    Args:
        model: The parallelized model.
        plan: The plan that it was parallelized with, whose predictions are then told
            beside the measured seconds.
        graph: The plain model, as `capture` returned it. With the profile, reports tell
            what another split would save.
        profile: Devices and links, as they were measured.
        log_every: Steps after which rank 0 logs a line; 0 for never.

    Returns:
        The monitor. Its `report` returns a `StepReport`, on all ranks.

    Raises:
        HetConvError: On every rank, if the model is not parallelized, captures its steps
            in CUDA graphs, or an argument does not fit.
        PlanError: On every rank, if plan or profile are for another number of ranks.

    Examples:
        >>> monitor = hetconv.monitor(model, plan, log_every=100)
        >>> for x, y in loader:
        ...     train_step(x, y)
        ...     monitor.step()
        >>> monitor.report().waited_s
        (0.0012, 0.0305)
    """
    group = required_group(model)

    def check() -> None:
        check_ranks(group, plan, profile)
        check_monitored(model, log_every)
        if (graph is None) != (profile is None) or (graph is not None and plan is None):
            raise HetConvError(
                "the gain of another split is predicted from a plan, a graph and a profile; "
                "give all of them, or neither graph nor profile"
            )
        if graph is not None and plan is not None:
            check_graph(graph, plan)

    validate_together(group, "monitor", check, lambda _: f"log_every {log_every}")
    costs = None
    if graph is not None and profile is not None and plan is not None:
        costs = EstimatedCosts(graph, profile, plan.mode)
    return Monitor(model, plan, costs, log_every)


def check_graph(graph: Graph, plan: Plan) -> None:
    """Raises `PlanError` unless a plan is one for the layers of a graph."""
    if not isinstance(graph, Graph):
        raise PlanError(
            f"graph is a {type(graph).__name__}; give what hetconv.capture(model, inputs) returns"
        )
    if unknown := set(plan.splits) - set(graph.layers):
        raise PlanError(
            f"the plan splits {few(sorted(unknown))}, which the graph does not have; capture "
            "the model that the plan was made for"
        )


def check_ranks(
    group: RankGroup, plan: Plan | None, profile: ClusterProfile | None
) -> None:
    """Raises `PlanError` unless plan and profile are for the ranks of a group."""
    for given, expected in ((plan, Plan), (profile, ClusterProfile)):
        if given is not None and not isinstance(given, expected):
            raise PlanError(
                f"a {type(given).__name__} was given in place of a {expected.__name__}; read "
                f"one with hetconv.{expected.__name__}.load(file)"
            )
    if plan is not None and plan.world != group.size:
        raise PlanError(
            f"the plan is for {plan.world} ranks, but the model is on {group.size}; give the "
            "one that it was parallelized with"
        )
    if profile is not None and profile.world != group.size:
        raise PlanError(
            f"the profile has {profile.world} devices, but the model is on {group.size} "
            "ranks; give the one that the plan was made from"
        )


def check_monitored(model: nn.Module, log_every: int) -> None:
    """Raises `HetConvError` if a model's passes cannot be measured, or not told so often."""
    if log_every < 0:
        raise HetConvError(
            f"log_every is {log_every}; give the steps between two lines, or 0 for none"
        )
    if any(
        layer.context is not None and layer.context.captures_steps
        for layer in split_layers(model)
    ):
        raise HetConvError(
            "the steps of this model are captured in CUDA graphs, within which waits cannot "
            "be measured; parallelize it with graphs=False"
        )
