"""What the benchmarks run on, as data."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn


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
    return nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), *body, nn.Conv2d(channels, 12, 3, padding=1))


class Basic(nn.Module):
    """Two 3x3 convolutions and their sum with what went in; a 1x1 one brings that to the same shape."""

    def __init__(self, c: int, k: int, stride: int):
        super().__init__()
        self.a, self.b = nn.Conv2d(c, k, 3, stride, 1, bias=False), nn.Conv2d(k, k, 3, padding=1, bias=False)
        self.norm_a, self.norm_b = nn.BatchNorm2d(k), nn.BatchNorm2d(k)
        self.skip: nn.Module = nn.Identity()
        if stride > 1 or c != k:
            self.skip = nn.Sequential(nn.Conv2d(c, k, 1, stride, bias=False), nn.BatchNorm2d(k))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm_b(self.b(F.relu(self.norm_a(self.a(x)))))
        return F.relu(y + self.skip(x))


def resnet18() -> nn.Module:
    """He et al., Deep residual learning for image recognition, 2015."""
    widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
    blocks = [Basic(c, k, 2 if k > c else 1) for c, k in pairwise(widths)]
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))
