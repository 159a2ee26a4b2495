"""What a step is predicted to take, by the two ways to ask for it."""

from __future__ import annotations

import torch

import hetconv
from hetconv.cost.estimator import StepEstimator
from hetconv.planner.make_plan import PLANNED
from hetconv.schemas.cluster_profile import ClusterProfile
from tests.nets import Chain, splits_of


def test_the_seconds_of_a_step_are_those_of_its_prediction() -> None:
    graph = hetconv.capture(Chain(), torch.zeros(2, 4, 16, 16))
    profile = ClusterProfile.from_devices(["cpu", "cpu@0.5"], link="host")
    pricer = StepEstimator(graph, profile, "train")
    splits = splits_of(Chain(), ("height",), (3, 1))
    assert pricer.step_s(PLANNED, splits) == pricer.estimate(splits)[0].step_s > 0
