"""Ranks compute in the memory format of the program: filters are not reordered at each call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hetconv
from hetconv.planner.partition import whole_model
from tests.nets import plan_of
from tests.spawn import on_ranks

WORLD = 3
NETS = {
    "pooling": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(3, 2, 1), nn.Conv2d(4, 4, 1)
    ),
    "resampling": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 1),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Conv2d(4, 4, 1),
    ),
    "transposed": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.ConvTranspose2d(4, 4, 4, 2, 1), nn.Conv2d(4, 4, 1)
    ),
    "norms": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 1),
        nn.GroupNorm(2, 4),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.Conv2d(4, 4, 1),
    ),
}


class InputFormats(TorchDispatchMode):
    """Collects whether the inputs of convolutions are channels-last."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[bool] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.convolution.default and args[0].shape[2] > 1:
            self.found.append(hetconv.kernels.is_channels_last(args[0]))
        return func(*args, **(kwargs or {}))


def formats(make: str, channels_last: bool) -> list[bool]:
    model, x = NETS[make](), torch.randn(2, 3, 12, 12)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)
    splits = whole_model(
        hetconv.capture(model, x), "height", (2.0, 1.0, 1.0), ("height",)
    )
    split = hetconv.parallelize(model, plan_of(model, splits, WORLD))
    y: Tensor = split(x)
    with InputFormats() as seen:
        y = split(x)
    y.sum().backward()
    return seen.found


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("net", NETS)
def test_convolutions_read_the_memory_format_of_the_program(
    net: str, channels_last: bool
) -> None:
    for found in on_ranks(WORLD, formats, net, channels_last):
        assert found
        assert set(found) == {channels_last}
