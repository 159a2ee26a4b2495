"""Channel splits whose sums every rank gets whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hetconv
from hetconv.autotune.report.text import split_text
from hetconv.cost.estimator import estimate
from hetconv.errors import SplitError
from hetconv.operators.base import reduce_scattered
from hetconv.planner.make_plan import make_plan
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.device_model import DeviceModel, LinkModel
from hetconv.schemas.plan import Mode
from hetconv.sharding.layout import Layout
from hetconv.sharding.split import Split, SplitKind
from tests.equivalence import assert_same
from tests.laws.test_planned_bytes import CASES, sent_and_predicted
from tests.laws.test_serial_equivalence import RATIOS, trained
from tests.nets import NETS, splits_of
from tests.ops.test_epilogue_fusion import evaluated
from tests.spawn import on_ranks

MIXES: tuple[tuple[SplitKind, ...], ...] = (
    ("channel",),
    ("filter", "channel"),
    ("channel", "height"),
)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("mix", MIXES, ids="-".join)
def test_training(mix: tuple[SplitKind, ...], ratio: tuple[int, ...]) -> None:
    assert_same(on_ranks(len(ratio), trained, "resnet", mix, ratio, "sgd", 5, True))


@pytest.mark.parametrize("net", NETS)
def test_inference(net: str) -> None:
    assert_same(
        on_ranks(3, evaluated, net, ("filter", "channel", "channel"), (2, 3, 1), True)
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("weights", [(3, 1), (5, 2, 1)])
def test_predicted_bytes_are_sent_bytes(case: str, weights: tuple[int, ...]) -> None:
    modes: list[tuple[Mode, bool]] = [("train", True), ("infer", False)]
    for mode, input_gradient in modes:
        found = on_ranks(
            len(weights),
            sent_and_predicted,
            case,
            "channel",
            weights,
            mode,
            input_gradient,
            True,
        )
        assert all(sent == predicted for sent, predicted in found), mode


def normed() -> nn.Sequential:
    """Four convolutions; a norm and an activation after each but the last."""
    layers: list[nn.Module] = []
    for c, k in ((32, 64), (64, 32), (32, 64)):
        layers += [nn.Conv2d(c, k, 3, padding=1), nn.BatchNorm2d(k), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(64, 32, 3, padding=1))


def seconds_of_messages(flops_per_s: float = 1e30) -> ClusterProfile:
    """Of two devices, which compute in no time unless they are slow; each message takes
    a second, whatever it says.
    """
    device = DeviceModel("toy", "cpu", 1e12, {"float32": flops_per_s}, 1e30)
    return ClusterProfile((device, device), {"0-1": LinkModel(1.0, 0.0)})


def test_bytes_are_as_many_in_fewer_messages() -> None:
    model = normed().eval()
    with torch.no_grad():
        graph = hetconv.capture(model, torch.zeros(1, 32, 8, 8))
    sums, scattered = (
        estimate(
            graph,
            seconds_of_messages(),
            splits_of(model, ("filter", "channel"), (1, 1), whole),
            "infer",
        )[0]
        for whole in (True, False)
    )
    assert scattered.step_s == pytest.approx(3.0)  # scattered, gathered, and the result
    assert sums.step_s == pytest.approx(2.0)
    assert sums.sent_bytes == scattered.sent_bytes


def test_a_plan_has_them_where_messages_are_what_counts() -> None:
    graph = hetconv.capture(normed(), torch.zeros(1, 32, 8, 8))
    plan = make_plan(
        graph, seconds_of_messages(1e6), mode="train", kinds=("filter", "channel")
    )
    assert [split.kind for split in plan.splits.values()] == ["filter", "channel"] * 2
    assert plan.splits["3"].whole


def test_a_partial_sum_without_shares_is_wanted_whole() -> None:
    assert reduce_scattered(Layout.partial((3, 8, 2, 2), 2, ())) == Layout.replicated(
        (3, 8, 2, 2), 2
    )


@pytest.mark.parametrize(
    ("kind", "sizes", "nodes"),
    [
        ("filter", (1, 1), ()),
        ("replicate", (), ()),
        ("channel", (1, 1, 1), ((2, 1), (1, 1))),
    ],
)
def test_what_is_no_sum_of_one_level_is_refused(
    kind: SplitKind, sizes: Any, nodes: Any
) -> None:
    with pytest.raises(SplitError, match="no sum that could be whole"):
        Split(kind, sizes, nodes, whole=True)


def test_it_is_told() -> None:
    assert split_text(Split("channel", (3, 1), whole=True)) == "channel 3:1, whole sum"
