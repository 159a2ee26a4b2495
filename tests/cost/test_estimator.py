"""What a step is predicted to take, beyond the sum of what its operators do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import hetconv
from hetconv.cost.estimator import StepEstimator, estimate
from hetconv.cost.operator_cost import operator_key
from hetconv.schemas.device_model import Alone
from hetconv.sharding.layer_rules import Split

from .test_operator_cost import toy


def test_a_device_is_faster_for_as_long_as_the_others_rest() -> None:
    """Alone its layers take half of the time."""
    graph = hetconv.capture(nn.Conv2d(3, 8, 3, padding=1), torch.randn(1, 3, 12, 12))
    (op,) = graph.layers.values()
    profile = toy((1.0, 0.5), 6.0, op)
    fast, slow = profile.devices
    fast = replace(
        fast, alone=Alone({operator_key(op, "pixels", "float32"): (3.0, 3.0)})
    )
    shared = replace(profile, devices=(fast, slow))
    assert (fast.relief, slow.relief) == (0.5, 1.0)
    assert replace(fast, emulated=True).relief == fast.by_itself().relief == 1.0
    assert shared.relieved((1.0, 1.0)) == (1.0, 1.0)
    assert shared.relieved((0.9, 0.25)) == (0.625, 1.0)
    # seconds of layers beside each other at work, and the part of the step in which the
    # second one rests
    for sizes, beside, rests in (
        ((8, 4), (4.0, 4.0), 0.0),
        ((9, 3), (4.5, 3.0), 1 / 3),
        ((12, 0), (6.0, 0.0), 1.0),
    ):
        splits = {"": Split("height", sizes)}
        prediction, layers = estimate(graph, shared, splits, "infer")
        expected = beside[0] * (1 - rests / 2), beside[1]
        assert layers[""].forward_s == prediction.busy_s == pytest.approx(expected)
        assert (
            prediction.step_s
            == StepEstimator(graph, shared, "infer").step_s("", splits)
            == pytest.approx(max(expected))
        )
