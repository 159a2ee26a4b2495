"""Seconds of operators: those of the device models, and estimates of what they do not know."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

import hetconv
from hetconv.cost.estimator import estimate
from hetconv.cost.operator_cost import Operators, layer_curve, operator_key, seams_of
from hetconv.cost.propagate import propagate
from hetconv.ops.conv_geometry import spatial_geometry
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.device_model import (
    Axis,
    Curve,
    DeviceModel,
    LinkModel,
    OperatorModel,
)
from hetconv.schemas.provenance import MeasurementConditions
from hetconv.sharding.conv_spec import ConvSpec
from hetconv.sharding.layer_rules import Conv, Linear
from hetconv.sharding.layout import Layout
from hetconv.sharding.split import REPLICATE, Split, SplitKind
from hetconv.tracing.graph import Node

SECONDS: dict[Axis, float] = {"pixels": 1.0, "filters": 2.0, "channels": 3.0}


def toy(
    speeds: tuple[float, ...], seconds_of_whole: float, op: Conv | Linear
) -> ClusterProfile:
    """Devices that compute in proportion to the share, over links that cost nothing."""

    def device(speed: float) -> DeviceModel:
        curve = Curve(
            (0.5, 1.0), (seconds_of_whole / speed / 2, seconds_of_whole / speed)
        )
        model = {operator_key(op, "pixels", "float32"): OperatorModel(curve, curve)}
        return DeviceModel("toy", "cpu", 1e12, {"float32": 1e30}, 1e30, operators=model)

    pairs = {
        f"{a}-{b}": LinkModel(0.0, 0.0) for b in range(len(speeds)) for a in range(b)
    }
    return ClusterProfile(tuple(map(device, speeds)), pairs)


def test_a_step_takes_as_long_as_its_slowest_share() -> None:
    conv = nn.Conv2d(3, 8, 3, padding=1)
    graph = hetconv.capture(conv, torch.randn(1, 3, 12, 12))
    (op,) = graph.layers.values()
    profile = toy((1.0, 0.5), 6.0, op)
    for sizes, expected in (
        ((8, 4), 4.0),
        ((6, 6), 6.0),
        ((12, 0), 6.0),
        ((0, 12), 12.0),
    ):
        prediction, layers = estimate(
            graph, profile, {"": Split("height", sizes)}, "infer"
        )
        assert prediction.step_s == pytest.approx(expected)
        assert layers[""].forward_s == pytest.approx((sizes[0] / 2, float(sizes[1])))


def test_what_was_not_measured_takes_the_other_axis_and_then_the_roofline() -> None:
    op = Conv(ConvSpec(1, 4, (8, 8), 4, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)))
    curve = Curve((1.0,), (3.0,))
    bare = DeviceModel(
        "d", "cpu", 1e9, {"float32": op.spec.flops / 2.0}, 1e30, backward_ratio=3.0
    )
    measured = DeviceModel(
        "d",
        "cpu",
        1e9,
        {"float32": 1.0},
        1.0,
        operators={operator_key(op, "pixels", "float32"): OperatorModel(curve, curve)},
    )
    assert layer_curve(measured, op, "filters", False, "float32").at(
        0.5
    ) == pytest.approx(1.5)
    assert layer_curve(bare, op, "filters", False, "float32").at(0.5) == pytest.approx(
        1.0
    )
    assert layer_curve(bare, op, "filters", True, "float32").at(0.5) == pytest.approx(
        3.0
    )
    assert layer_curve(bare, op, "filters", True, "float32").at(0.0) == 0.0


def test_a_share_of_the_channels_is_more_like_one_of_the_filters() -> None:
    op = Linear((2, 8), 8)
    models = {
        axis: OperatorModel(Curve((1.0,), (s,)), Curve((1.0,), (s,)))
        for axis, s in SECONDS.items()
    }
    for axis, nearest in (
        ("channels", ["channels", "filters", "pixels"]),
        ("filters", ["filters", "channels", "pixels"]),
        ("pixels", ["pixels", "filters", "channels"]),
    ):
        for k, expected in enumerate(nearest):
            known = {operator_key(op, a, "float32"): models[a] for a in nearest[k:]}
            device = DeviceModel(
                "d", "cpu", 1e9, {"float32": 1.0}, 1.0, operators=known
            )
            assert (
                layer_curve(device, op, axis, False, "float32").at(1.0)
                == SECONDS[expected]
            )


def test_convolutions_of_float32_run_in_tf32_where_a_device_does_that_faster() -> None:
    conv = Conv(ConvSpec(1, 4, (8, 8), 4, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)))
    device = DeviceModel(
        "d", "cuda", 1e9, {"float32": 1.0, "tf32": 8.0, "float16": 16.0}, 1e30
    )
    for dtype, rate in (
        ("float32", 8),
        ("float16", 16),
        ("float64", 1),
        ("bfloat16", 1),
    ):
        assert layer_curve(device, conv, "pixels", False, dtype).at(
            1.0
        ) == pytest.approx(conv.spec.flops / rate)
    assert layer_curve(device, Linear((3, 4), 5), "pixels", False, "float32").at(
        1.0
    ) == pytest.approx(2 * 3 * 4 * 5)
    up = hetconv.capture(nn.ConvTranspose2d(2, 3, 2), torch.zeros(1, 2, 4, 4))
    whole = up.nodes[0].op.sharding((Layout.replicated((1, 2, 4, 4), 1),), REPLICATE)
    seconds = Operators(up, [device]).seconds(up.nodes[0], REPLICATE, whole, False)
    assert seconds == pytest.approx([2 * 32 * 3 * 4 / 8])


@pytest.mark.parametrize(
    ("up", "shape"),
    [
        (nn.ConvTranspose1d(8, 4, 3, groups=2), (2, 8, 25)),
        (nn.ConvTranspose3d(8, 4, (2, 3, 1), 2), (1, 8, 4, 5, 6)),
    ],
)
def test_a_transposed_convolution_costs_its_products(
    up: nn.Module, shape: tuple[int, ...]
) -> None:
    """Every input element times all taps of its filters, each with an addition; a rank
    pays for what it reads.
    """
    node = (graph := hetconv.capture(up, torch.zeros(shape))).nodes[0]
    x = Layout.sharded(shape, 2, (shape[2] - 1, 1))
    flops = 2 * prod(shape) * prod(up.weight.shape[1:])
    device = DeviceModel("d", "cpu", 1e9, {"float32": flops / 6.0}, 1e30)
    operators = Operators(graph, [device] * 2)
    whole, parts = (
        node.op.sharding((x,), REPLICATE) for x in (Layout.replicated(shape, 2), x)
    )
    assert operators.seconds(node, REPLICATE, whole, False).tolist() == pytest.approx(
        [6.0, 6.0]
    )
    for seconds, read in zip(
        operators.seconds(node, REPLICATE, parts, False),
        parts.input_layouts[0].boxes,
        strict=True,
    ):
        expected = 6.0 * read.numel / prod(shape)
        assert 0 < expected <= 6.0
        assert seconds == pytest.approx(expected)


@st.composite
def cut_along(draw: st.DrawFn) -> tuple[Conv, Split]:
    """A convolution of rows, cut so that the rows of its input are cut where those of
    its output are.
    """
    kernel, stride = (
        draw(st.integers(1, 5)),
        draw(st.integers(1, 3)),
    )  # halos come from one rank on each side
    before = draw(st.integers(0, kernel - 1))
    sizes = draw(
        st.lists(st.sampled_from([0, 4, 5, 9]), min_size=2, max_size=4).filter(sum)
    )
    rows = sum(sizes)  # as many as padding "same" gives
    after = max((rows - 1) * stride + kernel - before - rows * stride, 0)
    spec = ConvSpec(
        1,
        2,
        (rows * stride, 5),
        3,
        (kernel, 1),
        (stride, 1),
        ((before, after), (0, 0)),
        (1, 1),
    )
    return Conv(spec), Split("height", tuple(sizes))


@given(cut_along())
def test_seams_are_what_halos_add_to(cut: tuple[Conv, Split]) -> None:
    """As many calls of a convolution as the runtime makes for halos, on as many rows."""
    op, split = cut
    s, world = op.spec, len(split.sizes)
    assume(s.y_shape[2] == sum(split.sizes))
    x = Layout.sharded(s.x_shape, 2, [n * s.stride[0] for n in split.sizes])
    found = seams_of(op, split, op.sharding((x,), split)) or [[] for _ in range(world)]
    for rank, seams in enumerate(found):
        halos = [
            slab.segment
            for _, slab in spatial_geometry(op, x, split, rank).halos
            if slab is not None
        ]
        assert [seam.share for seam in seams] == pytest.approx(
            [(h.out[1] - h.out[0]) / s.y_shape[2] for h in halos]
        )
        assert [seam.taps for seam in seams] == pytest.approx(
            [(h.taps[1] - h.taps[0]) / s.kernel[0] for h in halos]
        )


def test_only_cuts_of_space_have_seams_and_only_what_was_measured_pays_for_them() -> (
    None
):
    graph = hetconv.capture(nn.Conv2d(3, 8, 3, padding=1), torch.randn(1, 3, 12, 12))
    (op,), height = graph.layers.values(), Split("height", (8, 4))
    sharding = op.sharding((Layout.replicated((1, 3, 12, 12), 2),), height)
    assert seams_of(op, height, sharding) == [[(1 / 12, 1 / 3)]] * 2
    for split in (Split("filter", (6, 2)), Split("width", (12, 0))):
        assert (
            seams_of(
                op, split, op.sharding((Layout.replicated((1, 3, 12, 12), 2),), split)
            )
            is None
        )
    profile = toy((1.0, 0.5), 6.0, op)
    measured = replace(
        profile,
        devices=tuple(
            replace(d, measured=MeasurementConditions("", "")) for d in profile.devices
        ),
    )
    assert estimate(graph, profile, {"": height}, "infer")[
        0
    ].compute_s == pytest.approx((4.0, 4.0))
    assert estimate(graph, measured, {"": height}, "infer")[
        0
    ].compute_s == pytest.approx((4 + 0.5 / 3, 4 + 1 / 3))
    slow = replace(
        measured,
        devices=tuple(replace(d, bytes_per_s=8 * 27 * 4.0) for d in measured.devices),
    )
    compute_s = estimate(graph, slow, {"": height}, "infer")[
        0
    ].compute_s  # where the weights of a tap are copied in 2/3 s
    assert compute_s == pytest.approx((4 + 2.5 / 3, 5.0))


def test_other_operators_take_what_their_kind_was_measured_to_take() -> None:
    net = nn.Sequential(
        nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.Sigmoid()
    )
    graph = hetconv.capture(net, torch.zeros(1, 4, 8, 8, requires_grad=True))
    numel, line = 4 * 64, lambda slope: Curve((10.0, 20.0), (10 * slope, 20 * slope))
    others = {
        "batch norm in training float32": OperatorModel(line(1.0), line(10.0)),
        "max pool float32": OperatorModel(line(100.0), line(1000.0)),
        "elementwise float64": OperatorModel(line(7.0), line(7.0)),
    }
    device = DeviceModel(
        "d",
        "cpu",
        1e9,
        {"float32": 1e30},
        1.0,
        3.0,
        backward_overhead_s=5.0,
        others=others,
    )
    _, norm, pool, last = graph.nodes
    operators, whole = Operators(graph, [device]), Layout.replicated

    def seconds(node: Node, shape: tuple[int, ...], backward: bool) -> float:
        (found,) = operators.seconds(
            node, REPLICATE, node.op.sharding((whole(shape, 1),), REPLICATE), backward
        )
        return float(found)

    image, half = (1, 4, 8, 8), (1, 4, 4, 4)
    assert [seconds(norm, image, b) for b in (False, True)] == [
        4 * 2 * numel,
        40 * 2 * numel,
    ]
    assert [seconds(pool, image, b) for b in (False, True)] == [
        400 * numel * 5 / 4,
        4000 * numel * 5 / 4,
    ]
    assert [seconds(last, half, b) for b in (False, True)] == [
        numel * 2 + 3,
        (numel * 2) * 2 + 5,
    ]  # by the roofline


class Forks(nn.Module):
    """Two sums of gradients of what `tanh` gives, one of what `relu` does: it is returned too."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = x.tanh()
        b = (a * a + a.detach().sigmoid()).relu()
        return b, b + a


def test_gradients_of_what_is_read_twice_are_added_up() -> None:
    graph = hetconv.capture(Forks(), torch.zeros(1, 2, 3, 4, requires_grad=True))
    tanh, *_, relu, last = graph.nodes
    assert graph.extra_gradients == {tanh.outputs[0]: 2, relu.outputs[0]: 1}
    line = Curve((10.0, 20.0), (10.0, 20.0))
    device = DeviceModel("d", "cpu", 1e9, {"float32": 1.0}, 1.0)
    measured = replace(
        device,
        others={
            "elementwise float32": OperatorModel(
                line, Curve(line.shares, tuple(7 * s for s in line.seconds))
            )
        },
    )
    sharding = relu.op.sharding((Layout.sharded((1, 2, 3, 4), 2, (2, 1)),), REPLICATE)
    operators = Operators(graph, [device, measured])
    for node, times in ((tanh, 2), (relu, 1), (last, 0)):
        assert operators.forks(node, (sharding,), True).tolist() == [
            [times * 3 * 4 * 16, times * 3 * 4 * 8]
        ]


def test_sums_of_gradients_delay_training_but_are_no_layer_s() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x)
            return y.relu() + y

    graph = hetconv.capture(Net(), torch.zeros(1, 2, 4, 4))
    _, relu, last = graph.nodes
    forked = replace(
        graph, outputs=last.inputs, nodes=graph.nodes[:2], lifetimes=None
    )  # both are returned: one is read twice
    single = replace(forked, outputs=relu.outputs)
    profile, splits = (
        ClusterProfile((DeviceModel("d", "cpu", 1e9, {"float32": 1e30}, 1.0),), {}),
        {"conv": REPLICATE},
    )
    (with_sum, layers), (without, same) = (
        estimate(g, profile, splits, "train") for g in (forked, single)
    )
    assert layers == same
    assert with_sum.step_s - without.step_s == pytest.approx(3 * 4 * 32)


def test_what_training_adds_to_a_call_is_the_first_pass_s_ratio_unless_it_is_known() -> (
    None
):
    device = DeviceModel(
        "d", "cpu", 1e9, {"float32": 1.0}, 1.0, 3.0, backward_ratio=2.0
    )
    assert [device.roofline(10, 1, "float32", b) for b in (False, True)] == [13.0, 26.0]
    known = replace(device, backward_overhead_s=5.0)
    assert [known.roofline(10, 1, "float32", b) for b in (False, True)] == [13.0, 25.0]


@pytest.mark.parametrize(
    ("second", "overlaps"), [("depth", True), ("height", False), ("filter", False)]
)
def test_halos_overlap_where_the_cut_goes_on(second: SplitKind, overlaps: bool) -> None:
    model = nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.Conv3d(4, 4, 3, padding=1))
    graph = hetconv.capture(model, torch.zeros(1, 2, 6, 6, 6))
    scheduled, _ = propagate(
        graph, {"0": Split("depth", (3, 3)), "1": Split(second, (2, 2))}, 2, "train"
    )
    assert [a.overlaps_halos for a in scheduled[:2]] == [False, overlaps]
