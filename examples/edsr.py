"""EDSR, a small one: an ordinary model that knows nothing of hetconv.

Lim et al., Enhanced Deep Residual Networks for Single Image Super-Resolution, 2017.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

SCALE = 2


class Block(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv2(F.relu(self.conv1(x)))
        return x + y


class EDSR(nn.Module):
    """An image (N, 3, H, W) to one of twice the size (N, 3, 2H, 2W): bicubic
    interpolation plus what is learnt.

    The last layer starts at zero, so that training starts from bicubic interpolation.
    """

    def __init__(self, channels: int = 64, blocks: int = 8):
        super().__init__()
        self.head = nn.Conv2d(3, channels, 3, padding=1)
        layers = [
            *(Block(channels) for _ in range(blocks)),
            nn.Conv2d(channels, channels, 3, padding=1),
        ]
        self.body = nn.Sequential(*layers)
        self.tail = nn.Conv2d(channels, 3 * SCALE**2, 3, padding=1)
        for p in self.tail.parameters():
            nn.init.zeros_(p)

    def forward(self, x: Tensor) -> Tensor:
        features = self.head(x)
        details = F.pixel_shuffle(self.tail(features + self.body(features)), SCALE)
        return F.interpolate(x, scale_factor=SCALE, mode="bicubic") + details
