"""Models under splits of two levels: they train as on one device, and send the planned bytes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hetconv
from hetconv.cost.estimator import estimate
from hetconv.planner.partition import whole_model
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import LayerPlan, Mode, Plan
from hetconv.sharding.layer_rules import Conv, Linear
from hetconv.sharding.layout import spans
from hetconv.sharding.split import KINDS, Split, SplitKind
from hetconv.tracing.fusion import fusible_functions
from tests.equivalence import (
    Differences,
    apart,
    assert_same,
    captured,
    loss_of,
    one_step,
    same_state,
    train,
)
from tests.nets import (
    IMAGE_KINDS,
    NETS,
    OTHER_RANKS,
    Chain,
    operator_of,
    plan_of,
    split_of,
)
from tests.spawn import on_ranks
from tests.strategies import weights
from tests.zoo import ZOO


class Nodes(NamedTuple):
    """Ranks of each node, its proportion of the samples, and proportions within, of every rank."""

    ranks: tuple[int, ...]
    samples: tuple[int, ...]
    within: tuple[int, ...]


CLUSTERS = {
    "two and two": Nodes((2, 2), (3, 1), (5, 2, 1, 1)),
    "one rank sits out": Nodes((2, 2), (1, 2), (1, 0, 3, 2)),
    "three and one": Nodes((3, 1), (2, 1), (2, 1, 1, 1)),
    "one node sits out": Nodes((2, 1, 1), (1, 0, 1), (1, 2, 1, 1)),
}
MIXES: tuple[tuple[SplitKind, ...], ...] = (
    ("height",),
    ("filter",),
    ("channel",),
    ("width", "filter", "channel", "height"),
)


def in_nodes(op: Conv | Linear, kind: SplitKind, nodes: Nodes) -> Split:
    parts = [split_of(op, kind, nodes.within[a:b]) for a, b in spans(nodes.ranks)]
    sizes = tuple(size for part in parts for size in part.sizes)
    return Split(
        parts[0].kind, sizes, tuple(zip(nodes.ranks, nodes.samples, strict=True))
    )


def operators(model: nn.Module) -> dict[str, Conv | Linear]:
    return {
        name: op
        for name, layer in model.named_modules()
        if (op := operator_of(layer)) is not None
    }


def splits_of(
    model: nn.Module, kinds: Sequence[SplitKind], nodes: Nodes
) -> dict[str, Split]:
    """Every convolution and linear of a model, the kinds taken in turn."""
    return {
        n: in_nodes(op, kinds[i % len(kinds)], nodes)
        for i, (n, op) in enumerate(operators(model).items())
    }


def trained(
    net: str, kinds: tuple[SplitKind, ...], cluster: str, optimizer: str
) -> Differences:
    make, shape = (NETS | OTHER_RANKS)[net]
    return train(
        make, splits_of(make(), kinds, CLUSTERS[cluster]), shape, 4, optimizer, 2
    )


@pytest.mark.parametrize("kinds", MIXES, ids="-".join)
@pytest.mark.parametrize("net", NETS)
def test_training(net: str, kinds: tuple[SplitKind, ...]) -> None:
    for cluster in ("two and two", "one rank sits out"):
        assert_same(on_ranks(4, trained, net, kinds, cluster, "adam"))


@pytest.mark.parametrize("cluster", ["three and one", "one node sits out"])
@pytest.mark.parametrize("kinds", MIXES, ids="-".join)
def test_training_with_a_rank_alone_in_its_node(
    kinds: tuple[SplitKind, ...], cluster: str
) -> None:
    for net in ("resnet", "chain", "mobile"):
        assert_same(on_ranks(4, trained, net, kinds, cluster, "sgd"))


@pytest.mark.parametrize(
    ("net", "kind"), [("waves", "width"), ("volumes", "depth"), ("volumes", "channel")]
)
def test_training_on_sequences_and_volumes(net: str, kind: SplitKind) -> None:
    assert_same(on_ranks(4, trained, net, (kind,), "two and two", "adam"))


@st.composite
def mixed(draw: st.DrawFn) -> list[tuple[SplitKind, Nodes | tuple[int, ...]]]:
    """For the layers in turn: a kind within any nodes, or in one level."""
    found: list[tuple[SplitKind, Nodes | tuple[int, ...]]] = []
    for _ in range(draw(st.integers(1, 4))):
        if draw(st.integers(0, 2)):
            ranks = draw(st.sampled_from([(2, 2), (1, 3), (3, 1), (1, 2, 1)]))
            within = tuple(n for count in ranks for n in draw(weights(count)))
            kind = draw(st.sampled_from(["height", "width", "filter", "channel"]))
            found.append((kind, Nodes(ranks, draw(weights(len(ranks))), within)))
        else:
            found.append((draw(st.sampled_from(IMAGE_KINDS)), draw(weights(4))))
    return found


def trained_mixed(net: str, ways: list[tuple[SplitKind, Any]]) -> Differences:
    make, shape = NETS[net]
    splits = {}
    for i, (name, op) in enumerate(operators(make()).items()):
        kind, how = ways[i % len(ways)]
        splits[name] = (
            in_nodes(op, kind, how)
            if isinstance(how, Nodes)
            else split_of(op, kind, how)
        )
    return train(make, splits, shape, 4, "sgd", 1)


@settings(max_examples=12)
@given(st.sampled_from(["resnet", "unet", "mobile", "chain"]), mixed())
def test_training_with_any_mix_of_levels(
    net: str, ways: list[tuple[SplitKind, Any]]
) -> None:
    assert_same(on_ranks(4, trained_mixed, net, ways))


def fused(kinds: tuple[SplitKind, ...], cluster: str) -> Differences:
    """In evaluation, with batch norms, residuals and activations computed as
    convolutions store their results.
    """
    make, shape = NETS["resnet"]
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    serial, x = make().eval(), torch.randn(shape)
    with torch.no_grad():
        following = fusible_functions(hetconv.capture(serial, x))
        plan = plan_of(
            serial, splits_of(serial, kinds, CLUSTERS[cluster]), 4, following
        )
        with patch("hetconv.nn.parallelize.fusion_pays", return_value=True):
            cut = hetconv.parallelize(copy.deepcopy(serial), plan, fuse=True)
        return {"output": apart(cut(x), serial(x)), "again": apart(cut(x), serial(x))}


@pytest.mark.parametrize("kinds", MIXES, ids="-".join)
def test_fused_inference(kinds: tuple[SplitKind, ...]) -> None:
    for cluster in CLUSTERS:
        assert_same(on_ranks(4, fused, kinds, cluster))


def resumed(folder: str) -> Differences:
    """Two steps with clipped gradients, saved after the first under one split and taken
    up again under another.
    """
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    models = [Chain() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    ways = (
        (("filter", "channel"), "two and two"),
        (("channel", "width", "filter"), "one rank sits out"),
    )
    splits = [splits_of(models[0], kinds, CLUSTERS[name]) for kinds, name in ways]
    data, norms = torch.randn(2, 4, 4, 16, 16), []
    first = [
        models[0],
        hetconv.parallelize(models[1], plan_of(models[1], splits[0], 4)),
    ]
    optimizers = [torch.optim.Adam(model.parameters()) for model in first]
    for model, optimizer in zip(first, optimizers, strict=True):
        norms.append(stepped(model, optimizer, data[0]))
    hetconv.save_checkpoint(folder, first[1], optimizers[1])
    again = Chain()
    again = hetconv.parallelize(again, plan_of(again, splits[1], 4))
    optimizer = torch.optim.Adam(again.parameters())
    hetconv.load_checkpoint(folder, again, optimizer)
    norms += [
        stepped(first[0], optimizers[0], data[1]),
        stepped(again, optimizer, data[1]),
    ]
    return same_state(first[0], again) | {
        "norm": apart(norms[0], norms[1]),
        "second norm": apart(norms[2], norms[3]),
    }


def stepped(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor
) -> torch.Tensor:
    """The norm of the gradients before they were clipped."""
    optimizer.zero_grad()
    loss_of(model(x)).backward()
    norm = hetconv.clip_grad_norm_(model, 1.0)
    optimizer.step()
    return norm


def test_slices_that_overlap_are_clipped_saved_and_loaded_once(tmp_path: Path) -> None:
    assert_same(on_ranks(4, resumed, str(tmp_path / "checkpoint")))


def of_others(name: str) -> Differences:
    make, shape = ZOO[name]
    torch.manual_seed(0)
    with torch.no_grad():
        graph = hetconv.capture(make().float(), torch.zeros(shape))
    splits = whole_model(graph, "height", (5, 2, 1, 1), KINDS, (2, 2))
    layers = {layer: LayerPlan(op, splits[layer]) for layer, op in graph.layers.items()}
    assert sum(bool(split.nodes) for split in splits.values()) > len(splits) // 2
    serial = make().double()
    cut = hetconv.parallelize(
        copy.deepcopy(serial),
        Plan(("cpu",) * 4, "train", name, (shape,), layers, "by hand"),
    )
    return one_step(serial, cut, torch.randn(shape, dtype=torch.float64)) | same_state(
        serial, cut
    )


@pytest.mark.parametrize("name", ["transformers ConvNeXt", "transformers RegNet"])
def test_models_that_others_wrote(name: str) -> None:
    assert_same(on_ranks(4, of_others, name))


def sent_and_planned(
    net: str, kinds: tuple[SplitKind, ...], cluster: str, mode: Mode
) -> tuple[object, object]:
    """Bytes to every other rank in one step: as counted, and as the plan says."""
    make, shape = NETS[net]
    torch.manual_seed(0)
    model = make().train(mode == "train")
    x = torch.randn(shape, requires_grad=True)
    splits = splits_of(model, kinds, CLUSTERS[cluster])
    graph = captured(make, shape, mode, input_gradient=True)
    predicted, _ = estimate(
        graph, ClusterProfile.from_devices(["cpu"] * 4, link="host"), splits, mode
    )
    model = hetconv.parallelize(model, plan_of(model, splits, 4))
    with hetconv.count_sent() as sent, torch.set_grad_enabled(mode == "train"):
        y = model(x)
        if mode == "train":
            loss_of(y).backward()
    return dict(sent), {
        r: size for r, size in enumerate(predicted.sent_bytes[dist.get_rank()]) if size
    }


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("kinds", MIXES, ids="-".join)
def test_planned_bytes_are_sent_bytes(kinds: tuple[SplitKind, ...], mode: Mode) -> None:
    for net, cluster in [
        *(("resnet", cluster) for cluster in CLUSTERS),
        ("mobile", "two and two"),
    ]:
        for sent, planned in on_ranks(4, sent_and_planned, net, kinds, cluster, mode):
            assert sent == planned, (net, cluster)
