"""The class `Rebalancer`, which changes the plan of a model when devices change their speed."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hetconv.comm.consensus import assert_consensus, validate_together
from hetconv.comm.rank_group import all_gather_object, all_gather_small, count_sent
from hetconv.errors import HetConvError
from hetconv.nn.parameters import required_group
from hetconv.planner.plan_costs import EstimatedCosts, has_little_work
from hetconv.planner.rebalance import (
    STEPS_PER_CHECK,
    Decision,
    Reading,
    RebalanceController,
    RebalancePolicy,
)
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.output_file import check_output
from hetconv.schemas.plan import Plan
from hetconv.tracing.graph import Graph

from .migrate import apply_plan
from .speed_probe import SpeedProbe
from .step_reports import Monitor, check_graph, check_monitored, check_ranks

log = logging.getLogger("hetconv")
WARM_UP_STEPS = 2
"""Steps after a change of plan that are not counted: caches are filled anew in them."""


class Rebalancer:
    """Changes the plan of a parallelized model while it trains, or infers.

    Call `step` after each step of training, that is after ``optimizer.step()``. Every
    few steps ranks exchange what they measured, and rank 0 decides whether another
    plan would be faster. After a change it compares the steps with those before, and
    goes back if they have become slower.

    Args:
        model: The parallelized model.
        optimizer: Its optimizer; None for inference.
        plan: The plan that the model was parallelized with.
        graph: The plain model, as `capture` returned it.
        profile: Devices and links, as they were measured.
        copies: Copies of the model that change with it; see `apply_plan`.
        policy: When a change of plan is worth it.
        dry_run: Whether decisions are only told, and nothing moves.
        log_every: Steps after which rank 0 logs a `StepReport`; 0 for never.
        record: File to which rank 0 appends a line of JSON for each decision.
        on_decision: Called on every rank with each decision, before it is acted on.

    Attributes:
        monitor: Measures the steps; its `report` tells what ranks take.

    Raises:
        PlanError: On every rank, if the plan or the profile is for another number of
            ranks.
        HetConvError: On every rank, if the model is not parallelized, captures its steps
            in CUDA graphs, or has replicas, which would decide each for itself.

    Examples:
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
        copies: Sequence[nn.Module] = (),
        policy: RebalancePolicy | None = None,
        dry_run: bool = False,
        log_every: int = 0,
        record: str | Path | None = None,
        on_decision: Callable[[Decision[Plan]], None] | None = None,
    ):
        self._group = group = required_group(model)

        def check() -> None:
            check_ranks(group, plan, profile)
            check_graph(graph, plan)
            check_monitored(model, log_every)
            _check_replicas(model)
            _check_optimizer(model, optimizer, copies)
            if record is not None and group.rank == 0:
                check_output(record)

        validate_together(group, "Rebalancer", check, lambda _: f"plan {plan.digest}")
        self._model, self._optimizer, self._copies = model, optimizer, copies
        self._dry_run, self._record, self._on_decision = dry_run, record, on_decision
        self._controller: RebalanceController[Plan] | None = None
        policy = policy or RebalancePolicy()
        if group.rank == 0:
            costs = EstimatedCosts(
                graph,
                profile,
                plan.mode,
                _itemsize(model),
                _moved_tensors(optimizer),
                policy.horizon_steps,
            )
            self._controller = RebalanceController(costs, plan, policy, dry_run=dry_run)
        told = EstimatedCosts(graph, profile, plan.mode) if log_every else None
        self.monitor = Monitor(model, plan, told, log_every)
        self._unread, self._warm_up = 0, WARM_UP_STEPS
        self._probe = SpeedProbe(group, next(model.parameters()).device)

    @property
    def plan(self) -> Plan:
        """The plan in use."""
        assert self.monitor.plan is not None
        return self.monitor.plan

    def step(self) -> Decision[Plan] | None:
        """Ends a step; collective.

        Returns:
            The decision that was taken after this step, if there was one.
        """
        self.monitor.step()
        if self._warm_up:
            self._warm_up -= 1
            return None
        self._unread += 1
        if self._unread < STEPS_PER_CHECK:
            return None
        decision = self._decide()
        if decision is not None:
            self._act(decision)
        return decision

    def _decide(self) -> Decision[Plan] | None:
        """Exchanges what ranks measured, and returns rank 0's decision; collective."""
        group = self._group
        assert_consensus(group, "Rebalancer.step", f"step {self.monitor.steps}")
        own, self._unread = self.monitor.last(self._unread), 0
        if has_little_work(self.plan, group.rank):
            own[:, 1] = self._probe.slowdown()
        decision = self._observed(all_gather_small(group, own))
        decided = torch.tensor([decision is not None], device="cpu")
        if not bool(all_gather_small(group, decided)[0]):
            return None
        return all_gather_object(group, decision)[0]

    def _observed(self, every: Tensor) -> Decision[Plan] | None:
        """Returns rank 0's decision; None on other ranks.

        Args:
            every: Seconds of each step, of its busy part and of its waits, (P, steps, 3).
        """
        if self._controller is None:
            return None
        decision = None
        for of_ranks in every.unbind(1):
            step_s, busy_s, _ = of_ranks.t().tolist()
            # A rank with little work may end its step before the others.
            found = self._controller.observe(Reading(max(step_s), tuple(busy_s)))
            decision = found or decision
        return decision

    def _act(self, decision: Decision[Plan]) -> None:
        """Tells a decision, and changes the plan unless nothing may move; collective."""
        if self._on_decision is not None:
            self._on_decision(decision)
        start_s = time.perf_counter()
        sent = 0
        if not self._dry_run and decision.action != "keep":
            with count_sent() as counts:
                apply_plan(
                    self._model, self._optimizer, decision.plan, copies=self._copies
                )
            self.monitor.plan, self._warm_up = decision.plan, WARM_UP_STEPS
            sent = counts.total()
        took_s = time.perf_counter() - start_s
        self.monitor.forget()
        if self._group.rank == 0:
            log.info(
                "%s after step %d: %s",
                decision.action,
                self.monitor.steps,
                decision.reason,
            )
            self._append(decision, took_s, sent)

    def _append(self, decision: Decision[Plan], took_s: float, sent: int) -> None:
        if self._record is None:
            return
        line: dict[str, Any] = {
            "step": self.monitor.steps,
            "action": decision.action,
            "dry_run": self._dry_run,
            "reason": decision.reason,
            "factors": decision.factors,
            "step_s": decision.step_s,
            "predicted_step_s": decision.predicted_step_s,
            "predicted_migration_s": decision.migration_s,
            "migration_s": took_s,
            "sent_bytes": sent,
            "measured_gain": decision.measured_gain,
        }
        Path(self._record).parent.mkdir(parents=True, exist_ok=True)
        with open(self._record, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _check_replicas(model: nn.Module) -> None:
    for wrapper in model.modules():
        if (
            isinstance(wrapper, DistributedDataParallel)
            and wrapper.process_group.size() > 1
        ):
            raise HetConvError(
                f"the model has {wrapper.process_group.size()} replicas, which must all have "
                "one plan; decide for all of them, and call hetconv.apply_plan with their "
                "wrappers"
            )


def _check_optimizer(
    model: nn.Module, optimizer: Optimizer | None, copies: Sequence[nn.Module]
) -> None:
    if optimizer is None:
        return
    if not isinstance(optimizer, Optimizer):
        raise HetConvError(
            f"optimizer is a {type(optimizer).__name__}; give a torch.optim.Optimizer, or None"
        )
    known = {id(p) for m in (model, *copies) for p in m.parameters()}
    held = (p for group in optimizer.param_groups for p in group["params"])
    if not any(id(p) in known for p in held):
        raise HetConvError(
            "the optimizer holds no parameter of the model; make it from model.parameters() "
            "after hetconv.parallelize"
        )


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
