"""What the benchmarks run on, as data."""

from __future__ import annotations

from dataclasses import dataclass

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
