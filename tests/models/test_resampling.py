"""A net of everything that gives images another size, on shards: equal to the whole, and
sends the planned bytes.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import hetconv
from hetconv.cost.estimator import estimate
from hetconv.planner.partition import whole_model
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.sharding.split import KINDS, SplitKind
from tests.equivalence import TOLERANCE, Differences, loss_of, one_step, pair
from tests.spawn import on_ranks


class Resampling(nn.Module):
    """A U-shaped net of everything here."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect")
        self.pool = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.inner = nn.Conv2d(8, 8, 3, padding=1, padding_mode="replicate")
        self.last = nn.Conv2d(40, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        z = self.inner(self.pool(y))
        z = F.interpolate(z, scale_factor=2) + F.interpolate(
            z, scale_factor=2, mode="bilinear"
        )
        z = F.interpolate(z, size=y.shape[2:], mode="bicubic", align_corners=True) + y
        z = torch.cat([F.pixel_unshuffle(z, 2), F.avg_pool2d(y, 2, ceil_mode=True)], 1)
        return F.adaptive_max_pool2d(self.last(F.pad(z, (0, 1, 0, 1))), 1)


def step_in_parts(
    kind: SplitKind, weights: tuple[int, ...]
) -> tuple[Differences, dict[int, int], dict[int, int]]:
    """Differences from one device, and the bytes to every other rank as counted and as planned."""
    world, me = len(weights), dist.get_rank()
    torch.manual_seed(1)
    x = torch.randn(2, 3, 20, 18, dtype=torch.float64)
    graph = hetconv.capture(Resampling().double(), x.requires_grad_())
    splits = dict(whole_model(graph, kind, weights, KINDS).items())
    predicted, _ = estimate(
        graph,
        ClusterProfile.from_devices(["cpu"] * world, link="host"),
        splits,
        "train",
    )
    serial, cut = pair(Resampling, splits, world)
    differences = one_step(serial, cut, x)
    with hetconv.count_sent() as sent:
        loss_of(cut(x)).backward()
    return (
        differences,
        dict(sent),
        {r: size for r, size in enumerate(predicted.sent_bytes[me]) if size},
    )


@pytest.mark.parametrize("weights", [(3, 1), (5, 2, 1), (1, 0, 2)])
@pytest.mark.parametrize("kind", ["sample", "filter", "channel", "height", "width"])
def test_a_net_in_parts_equals_the_whole_and_sends_what_was_planned(
    kind: SplitKind, weights: tuple[int, ...]
) -> None:
    for differences, sent, predicted in on_ranks(
        len(weights), step_in_parts, kind, weights
    ):
        assert {k: v for k, v in differences.items() if not v <= TOLERANCE} == {}
        assert sent == predicted
