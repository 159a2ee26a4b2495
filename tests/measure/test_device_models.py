"""The model of a device, from made-up samples, and what is predicted from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hetconv
from hetconv.autotune.launch.throttle import DeviceName
from hetconv.autotune.measure import fit, timer
from hetconv.autotune.measure.layer_workloads import AXES, Layer
from hetconv.autotune.measure.other_workloads import Call, Other
from hetconv.autotune.measure.sampling import Passes
from hetconv.cost.estimator import StepEstimator
from hetconv.cost.operator_cost import operator_key
from hetconv.schemas.cluster_profile import ClusterProfile, LinkModel
from hetconv.sharding.conv_spec import ConvSpec
from hetconv.sharding.layer_rules import Conv, Split

CPU = torch.device("cpu")
CONV = Conv(ConvSpec(2, 6, (9, 8), 8, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)))
PULSE_S = 2**-12


def samples_of(layer: Layer) -> timer.Samples:
    """Made up: a second per whole kernel, half of it alone; calls of a quarter, others
    of a microsecond per byte.

    The device was half as fast while filters were measured; and, alone, is faster than
    that while all others rest.
    """

    def took(forward: float, backward: float, slow: float = 1.0) -> Passes:
        return Passes([slow * forward], [slow * backward], slow * PULSE_S)

    def rested(forward: float, backward: float) -> Passes:
        return Passes([forward], [backward], PULSE_S / 2)

    return {
        layer.key: {0.5: took(0.5, 1.0), 1.0: took(1.0, 2.0)},
        replace(layer, axis="filters").key: {
            0.5: took(0.5, 1.0),
            1.0: took(1.0, 2.0, 2.0),
        },
        replace(layer, alone=True).key: {1.0: rested(0.5, 1.5)},
        "call": {1.0: took(0.25, 0.75)},
        "call alone": {1.0: rested(0.125, 0.25)},
        "elementwise float32": {1000.0: took(1e-3, 2e-3), 2000.0: took(2e-3, 4e-3)},
        "elementwise float32 alone": {
            1000.0: rested(1e-4, 2e-4),
            2000.0: rested(2e-4, 4e-4),
        },
        "max pool float32": {},
    }


def model_of() -> Any:
    layer = Layer(CONV, "pixels", "float32")
    subjects = [
        layer,
        replace(layer, axis="filters"),
        replace(layer, alone=True),
        Call(),
        Call(True),
    ]
    others = [
        Other(kind, "float32", alone=alone)
        for kind in ("elementwise", "max pool")
        for alone in (False, True)
    ]
    return fit.device_model(
        DeviceName("cpu"), CPU, samples_of(layer), [*subjects, *others], 1e9, 0.5
    )


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
    alone = model.by_itself()
    for axis in AXES:
        whole = alone.operators[operator_key(CONV, axis, "float32")]
        assert (whole.forward.at(1.0), whole.backward.at(1.0)) == (0.625, 1.75)
    assert alone.others["elementwise float32"].forward.at(1000) == 1e-4
    assert (alone.overhead_s, alone.backward_overhead_s) == (0.125, 0.25)
    assert model.pulse_s == PULSE_S


def test_a_device_is_not_slower_for_being_alone() -> None:
    layer, key = (
        Layer(CONV, "pixels", "float32"),
        operator_key(CONV, "pixels", "float32"),
    )
    samples, subjects = samples_of(layer), [layer, replace(layer, alone=True)]
    samples[subjects[1].key] = {1.0: Passes([9.0], [1.5], PULSE_S)}
    model = fit.device_model(DeviceName("cpu"), CPU, samples, subjects, 1e9, 1.0)
    whole = model.by_itself().operators[key]
    assert (whole.forward.at(1.0), whole.backward.at(1.0)) == (1.0, 1.5)


def test_a_device_that_is_slower_takes_longer_for_all_of_it() -> None:
    model, key = model_of(), operator_key(CONV, "pixels", "float32")
    assert model.at_pulse(PULSE_S) == model
    slow = model.at_pulse(2 * PULSE_S)
    assert slow.operators[key].forward.seconds == (1.5, 2.5)
    assert slow.others["elementwise float32"].backward.at(1000) == 4e-3
    assert (slow.rate("float32"), slow.bytes_per_s) == (
        model.rate("float32") / 2,
        model.bytes_per_s / 2,
    )
    assert (slow.overhead(False), slow.overhead(True)) == (0.5, 1.5)
    assert model.alone is not None
    assert model.alone.pulse_s is not None
    assert slow.by_itself() == model.by_itself().at_pulse(2 * model.alone.pulse_s)
    assert slow.at_pulse(PULSE_S) == model
    unknown = replace(model, pulse_s=None)
    assert unknown.at_pulse(2 * PULSE_S) == unknown


def test_a_device_of_which_nothing_was_measured_still_has_a_roofline() -> None:
    model = fit.device_model(DeviceName("cpu"), CPU, {}, [], 1e9, 1.0)
    assert model.flops_per_s == {"float32": fit.UNKNOWN}
    assert model.alone is None


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x))


def test_what_was_measured_is_what_is_predicted() -> None:
    graph, model = hetconv.capture(Two(), torch.zeros(2, 6, 9, 8)), model_of()
    profile = ClusterProfile((model, model), {"0-1": LinkModel(0.0, 0.0)})
    moved = 2 * 4 * 2 * 8 * 9 * 8  # bytes that relu reads and writes
    busy = (
        StepEstimator(graph, profile, "train")
        .estimate({"conv": Split("filter", (8, 0))})[0]
        .busy_s
    )
    assert model.relief == (0.625 + 1.75) / (1.25 + 2.75)
    assert busy == (
        pytest.approx((1.25 + 2.75 + 3e-6 * moved) * model.relief),
        0.0,
    )  # the other one rests
    alone = (
        StepEstimator(graph, profile.alone(), "train")
        .estimate({"conv": Split("filter", (8, 0))})[0]
        .busy_s
    )
    assert alone == (pytest.approx(0.625 + 1.75 + 3e-7 * moved), 0.0)


@pytest.mark.parametrize("measured", [True, False])
def test_a_device_alone_is_as_slow_as_whole_steps_were(measured: bool) -> None:
    graph, model = hetconv.capture(Two(), torch.zeros(2, 6, 9, 8)), model_of()
    if not measured:
        model = replace(
            model,
            operators={},
            others={},
            alone=replace(model.alone, operators={}, others={}),
        )

    def alone_s(slowness: float) -> float:
        slow = replace(model, alone=replace(model.alone, slowness=slowness))
        profile = ClusterProfile((slow, slow), {"0-1": LinkModel(0.0, 0.0)})
        return max(
            StepEstimator(graph, profile.alone(), "train")
            .estimate({"conv": Split("filter", (8, 0))})[0]
            .busy_s
        )

    assert alone_s(1.5) == pytest.approx(1.5 * alone_s(1.0))
