"""The class `Rebalancer`, which changes the plan of a model when devices change their speed."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hetconv.comm.consensus import assert_consensus
from hetconv.comm.rank_group import RankGroup, all_gather_object, all_gather_small
from hetconv.errors import PlanError
from hetconv.nn.parameters import required_group, split_layers
from hetconv.planner.plan_costs import EstimatedCosts
from hetconv.planner.rebalance import (
    STEPS_PER_CHECK,
    Decision,
    Reading,
    RebalanceController,
    RebalancePolicy,
)
from hetconv.runtime.step_monitor import StepMonitor
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import Plan
from hetconv.tracing.graph import Graph

from .migrate import apply_plan

log = logging.getLogger("hetconv")
WARM_UP_STEPS = 2
"""Steps after a change of plan that are not counted: caches are filled anew in them."""


class Rebalancer:
    """Changes the plan of a parallelized model while it trains, or infers.

    Call `step` after each step of training, that is after ``optimizer.step()``. Every
    few steps ranks exchange what they measured, and rank 0 decides whether another
    plan would be faster.

    Args:
        model: The parallelized model.
        optimizer: Its optimizer; None for inference.
        plan: The plan that the model was parallelized with.
        graph: The plain model, as `capture` returned it.
        profile: Devices and links, as they were measured.
        policy: When a change of plan is worth it.
        dry_run: Whether decisions are only told, and nothing moves.
        record: File to which rank 0 appends a line of JSON for each decision.
        on_decision: Called on every rank with each decision, before it is acted on.

    Attributes:
        plan: The plan in use, or with ``dry_run`` the one that would be.

    Raises:
        PlanError: The plan or the profile is for another number of ranks.
        HetConvError: The model is not parallelized.

    Example:
        >>> graph = hetconv.capture(model, x)
        >>> plan = hetconv.make_plan(graph, profile)
        >>> model = hetconv.parallelize(model, plan)
        >>> rebalancer = hetconv.Rebalancer(model, optimizer, plan, graph, profile)
        >>> for x, y in loader:
        ...     optimizer.zero_grad()
        ...     loss(model(x), y).backward()
        ...     optimizer.step()
        ...     rebalancer.step()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        plan: Plan,
        graph: Graph,
        profile: ClusterProfile,
        *,
        policy: RebalancePolicy | None = None,
        dry_run: bool = False,
        record: str | Path | None = None,
        on_decision: Callable[[Decision[Plan]], None] | None = None,
    ):
        self._model, self._optimizer = model, optimizer
        self._group = _checked_group(model, plan, profile)
        self._dry_run, self._record, self._on_decision = dry_run, record, on_decision
        self.plan = plan
        self._controller: RebalanceController[Plan] | None = None
        if self._group.rank == 0:
            sizes = _itemsize(model), _moved_tensors(optimizer)
            costs = EstimatedCosts(graph, profile, plan.mode, *sizes)
            policy = policy or RebalancePolicy()
            self._controller = RebalanceController(costs, plan, policy)
        self._monitor = StepMonitor()
        for layer in split_layers(model):
            if layer.context is not None:
                layer.context.monitor = self._monitor
        self._own: list[tuple[float, float]] = []
        self._steps, self._warm_up = 0, WARM_UP_STEPS
        self._last_s = time.perf_counter()

    def step(self) -> Decision[Plan] | None:
        """Ends a step; collective.

        Returns:
            The decision that was taken after this step, if there was one.
        """
        busy_s, now_s = self._monitor.take().busy_s, time.perf_counter()
        step_s, self._last_s = now_s - self._last_s, now_s
        self._steps += 1
        if self._warm_up:
            self._warm_up -= 1
            return None
        self._own.append((step_s, busy_s))
        if len(self._own) < STEPS_PER_CHECK:
            return None
        decision = self._decide()
        if decision is not None:
            self._act(decision)
        return decision

    def _decide(self) -> Decision[Plan] | None:
        """Exchanges what ranks measured, and returns rank 0's decision; collective."""
        group = self._group
        assert_consensus(group, "Rebalancer.step", f"step {self._steps}")
        own = torch.tensor(self._own, dtype=torch.float64, device="cpu")
        self._own = []
        decision = self._observed(all_gather_small(group, own))
        decided = torch.tensor([decision is not None], device="cpu")
        if not bool(all_gather_small(group, decided)[0]):
            return None
        return all_gather_object(group, decision)[0]

    def _observed(self, every: Tensor) -> Decision[Plan] | None:
        """Returns rank 0's decision; None on other ranks.

        Args:
            every: Seconds of each step and of its busy part, (P, steps, 2).
        """
        if self._controller is None:
            return None
        decision = None
        for of_ranks in every.unbind(1):
            step_s, busy_s = of_ranks.t().tolist()
            found = self._controller.observe(Reading(step_s[0], tuple(busy_s)))
            decision = found or decision
        return decision

    def _act(self, decision: Decision[Plan]) -> None:
        """Tells a decision, and changes the plan unless nothing may move; collective."""
        self.plan = decision.plan
        if self._on_decision is not None:
            self._on_decision(decision)
        start_s = time.perf_counter()
        if not self._dry_run:
            apply_plan(self._model, self._optimizer, decision.plan)
            self._warm_up = WARM_UP_STEPS
        took_s = time.perf_counter() - start_s
        self._last_s = time.perf_counter()
        self._monitor.take()
        if self._group.rank == 0:
            log.info(
                "%s after step %d: %s", decision.action, self._steps, decision.reason
            )
            self._append(decision, took_s)

    def _append(self, decision: Decision[Plan], took_s: float) -> None:
        if self._record is None:
            return
        line: dict[str, Any] = {
            "step": self._steps,
            "action": decision.action,
            "dry_run": self._dry_run,
            "reason": decision.reason,
            "factors": decision.factors,
            "step_s": decision.step_s,
            "predicted_step_s": decision.predicted_step_s,
            "predicted_migration_s": decision.migration_s,
            "migration_s": took_s,
        }
        with open(self._record, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _checked_group(model: nn.Module, plan: Plan, profile: ClusterProfile) -> RankGroup:
    group = required_group(model)
    if not plan.world == profile.world == group.size:
        raise PlanError(
            f"the plan is for {plan.world} ranks and the profile has {profile.world} devices, "
            f"but the model is on {group.size} ranks; give those that it was parallelized with"
        )
    return group


def _itemsize(model: nn.Module) -> int:
    return max(p.element_size() for p in model.parameters())


def _moved_tensors(optimizer: Optimizer | None) -> int:
    """Returns the tensors of a parameter's shape that move with it, itself among them."""
    if optimizer is None:
        return 1
    kept = (
        sum(isinstance(x, Tensor) and x.dim() > 0 for x in state.values())
        for state in optimizer.state.values()
    )
    return 2 + max(kept, default=2)
