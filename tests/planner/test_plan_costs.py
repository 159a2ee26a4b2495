"""The controller over the planner's own estimates of a model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import hetconv
from hetconv.cost.estimator import StepEstimator
from hetconv.planner.plan_costs import EstimatedCosts
from hetconv.planner.rebalance import (
    Decision,
    Reading,
    RebalanceController,
    RebalancePolicy,
)
from hetconv.schemas.plan import Plan
from hetconv.sharding.split import Split
from hetconv.tracing.graph import Graph

PROFILE = hetconv.ClusterProfile.from_devices("2xT4", link="pcie3-x16")


def graph() -> Graph:
    layers = [nn.Conv2d(64, 64, 3, padding=1) for _ in range(4)]
    return hetconv.capture(nn.Sequential(*layers), torch.zeros(1, 64, 512, 512))


def controlled(
    costs: EstimatedCosts, model: Graph, plan: Plan, slow: float
) -> tuple[list[Decision[Plan]], Plan]:
    """100 steps that take what is predicted, while rank 0 is slower from step 20 to 60."""
    control = RebalanceController(costs, plan, RebalancePolicy())
    found = []
    for step in range(100):
        factors = (slow if 20 <= step < 60 else 1.0, 1.0)
        prediction, _ = StepEstimator(model, PROFILE.slowed(factors), "infer").estimate(
            control.plan.splits
        )
        messages_s = prediction.communication_s
        busy = [c + m for c, m in zip(prediction.compute_s, messages_s, strict=True)]
        decision = control.observe(Reading(prediction.step_s, tuple(busy)))
        found += [decision] if decision is not None else []
    return found, control.plan


def test_a_slow_device_gets_fewer_rows_and_gets_them_back() -> None:
    model = graph()
    plan = hetconv.make_plan(model, PROFILE, mode="infer")
    costs = EstimatedCosts(model, PROFILE, "infer", copies=1)
    decisions, last = controlled(costs, model, plan, 2.5)
    assert [d.action for d in decisions] == ["move", "move"]
    first = decisions[0]
    tuned = hetconv.make_plan(model, PROFILE.slowed(first.factors), mode="infer")
    assert first.plan.splits == tuned.splits
    assert costs.step_s(last, (1.0, 1.0)) == pytest.approx(
        costs.step_s(plan, (1.0, 1.0)), rel=0.01
    )


def test_a_quiet_cluster_keeps_its_plan() -> None:
    model = graph()
    plan = hetconv.make_plan(model, PROFILE, mode="infer")
    costs = EstimatedCosts(model, PROFILE, "infer")
    decisions, last = controlled(costs, model, plan, 1.0)
    assert not decisions
    assert last is plan


def test_moving_filters_costs_their_bytes() -> None:
    model = graph()
    plan = hetconv.make_plan(model, PROFILE, mode="infer")
    even, uneven = (
        plan.with_splits(dict.fromkeys(plan.layers, Split("filter", sizes)))
        for sizes in ((32, 32), (48, 16))
    )
    costs = EstimatedCosts(model, PROFILE, "infer", itemsize=4, copies=3)
    link = PROFILE.link(1, 0)
    moved_bytes = 4 * 16 * (64 * 9 + 1) * 4 * 3
    messages = 4 * 2  # a weight and a bias of each layer
    expected = moved_bytes * link.s_per_byte + messages * link.latency_s
    assert costs.migration_s(even, uneven) == pytest.approx(expected)
    assert costs.migration_s(even, replace(even, chosen="again")) == 0
