"""The bytes that a plan predicts are the bytes that its ranks send."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hetconv
from hetconv.cost.estimator import estimate
from hetconv.planner.partition import whole_model, with_whole_sum
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import Mode
from hetconv.sharding.split import KINDS, SplitKind
from tests.equivalence import captured, loss_of
from tests.nets import OTHER_RANKS, MobileBlock, Peaks, ResNet, UNet, kinds_of, plan_of
from tests.spawn import on_ranks


def few_averages() -> nn.Module:
    """Averages of so few windows that ranks add up their own rows."""
    conv, pool = nn.Conv2d(3, 4, 3, padding=1), nn.AdaptiveAvgPool2d((3, 2))
    return nn.Sequential(conv, pool, nn.Flatten(), nn.Linear(24, 3))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet": (ResNet, (2, 3, 45, 40)),
    "unet": (UNet, (2, 3, 20, 24)),
    "mobile": (MobileBlock, (2, 4, 12, 11)),
    "few averages": (few_averages, (2, 3, 40, 33)),
    "peaks": (Peaks, (2, 3, 11, 10)),
} | OTHER_RANKS


CUTS = [
    (case, kind)
    for case, (_, shape) in CASES.items()
    for kind in kinds_of(len(shape) - 2)
]


def sent_and_predicted(
    case: str,
    kind: SplitKind,
    weights: tuple[int, ...],
    mode: Mode,
    input_gradient: bool,
    whole: bool = False,
) -> tuple[dict[int, int], dict[int, int]]:
    """Bytes to every other rank in one step: as counted, and as the plan says."""
    make, shape = CASES[case]
    model = make().train(mode == "train")
    x = torch.randn(shape, requires_grad=input_gradient)
    world, rank = len(weights), dist.get_rank()
    graph = captured(make, shape, mode, input_gradient)
    splits = (
        dict(whole_model(graph, kind, weights, KINDS).items())
        if kind != "replicate"
        else {}
    )
    splits = (
        {name: with_whole_sum(split) for name, split in splits.items()}
        if whole
        else splits
    )
    predicted, _ = estimate(
        graph, ClusterProfile.from_devices(["cpu"] * world, link="host"), splits, mode
    )
    model = hetconv.parallelize(model, plan_of(model, splits, world))
    with hetconv.count_sent() as sent, torch.set_grad_enabled(mode == "train"):
        y = model(x)
        if mode == "train":
            loss_of(y).backward()
    return dict(sent), {
        r: size for r, size in enumerate(predicted.sent_bytes[rank]) if size
    }


@pytest.mark.parametrize(
    ("case", "kind", "weights"),
    [(*cut, weights) for cut in CUTS for weights in ((3, 1), (5, 2, 1), (1, 0, 2))]
    + [("resnet", kind, (2, 1, 1, 0)) for kind in ("sample", "height", "width")],
)
def test_predicted_bytes_are_sent_bytes(
    case: str, kind: SplitKind, weights: tuple[int, ...]
) -> None:
    modes: list[tuple[Mode, bool]] = [
        ("train", False),
        ("train", True),
        ("infer", False),
    ]
    for mode, input_gradient in modes:
        for sent, predicted in on_ranks(
            len(weights), sent_and_predicted, case, kind, weights, mode, input_gradient
        ):
            assert sent == predicted, mode
