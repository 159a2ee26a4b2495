"""Convolutions of sequences and of volumes: what holds of images holds of them."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import hetconv
from hetconv.autotune.measure import overlap
from hetconv.errors import HetConvError, PlanError, SplitError
from hetconv.nn.layers import HET_CONVS, HetConv1d, HetConv2d, HetConv3d
from hetconv.operators.layers import CONVS
from hetconv.planner.partition import whole_model
from hetconv.schemas.plan import Plan
from hetconv.sharding.conv_spec import ConvSpec
from hetconv.sharding.rule import Gather
from hetconv.sharding.split import KINDS, Split, SplitKind
from tests.equivalence import (
    Differences,
    apart,
    assert_same,
    leaves,
    one_step,
    pair,
    train,
)
from tests.nets import OTHER_RANKS, Volumes, Waves, kinds_of, plan_of, splits_of
from tests.spawn import on_ranks

CUTS = [
    (net, kind)
    for net, (_, shape) in OTHER_RANKS.items()
    for kind in kinds_of(len(shape) - 2)
]
cuts = pytest.mark.parametrize(("net", "kind"), CUTS)


def trained(
    net: str, kinds: tuple[SplitKind, ...], ratio: tuple[int, ...], steps: int
) -> Differences:
    make, shape = OTHER_RANKS[net]
    return train(
        make, splits_of(make(), kinds, ratio), shape, len(ratio), "adam", steps
    )


@cuts
@pytest.mark.parametrize("ratio", [(3, 1), (2, 0, 1)])
def test_training_split_one_way(
    ratio: tuple[int, ...], net: str, kind: SplitKind
) -> None:
    assert_same(on_ranks(len(ratio), trained, net, (kind,), ratio, 2))


@pytest.mark.parametrize("net", OTHER_RANKS)
def test_training_with_every_kind(net: str) -> None:
    _, shape = OTHER_RANKS[net]
    assert_same(on_ranks(3, trained, net, kinds_of(len(shape) - 2)[::-1], (2, 3, 1), 2))


def inferred(net: str, kind: SplitKind, ratio: tuple[int, ...]) -> Differences:
    """What waits for its followers, and travels in chunks, as the plan says."""
    make, shape = OTHER_RANKS[net]
    serial, cut = pair(lambda: make().eval(), {}, len(ratio))
    x = torch.randn(shape)
    graph = hetconv.capture(serial, x)
    plan = hetconv.make_plan(
        graph, hetconv.ClusterProfile.from_devices(["cpu"] * len(ratio)), mode="infer"
    )
    assert any(layer.fusible for layer in plan.layers.values())
    plan = plan.with_splits(splits_of(serial, (kind,), ratio))
    with patch("hetconv.nn.parallelize.fusion_pays", return_value=True):
        cut = hetconv.parallelize(cut, plan, fuse=True)
    for layer in cut.modules():
        if isinstance(layer, HET_CONVS):
            layer.chunks = 2
    with torch.no_grad():
        found = zip(leaves(cut(x)), leaves(serial(x)), strict=True)
        return {f"output {i}": apart(a, b) for i, (a, b) in enumerate(found)}


@cuts
def test_inference_folds_what_follows(net: str, kind: SplitKind) -> None:
    assert_same(on_ranks(2, inferred, net, kind, (2, 1)))


@pytest.mark.parametrize("net", OTHER_RANKS)
def test_nothing_is_gathered(net: str) -> None:
    make, shape = OTHER_RANKS[net]
    graph = hetconv.capture(make(), torch.zeros(shape))
    assert not [node.function for node in graph.nodes if isinstance(node.op, Gather)]


def test_convolutions_are_layers_of_a_plan(tmp_path: Any) -> None:
    graph = hetconv.capture(Volumes(), torch.zeros(2, 2, 10, 8, 6))
    assert list(graph.layers) == ["a", "down", "deep", "out"]
    plan = hetconv.make_plan(
        graph, hetconv.ClusterProfile.from_devices(["cpu", "cpu@0.5"]), kinds=("depth",)
    )
    plan = plan.with_splits(whole_model(graph, "depth", (3, 1), KINDS))
    assert {split.kind for split in plan.splits.values()} == {"depth"}
    assert plan.splits["a"].sizes == (8, 2)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_kinds_that_a_model_lacks_are_no_candidates() -> None:
    graph = hetconv.capture(Waves(), torch.zeros(2, 2, 38))
    plan = hetconv.make_plan(
        graph, hetconv.ClusterProfile.from_devices(["cpu", "cpu@0.5"])
    )
    assert plan.alternatives is not None
    assert any("width" in name for name in plan.alternatives)
    assert not any("depth" in name or "height" in name for name in plan.alternatives)
    none = hetconv.make_plan(
        graph,
        hetconv.ClusterProfile.from_devices(["cpu", "cpu@0.5"]),
        kinds=("depth", "height"),
    )
    assert none.chosen == "replicated"


def refused(layer: int, kind: SplitKind) -> str:
    """By the layer, and by a plan for a model with it."""
    plain = CONVS[layer](2, 2, 3)
    with pytest.raises(SplitError) as error:
        HET_CONVS[layer](2, 2, 3, split=Split(kind, (1, 1)))
    with pytest.raises(SplitError):
        HET_CONVS[layer].from_conv(plain, Split(kind, (1, 1)))
    with pytest.raises(PlanError, match="has no"):
        plan_of(plain, {"": Split(kind, (1, 1))}, 2)
    return str(error.value)


@pytest.mark.parametrize(
    ("rank", "kind", "match"),
    [
        (
            1,
            "height",
            "a 1-D convolution has no height to split; use sample, width, filter or channel",
        ),
        (1, "depth", "a 1-D convolution has no depth"),
        (
            2,
            "depth",
            "a 2-D convolution has no depth to split; use sample, height, width, filter or channel",
        ),
    ],
)
def test_a_dimension_that_is_not_there_is_refused(
    rank: int, kind: SplitKind, match: str
) -> None:
    for message in on_ranks(2, refused, rank - 1, kind):
        assert match in message


def by_itself(rank: int, options: dict[str, Any], split: Split) -> Differences:
    """Built from arguments, on an input with and without a batch."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    cut = HET_CONVS[rank - 1](4, 6, 3, split=split, **options)
    plain = CONVS[rank - 1](4, 6, 3, **options)
    plain.load_state_dict(hetconv.full_state_dict(cut))
    x = torch.randn(2, 4, *(7, 6, 5)[-rank:])
    return one_step(plain, cut, x) | {"one sample": apart(cut(x[0]), plain(x[0]))}


@pytest.mark.parametrize(
    "options",
    [{"stride": 2, "padding": 1}, {"padding": "same", "groups": 2, "bias": False}],
)
@pytest.mark.parametrize("rank", [1, 3])
def test_a_convolution_by_itself(rank: int, options: dict[str, Any]) -> None:
    for split in (
        Split("filter", (4, 2)),
        Split("channel", (2, 2)),
        Split("width", (2, 3)),
        Split("width", (0, 1)),
    ):
        assert_same(on_ranks(2, by_itself, rank, options, split))


def wrong_uses() -> list[str]:
    said = []
    for call in (
        lambda: HetConv3d(2, 2, 3, split=Split("depth", (1,)))(torch.zeros(2, 2, 5)),
        lambda: HetConv1d(2, 2, 3, split=Split("width", (1,)))(torch.zeros(1, 3, 5)),
        lambda: HetConv1d(2, 2, 3, split=Split("width", (1,)))(torch.zeros(1, 2, 2)),
        lambda: HetConv3d.from_conv(nn.Conv2d(2, 2, 3), Split("depth", (1,))),  # type: ignore[arg-type]
        lambda: HetConv2d(2, 2, (3, 3, 3), split=Split("height", (1,))),
    ):
        with pytest.raises(HetConvError) as error:
            call()
        said.append(str(error.value))
    return said


def test_wrong_uses_are_refused_by_name() -> None:
    (said,) = on_ranks(1, wrong_uses)
    matches = (
        "HetConv3d expects (N, 2, D, H, W), but was given (2, 2, 5)",
        "HetConv1d expects (N, 2, W), but was given (1, 3, 5)",
        "smaller than the kernel",
        "from_conv takes a torch.nn.Conv3d, but was given a Conv2d",
        "",
    )
    assert all(
        match in message for match, message in zip(matches, said, strict=True)
    ), said


def in_half(rank: int, kind: SplitKind) -> float:
    """The relative error against float32, of output and gradients, where halos have one
    column of output.
    """
    truth = CONVS[rank - 1](8, 8, 3, padding=1)
    low = HET_CONVS[rank - 1].from_conv(truth.bfloat16(), Split(kind, (2, 1)))
    truth.float()
    x = torch.randn(2, 8, *(6, 5, 7)[-rank:]).bfloat16()
    a, b = x.clone().requires_grad_(), x.float().requires_grad_()
    y, expected = low(a), truth(b)
    y.float().square().sum().backward()
    expected.square().sum().backward()
    pairs = [(y, expected), (a.grad, b.grad), (low.weight.grad, truth.weight.grad)]
    return max(
        float((m.detach().float() - n.detach()).abs().max() / n.detach().abs().max())
        for m, n in pairs
    )


@pytest.mark.parametrize("kind", ["depth", "height", "width"])
def test_half_precision_of_volumes(kind: SplitKind) -> None:
    assert max(on_ranks(2, in_half, 3, kind)) <= 3e-2


def test_half_precision_of_sequences() -> None:
    assert max(on_ranks(2, in_half, 1, "width")) <= 3e-2


def chunked() -> bool:
    spec = ConvSpec(
        4, 3, (5, 4, 6), 8, (2, 3, 1), (1, 2, 1), ((1, 1), (1, 1), (0, 0)), (1, 1, 1)
    )
    one, more = (
        overlap.gathering(
            spec, Split("filter", (6, 2)), torch.device("cpu"), n, "channels_last"
        )()
        for n in (1, 3)
    )
    return one.shape == spec.y_shape and torch.allclose(one, more, atol=1e-5)


def test_a_batch_of_volumes_is_gathered_in_chunks() -> None:
    assert on_ranks(2, chunked) == [True, True]
