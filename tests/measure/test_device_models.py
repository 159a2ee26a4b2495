"""The model of a device, from made-up samples, and what is predicted from it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hetconv
from hetconv.autotune.measure import fit, timer
from hetconv.autotune.measure.layer_workloads import LayerWorkload, Workload
from hetconv.autotune.measure.other_workloads import DispatchOverhead, NonLayerOperator
from hetconv.autotune.measure.sampling import Passes
from hetconv.cost.estimator import StepEstimator
from hetconv.cost.operator_cost import operator_key
from hetconv.planner.make_plan import PLANNED
from hetconv.runtime.throttle import DeviceName
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.device_model import DeviceModel, LinkModel
from hetconv.schemas.plan import SINGLE_DEVICE
from hetconv.sharding.conv_spec import ConvSpec
from hetconv.sharding.layer_rules import Conv
from hetconv.sharding.split import Split

CPU = torch.device("cpu")
CONV = Conv(ConvSpec(2, 6, (9, 8), 8, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)))
LAYER = LayerWorkload(CONV, "pixels", "float32")
SAMPLES: timer.Samples = {
    LAYER.key: {0.5: Passes([0.5], [1.0]), 1.0: Passes([1.0], [2.0])},
    replace(LAYER, axis="filters").key: {
        0.5: Passes([0.5], [1.0]),
        1.0: Passes([1.0], [2.0]),
    },
    "call": {1.0: Passes([0.25], [0.75])},
    "elementwise float32": {
        1000.0: Passes([1e-3], [2e-3]),
        2000.0: Passes([2e-3], [4e-3]),
    },
    "max pool float32": {},
}
"""Made up: a second per whole kernel; calls of a quarter, others of a microsecond per byte."""


def model_of() -> DeviceModel:
    workloads: list[Workload] = [
        LAYER,
        replace(LAYER, axis="filters"),
        DispatchOverhead(),
        NonLayerOperator("elementwise", "float32"),
        NonLayerOperator("max pool", "float32"),
    ]
    return fit.device_model(DeviceName("cpu"), CPU, SAMPLES, workloads, 1e9)


def test_a_device_is_what_its_samples_say() -> None:
    model, key = model_of(), operator_key(CONV, "pixels", "float32")
    assert model.flops_per_s == {"float32": CONV.spec.flops}
    assert (model.overhead_s, model.backward_overhead_s, model.backward_ratio) == (
        0.25,
        0.75,
        2.0,
    )
    assert model.operators[key].forward.seconds == (0.75, 1.25)  # with the host's call
    assert model.operators[key].backward.seconds == (1.75, 2.75)
    assert set(model.operators) == {key, operator_key(CONV, "filters", "float32")}
    assert list(model.others) == ["elementwise float32"]


def test_a_device_of_which_nothing_was_measured_still_has_a_roofline() -> None:
    model = fit.device_model(DeviceName("cpu"), CPU, {}, [], 1e9)
    assert model.flops_per_s == {"float32": fit.DEFAULT_FLOPS_PER_S}
    assert model.backward_ratio == fit.DEFAULT_BACKWARD_RATIO
    assert model.operators == model.others == {}


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x))


def test_what_was_measured_is_what_is_predicted() -> None:
    """Also of a device alone, which sends the other nothing."""
    graph, model = hetconv.capture(Two(), torch.zeros(2, 6, 9, 8)), model_of()
    profile = ClusterProfile((model, model), {"0-1": LinkModel(1.0, 0.0)})
    pricer, splits = (
        StepEstimator(graph, profile, "train"),
        {"conv": Split("filter", (8, 0))},
    )
    moved = 2 * 4 * 2 * 8 * 9 * 8  # bytes that relu reads and writes
    computing_s = pytest.approx(1.25 + 2.75 + 3e-6 * moved)
    for name in (PLANNED, f"{SINGLE_DEVICE} (0: cpu)"):
        assert pricer.of(name).estimate(splits)[0].compute_s == (computing_s, 0.0)
    assert pricer.step_s(f"{SINGLE_DEVICE} (0: cpu)", splits) == computing_s
    one_message_s = pytest.approx(1.25 + 2.75 + 3e-6 * moved + 1.0)
    assert pricer.step_s(PLANNED, splits) == one_message_s
