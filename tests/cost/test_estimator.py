"""What a step is predicted to take, by the two ways to ask for it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hetconv
from hetconv.cost.estimator import StepEstimator, estimate
from hetconv.planner.make_plan import PLANNED
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.sharding.split import Split
from tests.nets import Chain, splits_of


def test_the_seconds_of_a_step_are_those_of_its_prediction() -> None:
    graph = hetconv.capture(Chain(), torch.zeros(2, 4, 16, 16))
    profile = ClusterProfile.from_devices(["cpu", "cpu@0.5"], link="host")
    pricer = StepEstimator(graph, profile, "train")
    splits = splits_of(Chain(), ("height",), (3, 1))
    assert pricer.step_s(PLANNED, splits) == pricer.estimate(splits)[0].step_s > 0


def test_a_split_of_another_world_is_refused_by_name() -> None:
    graph = hetconv.capture(
        nn.Sequential(nn.Conv2d(3, 8, 3)), torch.randn(1, 3, 12, 12)
    )
    with pytest.raises(hetconv.PlanError, match="'0' is split into 3 parts"):
        estimate(
            graph,
            ClusterProfile.from_devices(["T4", "T4"]),
            {"0": Split("height", (4, 4, 2))},
            "train",
        )
