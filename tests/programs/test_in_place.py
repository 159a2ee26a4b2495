"""Activations in place right after a split layer, as AlexNet, VGG and MobileNet have them."""

from __future__ import annotations

import copy
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import hetconv
from hetconv.sharding.split import Split, SplitKind
from tests.equivalence import Differences, assert_same, one_step
from tests.nets import plan_of
from tests.spawn import on_ranks

Mode = Literal["train", "eval", "infer"]
ACTIVATIONS = (nn.ReLU, nn.Hardswish, nn.Dropout, nn.LeakyReLU, nn.SiLU, nn.ELU)


class Net(nn.Module):
    def __init__(self, activation: type[nn.Module], layer: str) -> None:
        super().__init__()
        self.conv, self.act = nn.Conv2d(3, 6, 3, padding=1), activation(inplace=True)
        self.linear, self.act2 = nn.Linear(6, 4), activation(inplace=True)
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.conv(x)) if self.layer == "conv" else self.conv(x)
        z = self.linear(y.movedim(1, -1) if self.layer == "pixels" else y.mean((2, 3)))
        out: Tensor = self.act2(z)
        return out


def differences(
    activation: type[nn.Module], layer: str, splits: dict[str, Split], mode: Mode
) -> Differences:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    serial = Net(activation, layer).train(mode == "train")
    if activation is nn.Dropout:
        serial.act.p = serial.act2.p = 0.0  # both draw otherwise
    cut = hetconv.parallelize(copy.deepcopy(serial), plan_of(serial, splits, 2))
    x = torch.randn(3, 3, 7, 5)
    if mode != "infer":
        return one_step(serial, cut, x)
    with torch.inference_mode():
        return {"output": float((cut(x) - serial(x)).abs().max())}


def all_activations(
    layer: str, kind: SplitKind, sizes: tuple[int, ...], mode: Mode
) -> Differences:
    splits = (
        {"linear": Split(kind, sizes)}
        if layer != "conv"
        else {"conv": Split(kind, sizes)}
    )
    return {
        f"{activation.__name__} {name}": value
        for activation in ACTIVATIONS
        for name, value in differences(activation, layer, splits, mode).items()
    }


@pytest.mark.parametrize("mode", ["train", "eval", "infer"])
@pytest.mark.parametrize(
    ("layer", "kind", "sizes"),
    [
        ("conv", "filter", (4, 2)),
        ("conv", "filter", (6, 0)),
        ("conv", "channel", (2, 1)),
        ("conv", "height", (2, 1)),
        ("conv", "sample", (2, 1)),
        ("vectors", "filter", (3, 1)),
        ("vectors", "filter", (0, 4)),
        ("vectors", "channel", (4, 2)),
        ("vectors", "sample", (1, 2)),
        ("vectors", "sample", (0, 1)),
        ("pixels", "filter", (3, 1)),
        ("pixels", "sample", (2, 1)),
        ("pixels", "channel", (5, 1)),
    ],
)
def test_what_follows_a_split_layer_may_write_to_its_result(
    layer: str, kind: SplitKind, sizes: tuple[int, ...], mode: Mode
) -> None:
    assert_same(on_ranks(2, all_activations, layer, kind, sizes, mode))
