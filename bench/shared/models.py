"""Models that the benchmarks run: a residual stack of their own, and networks of
torchvision and MONAI by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.shared.torchvision_operators import declare_operators
from hetconv.tracing.graph import Graph
from hetconv.tracing.tracer import capture


@dataclass(frozen=True)
class Stack:
    """A residual stack of 3x3 convolutions on one square image, as in super-resolution."""

    blocks: int = 6
    channels: int = 64
    size: int = 256


class Block(nn.Module):
    """x + conv(relu(conv(x)))"""

    def __init__(self, channels: int):
        super().__init__()
        self.a = nn.Conv2d(channels, channels, 3, padding=1)
        self.b = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(F.relu(self.a(x)))
        return x + y


def stack(blocks: int, channels: int) -> nn.Module:
    """3 -> channels, the blocks, channels -> 12."""
    body = [Block(channels) for _ in range(blocks)]
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1),
        *body,
        nn.Conv2d(channels, 12, 3, padding=1),
    )


def torchvision_model(name: str, **options: object) -> nn.Module:
    """A model of ``torchvision.models`` with random weights."""
    declare_operators()
    import torchvision

    model: nn.Module = getattr(torchvision.models, name)(**options)
    return model


def unet(width: int = 64) -> nn.Module:
    """MONAI's BasicUNet of images: four times halved and ``width`` channels at full
    size, with batch norms.
    """
    from monai.networks.nets.basic_unet import BasicUNet

    features = (width, 2 * width, 4 * width, 8 * width, 16 * width, width)
    model: nn.Module = BasicUNet(
        spatial_dims=2,
        in_channels=3,
        out_channels=2,
        features=features,
        act="relu",
        norm="batch",
    )
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "AlexNet": (partial(torchvision_model, "alexnet"), 224),
    "ResNet-50": (partial(torchvision_model, "resnet50"), 224),
    "ResNet-152": (partial(torchvision_model, "resnet152"), 224),
    "InceptionV3": (
        partial(
            torchvision_model, "inception_v3", aux_logits=False, init_weights=False
        ),
        299,
    ),
    "DenseNet-121": (partial(torchvision_model, "densenet121"), 224),
    "U-Net": (unet, 256),
}
"""How each is made, and the side of the images that it is trained on."""


def captured(name: str, batch: int) -> Graph:
    """The graph of a training step of one of `MODELS`, without memory for it."""
    make, side = MODELS[name]
    with torch.device("meta"):
        return capture(make(), torch.empty(batch, 3, side, side))
