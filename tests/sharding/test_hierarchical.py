"""Hierarchical splits: samples across nodes, other dimensions within each node."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

import hetconv
from hetconv.autotune.cli.diff import show_diff
from hetconv.autotune.cli.show import show_plan
from hetconv.autotune.report.plan_contents import contents_of
from hetconv.comm.rank_group import rank_group_of
from hetconv.cost.estimator import estimate, gathers
from hetconv.cost.operator_cost import seams_of
from hetconv.operators.einsum import Contraction
from hetconv.operators.reductions import AlongDim, Reduction
from hetconv.operators.resampling import Pad
from hetconv.operators.shapes import Cat, Reshape, Stack
from hetconv.operators.views import View
from hetconv.planner.partition import whole_model
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import Mode, Plan
from hetconv.sharding.conv_spec import ConvSpec
from hetconv.sharding.hierarchical import HierarchicalLayout
from hetconv.sharding.layer_rules import Conv, Linear, exchanges_halos
from hetconv.sharding.layout import Layout
from hetconv.sharding.rule import Operator
from hetconv.sharding.split import KINDS, KINDS_WITHIN_NODES, Split, SplitKind
from tests.models.test_hierarchical_models import CLUSTERS, Nodes, splits_of
from tests.nets import NETS, ResNet, plan_of
from tests.placed import PLACEMENTS, WORLD
from tests.spawn import on_ranks, outcomes
from tests.strategies import hierarchical

SPEC = ConvSpec(4, 8, (9, 7), 12, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("net", ["resnet", "unet", "mobile", "super resolution"])
def test_nothing_gathers_within_nodes(net: str, mode: Mode) -> None:
    make, (_, *image) = NETS[net]
    model = make().train(mode == "train")
    graph = hetconv.capture(model, torch.zeros(4, *image))
    assert (
        gathers(graph, splits_of(model, ("height",), CLUSTERS["two and two"]), 4, mode)
        == ()
    )


def test_between_nodes_nothing_moves_but_statistics_outputs_and_gradients() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(8, 4, 3),
    )
    graph = hetconv.capture(model, torch.zeros(4, 3, 21, 20))
    nodes = Nodes((2, 2), (3, 1), (5, 2, 1, 1))
    profile = ClusterProfile.from_devices(["cpu"] * 4, link="host")
    one, two = (
        estimate(graph, profile, splits, "infer")[0].sent_bytes
        for splits in (
            whole_model(graph, "height", nodes.within, KINDS),
            splits_of(model, ("height",), nodes),
        )
    )
    whole = 4 * 4 * 9 * 8 * 4  # the output, of which all ranks get what they lack
    assert sum(map(sum, one)) > 3 * whole
    of_first, of_second = 3 * whole // 4, whole // 4
    assert two[0][2] + two[1][2] == two[0][3] + two[1][3] == of_first
    assert two[2][0] + two[3][0] == two[2][1] + two[3][1] == of_second


@given(st.data(), st.integers(3, 4))
def test_a_layout_is_made_again_from_its_nodes(data: st.DataObject, world: int) -> None:
    x = data.draw(hierarchical((4, 3, 5), world))
    assert HierarchicalLayout.from_nodes(x.nodes, x.samples, x.node_layouts) == x
    assert sum(x.samples) == 4
    assert x.dim is None
    for node, part in zip(x.node_ranks, x.node_layouts, strict=True):
        assert part.world == max(len(node), 2)
        assert x.inner_dim == part.dim


def test_halos_are_exchanged_where_nodes_and_samples_are_the_same() -> None:
    op, split = Conv(SPEC), Split("height", (3, 6, 5, 4), ((2, 3), (2, 1)))
    x = op.sharding(
        (Layout.replicated(SPEC.x_shape, 4),), replace(split, sizes=(1, 2, 4, 5))
    ).input_layouts[0]
    alike = HierarchicalLayout.from_nodes(
        (2, 2), (3, 1), [Layout.sharded(SPEC.x_shape, 2, (s, 9 - s)) for s in (2, 5)]
    )
    assert not isinstance(x, Layout)
    assert exchanges_halos(op, alike, split)
    assert not exchanges_halos(op, alike, Split("height", (3, 6, 5, 4)))
    assert not exchanges_halos(op, alike, Split("width", (3, 6, 5, 4), split.nodes))
    assert not exchanges_halos(op, alike, replace(split, nodes=((2, 1), (2, 1))))
    assert not exchanges_halos(op, alike, replace(split, nodes=((1, 3), (3, 1))))
    assert not exchanges_halos(op, Layout.sharded(SPEC.x_shape, 2, (3, 2, 2, 2)), split)


def test_seams_are_of_own_samples() -> None:
    op, x = Conv(SPEC), Layout.replicated(SPEC.x_shape, 2)
    one = Split("height", (4, 5))
    two = Split("height", (4, 5, 4, 5), ((2, 3), (2, 1)))
    of_all = seams_of(op, one, op.sharding((x,), one))
    of_own = seams_of(op, two, op.sharding((Layout.replicated(SPEC.x_shape, 4),), two))
    taps = 1 / SPEC.kernel[0]
    assert of_all == [[(1 / 9, taps)], [(1 / 9, taps)]]
    assert of_own == [[(share / 9, taps)] for share in (0.75, 0.75, 0.25, 0.25)]


SQUARE = (4, 4, 4, 4)  # a wrong dimension would not be noticed by its extent


@pytest.mark.parametrize(
    ("op", "inputs"),
    [
        (Stack((4, 4, 4, 4, 4), 0), 4),
        (Cat((8, 4, 4, 4), 0), 2),
        (Reduction((4, 4, 4), (0,), False, False), 1),
        (AlongDim(SQUARE, (0,)), 1),
        (View(SQUARE, ((0, 4),) * 4, (1, 0, 2, 3)), 1),
        (View(SQUARE, ((0, 4),) * 4, (None, 0, 1, 2)), 1),
        (Reshape((2, 2, 4, 4, 4)), 1),
        (Pad(SQUARE, ((1, -1), (0, 0), (0, 0), (0, 0)), "constant"), 1),
        (Contraction(SQUARE, (tuple("nchw"), tuple("xcyn")), tuple("nhwx")), 2),
        (Contraction((4, 4, 4), (tuple("nchw"),), tuple("hnc")), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_computed_sample_by_sample_gathers(
    op: Operator, inputs: int
) -> None:
    x = HierarchicalLayout.from_nodes(
        (2, 1), (3, 1), [Layout.sharded(SQUARE, 2, sizes) for sizes in ((1, 3), (4, 0))]
    )
    sharding = op.sharding((x,) * inputs, Split("replicate"))
    assert {
        sharding.output.kind,
        *(read.kind for read in sharding.input_layouts if isinstance(read, Layout)),
    } == {"replicated"}


def drops() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ones after dropout of features and of single elements."""
    layout = PLACEMENTS["rows in nodes"]
    box = layout.boxes[dist.get_rank()]
    x = hetconv.HetTensor.wrap(torch.ones(box.shape), layout, rank_group_of())
    return hetconv.gather(F.dropout2d(x, 0.5)), hetconv.gather(F.dropout(x, 0.5))


def test_each_node_draws_its_own_numbers_for_its_samples() -> None:
    features, numbers = on_ranks(WORLD, drops)[0]
    assert (
        features == features[:, :, :1, :1]
    ).all()  # ranks of a node agree, although each draws
    by_sample = features[:, :, 0, 0] != 0
    assert len({tuple(sample.tolist()) for sample in by_sample}) == len(by_sample)
    rows = (numbers != 0).permute(0, 2, 1, 3).flatten(0, 1)
    assert len({tuple(row.flatten().tolist()) for row in rows}) == len(rows)


@pytest.mark.parametrize(
    ("kind", "sizes", "nodes", "match"),
    [
        (
            "sample",
            (1, 1, 1),
            ((2, 1), (1, 1)),
            "by sample; use filter, channel, depth, height, width, or leave",
        ),
        ("replicate", (), ((2, 1), (1, 1)), "by replicate; use filter"),
        (
            "height",
            (1, 1, 1),
            ((2, 1), (2, 1)),
            "no valid nodes; give .* 3 in all nodes",
        ),
        ("height", (1, 1, 1), ((3, 1), (0, 1)), "no valid nodes"),
        ("height", (1, 1, 1), ((2, 0), (1, 0)), "at least one of them positive"),
        ("height", (1, 1, 1), ((2, -1), (1, 2)), "no valid nodes"),
        ("height", (1, 1, 1), ((2, 1.0), (1, 2)), "no valid nodes"),
        ("height", (1, 1, 1), ((2, 1, 1), (1, 2)), "no valid nodes"),
        ("height", (1, 1, 1), ((3, 1),), "one level; leave out nodes"),
        (
            "height",
            (1, 1),
            ((1, 1), (1, 1)),
            "split by sample if each node is one rank",
        ),
        ("height", (0, 0, 1), ((2, 1), (1, 1)), "a node without sizes"),
    ],
)
def test_invalid_nodes_are_refused(
    kind: SplitKind, sizes: Any, nodes: Any, match: str
) -> None:
    with pytest.raises(hetconv.SplitError, match=match):
        Split(kind, sizes, nodes)


@pytest.mark.parametrize(
    ("op", "split", "match"),
    [
        (
            Conv(SPEC),
            Split("filter", (8, 4, 11), ((2, 1), (1, 1))),
            "adds up to 11 in node 1, but .* has 12 filters",
        ),
        (
            Conv(SPEC),
            Split("channel", (8, 4, 11), ((2, 1), (1, 1))),
            "adds up to 12 in node 0, .* 8 input channels",
        ),
        (Conv(SPEC), Split("depth", (1, 1, 1), ((2, 1), (1, 1))), "no depth to split"),
        (
            Conv(SPEC),
            Split("height", (1, 1, 1, 1), ((2, 1), (2, 1))),
            "4 sizes for 3 ranks",
        ),
        (
            Linear((6,), 8),
            Split("filter", (4, 4, 8), ((2, 1), (1, 1))),
            "no sample to split",
        ),
        (
            Linear((4, 6), 8),
            Split("filter", (4, 3, 8), ((2, 1), (1, 1))),
            "adds up to 7 in node 0, .* 8 output features",
        ),
        (
            Linear((4, 6), 8),
            Split("height", (1, 1, 1), ((2, 1), (1, 1))),
            "no height to split",
        ),
    ],
)
def test_a_split_that_does_not_fit_its_operator_is_refused(
    op: Conv | Linear, split: Split, match: str
) -> None:
    with pytest.raises(hetconv.SplitError, match=match):
        op.check(split, 3)


def made_with(nodes_by_rank: Sequence[Any]) -> None:
    split = Split("height", (1, 1, 1), nodes_by_rank[dist.get_rank()])
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    hetconv.parallelize(model, plan_of(model, {"0": split}, 3))


def constructed(features: Sequence[int]) -> None:
    own = features[dist.get_rank()]
    hetconv.HetConv2d(3, 4, 3, split=Split("filter", (3, 1, own), ((2, 1), (1, 1))))


@pytest.mark.parametrize(
    ("fn", "by_rank", "match"),
    [
        (
            made_with,
            [((2, 1), (1, 1)), ((2, 1), (1, 1)), ((2, 2), (1, 1))],
            "do not agree",
        ),
        (constructed, [4, 3, 4], "on rank 1: .* adds up to 3 in node 1"),
    ],
)
def test_a_split_that_one_rank_refuses_is_refused_by_all(
    fn: Any, by_rank: Any, match: str
) -> None:
    for ok, error in outcomes(3, fn, by_rank):
        assert not ok
        assert re.search(match, error)


def moved_to_summands() -> str:
    x, summands = PLACEMENTS["rows in nodes"], PLACEMENTS["partial in nodes"]
    with pytest.raises(hetconv.LayoutError) as error:
        hetconv.redistribute(torch.zeros(x.boxes[dist.get_rank()].shape), x, summands)
    return str(error.value)


def test_nothing_is_moved_to_summands_in_nodes() -> None:
    for error in on_ranks(WORLD, moved_to_summands):
        assert "summands in each of nodes (2, 1); give a sharded one" in error


def test_a_linear_layer_without_samples_refuses_a_slice_of_its_weight() -> None:
    split = Split("filter", (4, 4, 8), ((2, 1), (1, 1)))
    x = Layout.replicated((6,), 3)
    assert Linear((6,), 8).sharding((x,), split).output == Layout.replicated((8,), 3)


def slow_wire(batch: int) -> tuple[Any, ClusterProfile]:
    """Two nodes of unequal devices with 1 Gbit/s between, and convolutions of large images."""
    profile = ClusterProfile.from_devices(
        "V100-SXM2-32GB, 3xT4 / V100-SXM2-32GB, 3xT4",
        link="nvlink2",
        between="ethernet-25g",
    )
    shared = tuple(
        replace(w, s_per_byte=8e-9) if "card" in w.name else w for w in profile.shared
    )
    with torch.device("meta"):
        convs = [
            m
            for c in (64,) * 6
            for m in (nn.Conv2d(c, c, 3, padding=1), nn.BatchNorm2d(c), nn.ReLU())
        ]
        pooled = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
        model = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3), *convs, *pooled).eval()
        with torch.no_grad():
            graph = hetconv.capture(model, torch.empty(batch, 3, 768, 768))
    return graph, replace(profile, shared=shared)


def test_nodes_with_a_slow_wire_between_share_samples_and_split_them_within(
    tmp_path: Path,
) -> None:
    graph, profile = slow_wire(4)
    plan = hetconv.make_plan(graph, profile, mode="infer")
    flat = hetconv.make_plan(graph, replace(profile, nodes=()), mode="infer")
    assert plan.predicted is not None
    assert flat.predicted is not None
    assert sum(bool(s.nodes) for s in plan.splits.values()) >= 6
    assert flat.predicted.step_s >= 2 * plan.predicted.step_s
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_a_plan_says_what_its_nodes_share() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    split = Split("height", (3, 1, 2, 2), ((2, 5), (2, 3)))
    plan, other = (
        plan_of(model, {"0": s}, 4)
        for s in (split, replace(split, nodes=((2, 1), (2, 1))))
    )
    console = Console(record=True, width=160)
    show_plan(plan, console)
    assert show_diff(plan, other, console)
    said = console.export_text()
    bar = "█" * 8 + "▓" * 2 + "▒" * 3 + "░" * 3  # 15/32, 5/32, 6/32 and 6/32 of 16
    assert f"height  {bar} 3:1 | 2:2, samples 5:3" in said
    assert "height 3:1 | 2:2, samples 1:1" in said
    (layer,) = contents_of(ClusterProfile.from_devices("4xT4"), plan).layers
    assert (layer.kind, layer.sizes) == ("sample x height", "3:1 | 2:2, samples 5:3")


@pytest.mark.parametrize(
    "kinds", [("sample", "height"), ("height",), ("sample", "filter")]
)
def test_kinds_say_what_nodes_may_do(kinds: tuple[SplitKind, ...]) -> None:
    graph, profile = slow_wire(4)
    plan = hetconv.make_plan(graph, profile, mode="infer", kinds=kinds)
    assert {s.kind for s in plan.splits.values()} <= {*kinds, "replicate"}
    found = set(plan.alternatives or {})
    named = {
        f"uneven sample x {kind} split"
        for kind in KINDS_WITHIN_NODES
        if kind in kinds and "sample" in kinds
    }
    assert {name for name in found if " x " in name} == named


@pytest.mark.parametrize(
    "nodes", [((0, 2), (1, 3)), ((0,), (1,), (2,), (3,)), ((0, 1, 2, 3),)]
)
def test_nodes_that_have_no_two_levels_get_plans_of_one(
    nodes: tuple[tuple[int, ...], ...],
) -> None:
    graph = hetconv.capture(ResNet(), torch.zeros(4, 3, 32, 32))
    profile = replace(ClusterProfile.from_devices(["T4"] * 4), nodes=nodes)
    plan = hetconv.make_plan(graph, profile)
    assert not any(" x " in name for name in plan.alternatives or {})
    assert not any(split.nodes for split in plan.splits.values())
