"""The heart of planning: predicted bytes are sent bytes, exactly; seconds follow the models."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hetconv
from hetconv.cost import layer_seconds, operator_key, price
from hetconv.plan import Mode
from hetconv.planner import whole_model
from hetconv.profile import ClusterProfile, Curve, DeviceModel, LinkModel, OperatorModel
from hetconv.rules import KINDS, Conv, Linear, Split, SplitKind
from hetconv.spec import Conv2dSpec

from .equivalence import loss_of
from .nets import MobileBlock, ResNet, UNet, plan_of
from .spawn import on_ranks

CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet": (ResNet, (2, 3, 45, 40)),
    "unet": (UNet, (2, 3, 20, 24)),
    "mobile": (MobileBlock, (2, 4, 12, 11)),
}


def sent_and_predicted(
    case: str, kind: SplitKind, weights: tuple[int, ...], mode: Mode, input_gradient: bool
) -> tuple[dict[int, int], dict[int, int]]:
    """Bytes to every other rank in one step: as counted, and as the plan says."""
    make, shape = CASES[case]
    model = make().train(mode == "train")
    x = torch.randn(shape, requires_grad=input_gradient)
    world, rank = len(weights), dist.get_rank()
    with torch.set_grad_enabled(mode == "train"):
        graph = hetconv.capture(model, x)
    splits = dict(whole_model(graph, kind, weights, KINDS).items()) if kind != "replicate" else {}
    predicted, _ = price(graph, ClusterProfile.from_devices(["cpu"] * world, link="host"), splits, mode)
    model = hetconv.parallelize(model, plan_of(model, splits, world))
    with hetconv.count_sent() as sent, torch.set_grad_enabled(mode == "train"):
        y = model(x)
        if mode == "train":
            loss_of(y).backward()
    return dict(sent), {r: size for r, size in enumerate(predicted.sent_bytes[rank]) if size}


@pytest.mark.parametrize("weights", [(3, 1), (5, 2, 1), (1, 0, 2)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_predicted_bytes_are_sent_bytes(case: str, kind: SplitKind, weights: tuple[int, ...]) -> None:
    modes: list[tuple[Mode, bool]] = [("train", False), ("train", True), ("infer", False)]
    for mode, input_gradient in modes:
        for sent, predicted in on_ranks(len(weights), sent_and_predicted, case, kind, weights, mode, input_gradient):
            assert sent == predicted, mode


def toy(speeds: tuple[float, ...], seconds_of_whole: float, op: Conv | Linear) -> ClusterProfile:
    """Devices that compute in proportion to the share, over links that cost nothing."""

    def device(speed: float) -> DeviceModel:
        curve = Curve((0.5, 1.0), (seconds_of_whole / speed / 2, seconds_of_whole / speed))
        model = {operator_key(op, "pixels"): OperatorModel(curve, curve)}
        return DeviceModel("toy", "cpu", 1e12, {"float32": 1e30}, 1e30, operators=model)

    pairs = {f"{a}-{b}": LinkModel(0.0, 0.0) for b in range(len(speeds)) for a in range(b)}
    return ClusterProfile(tuple(map(device, speeds)), pairs)


def test_a_step_takes_as_long_as_its_slowest_share() -> None:
    conv = nn.Conv2d(3, 8, 3, padding=1)
    graph = hetconv.capture(conv, torch.randn(1, 3, 12, 12))
    (op,) = graph.layers.values()
    profile = toy((1.0, 0.5), 6.0, op)
    for sizes, expected in (((8, 4), 4.0), ((6, 6), 6.0), ((12, 0), 6.0), ((0, 12), 12.0)):
        prediction, layers = price(graph, profile, {"": Split("height", sizes)}, "infer")
        assert prediction.step_s == pytest.approx(expected)
        assert layers[""].forward_s == pytest.approx((sizes[0] / 2, float(sizes[1])))


def test_what_was_not_measured_takes_the_other_axis_and_then_the_roofline() -> None:
    op = Conv(Conv2dSpec(1, 4, 8, 8, 4, 3, 3, padding=((1, 1), (1, 1))))
    curve = Curve((1.0,), (3.0,))
    bare = DeviceModel("d", "cpu", 1e9, {"float32": op.spec.flops / 2.0}, 1e30, backward_ratio=3.0)
    measured = DeviceModel(
        "d", "cpu", 1e9, {"float32": 1.0}, 1.0, operators={operator_key(op, "pixels"): OperatorModel(curve, curve)}
    )
    assert layer_seconds(measured, op, "filters", False, "float32")(0.5) == pytest.approx(1.5)
    assert layer_seconds(bare, op, "filters", False, "float32")(0.5) == pytest.approx(1.0)
    assert layer_seconds(bare, op, "filters", True, "float32")(0.5) == pytest.approx(3.0)
    assert layer_seconds(bare, op, "filters", True, "float32")(0.0) == 0.0


def test_a_split_of_another_world_is_refused_by_name() -> None:
    graph = hetconv.capture(nn.Sequential(nn.Conv2d(3, 8, 3)), torch.randn(1, 3, 12, 12))
    with pytest.raises(hetconv.PlanError, match="'0' is split into 3 parts"):
        price(graph, ClusterProfile.from_devices(["T4", "T4"]), {"0": Split("height", (4, 4, 2))}, "train")
