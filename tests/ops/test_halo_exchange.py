"""Halos that are joined to own rows and halos that are convolved apart from them: the
same results, asked by size.
"""

from __future__ import annotations

import copy
from math import inf

import pytest
import torch
from torch import Tensor, nn

import hetconv
from hetconv.cost.operator_cost import seams_of
from hetconv.sharding import layer_rules
from hetconv.sharding.conv_spec import ConvSpec
from hetconv.sharding.layer_rules import Conv, concatenates_halos, exchanges_halos
from hetconv.sharding.layout import Layout
from hetconv.sharding.split import Split, SplitKind
from tests.equivalence import Differences, assert_same, one_step
from tests.nets import plan_of, splits_of
from tests.spawn import on_ranks


def conv(channels: int, rows: int, kernel: tuple[int, int] = (3, 3)) -> Conv:
    pads = tuple((k // 2, k // 2) for k in kernel)
    return Conv(
        ConvSpec(1, channels, (rows, rows), channels, kernel, (1, 1), pads, (1, 1))
    )


@pytest.mark.parametrize(
    ("channels", "rows", "joined"), [(512, 7, True), (256, 32, True), (128, 64, False)]
)
def test_small_maps_of_many_channels_join(
    channels: int, rows: int, joined: bool
) -> None:
    op, split = conv(channels, rows), Split("height", (rows - 2, 2))
    x = Layout.sharded(op.spec.x_shape, 2, split.sizes)
    assert concatenates_halos(op, "height") is joined
    assert exchanges_halos(op, x, split) is not joined
    assert (seams_of(op, split, op.sharding((x,), split)) is None) is joined


def test_what_has_no_halos_joins_none() -> None:
    assert not concatenates_halos(conv(512, 7, (1, 1)), "height")
    op = conv(512, 7, (1, 3))
    assert not concatenates_halos(op, "height")
    assert concatenates_halos(op, "width")
    assert not concatenates_halos(op, "filter")


class Net(nn.Module):
    """Strides, dilation, an even kernel, and a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(3, 4, 3, padding=1),
            nn.Conv2d(4, 6, 5, stride=2, padding=2),
        )
        self.third, self.fourth = (
            nn.Conv2d(6, 6, 3, padding=2, dilation=2),
            nn.Conv2d(6, 4, (4, 2), padding=(2, 1)),
        )
        self.skip = nn.Conv2d(6, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.second(torch.relu(self.first(x))))
        x = torch.relu(self.third(x)) + self.skip(x)
        y: Tensor = self.fourth(x)
        return y


def stepped(
    joined: float, kind: SplitKind, ratio: tuple[int, ...], last: bool
) -> Differences:
    torch.manual_seed(0)
    serial, x = Net().double(), torch.randn(2, 3, 18, 15, dtype=torch.float64)
    if last:
        serial, x = (t.to(memory_format=torch.channels_last) for t in (serial, x))  # type: ignore[call-overload]
    was, layer_rules.MIN_FILTER_TO_INPUT_RATIO = (
        layer_rules.MIN_FILTER_TO_INPUT_RATIO,
        joined,
    )
    try:
        cut = copy.deepcopy(serial)
        cut = hetconv.parallelize(
            cut, plan_of(cut, splits_of(cut, (kind,), ratio), len(ratio))
        )
        return one_step(serial, cut, x)
    finally:
        layer_rules.MIN_FILTER_TO_INPUT_RATIO = was


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("ratio", [(3, 1), (1, 0, 2), (4, 2, 3)])
@pytest.mark.parametrize("kind", ["height", "width"])
@pytest.mark.parametrize("joined", [0.0, inf])
def test_both_ways_train_as_one_device(
    joined: float, kind: SplitKind, ratio: tuple[int, ...], last: bool
) -> None:
    assert_same(on_ranks(len(ratio), stepped, joined, kind, ratio, last))
