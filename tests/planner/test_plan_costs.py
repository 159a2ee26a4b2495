"""The controller over the planner's own estimates of a model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import hetconv
from hetconv.cost.estimator import StepEstimator
from hetconv.planner.plan_costs import EstimatedCosts, _resized
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
    assert [d.action for d in decisions] == ["move", "keep", "move", "keep"]
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


def test_rows_are_resized_where_another_kind_would_move_too_much() -> None:
    model = graph()
    plan = hetconv.make_plan(model, PROFILE, mode="infer").with_splits(
        {name: Split("height", (1, 1)) for name in model.layers}
    )
    # Two steps do not pay for moved filters.
    costs = EstimatedCosts(model, PROFILE, "infer", copies=10**6, horizon_steps=2)
    found = costs.plan_for(plan, (3.0, 1.0))
    assert {split.kind for split in found.splits.values()} == {"height"}
    for split in found.splits.values():
        assert split.shares[0] == pytest.approx(1 / 4, abs=0.02)
    assert costs.migration_s(plan, found) == 0
    again = costs.plan_for(found, (1.0, 1.0))
    for split in again.splits.values():
        assert split.shares[0] == pytest.approx(1 / 2, abs=0.02)


def test_filters_are_resized_and_nodes_keep_their_ranks() -> None:
    layer = nn.Conv2d(64, 64, 3, padding=1)
    model = hetconv.capture(nn.Sequential(layer), torch.zeros(8, 64, 64, 64))
    (op,) = model.layers.values()
    split = Split("filter", (32, 32, 64), nodes=((2, 6), (1, 2)))
    found = _resized(op, split, (0.5, 1.0, 0.25))
    assert found.nodes == ((2, 7), (1, 1))
    assert found.sizes == (16, 48, 64)  # in whole tiles
    assert _resized(op, Split("replicate"), (0.5, 1.0)) == Split("replicate")
