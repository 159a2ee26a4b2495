"""Gradients that PyTorch's operators get have the memory format that they have on one device.

`torch.nn.functional.instance_norm` of a single sample takes a channels-last gradient
for a contiguous one, and then gives a wrong gradient (PyTorch 2.13).
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetconv
from hetconv.sharding.split import Split, SplitKind
from tests.equivalence import Differences, assert_same, one_step
from tests.nets import plan_of
from tests.spawn import on_ranks


class Watch(torch.autograd.Function):
    """Notes whether the gradient that comes back is contiguous."""

    seen: list[bool] = []  # noqa: RUF012 - of the process

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        Watch.seen.append(g.is_contiguous())
        return g


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)
        self.norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(Watch.apply(self.norm(self.a(x)).relu()))
        return y


def one(kind: SplitKind, sizes: dict[str, tuple[int, int]]) -> Differences:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    serial = Net()
    cut = hetconv.parallelize(
        copy.deepcopy(serial),
        plan_of(serial, {n: Split(kind, s) for n, s in sizes.items()}, 2),
    )
    Watch.seen.clear()
    found = one_step(serial, cut, torch.randn(1, 3, 6, 6))
    return found | {
        "contiguous": 0.0 if all(Watch.seen) and len(Watch.seen) == 2 else 1.0
    }


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("height", {"a": (2, 1), "b": (2, 1)}),
        ("filter", {"a": (3, 1), "b": (2, 1)}),
        ("channel", {"a": (2, 1), "b": (1, 3)}),
    ],
)
def test_gradients_of_plain_tensors_lie_as_these_do(
    kind: SplitKind, sizes: dict[str, tuple[int, int]]
) -> None:
    assert_same(on_ranks(2, one, kind, sizes))
