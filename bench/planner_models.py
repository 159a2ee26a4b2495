"""Architectures that plans are computed for, as their papers and torchvision have them; built without weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from hetconv.graph import Graph
from hetconv.recorder import capture

CLASSES = 1000


def conv(c: int, k: int, kernel: int | tuple[int, int], stride: int = 1, *, relu: bool = True) -> nn.Sequential:
    """Convolution, norm and activation; it keeps the extent of an image at stride 1."""
    sides = (kernel, kernel) if isinstance(kernel, int) else kernel
    padding = sides[0] // 2, sides[1] // 2
    found = [nn.Conv2d(c, k, sides, stride, padding, bias=False), nn.BatchNorm2d(k)]
    return nn.Sequential(*found, *([nn.ReLU(inplace=True)] if relu else []))


def pooled(features: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, CLASSES)]


def alexnet() -> nn.Module:
    """Krizhevsky, One weird trick for parallelizing convolutional neural networks, 2014."""
    relu, pool = partial(nn.ReLU, inplace=True), partial(nn.MaxPool2d, 3, 2)
    return nn.Sequential(
        nn.Conv2d(3, 64, 11, 4, 2), relu(), pool(), nn.Conv2d(64, 192, 5, padding=2), relu(), pool(),
        nn.Conv2d(192, 384, 3, padding=1), relu(), nn.Conv2d(384, 256, 3, padding=1), relu(),
        nn.Conv2d(256, 256, 3, padding=1), relu(), pool(), nn.AdaptiveAvgPool2d(6), nn.Flatten(),
        nn.Dropout(), nn.Linear(9216, 4096), relu(), nn.Dropout(), nn.Linear(4096, 4096), relu(),
        nn.Linear(4096, CLASSES),
    )  # fmt: skip


class Bottleneck(nn.Module):
    def __init__(self, c: int, width: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            conv(c, width, 1), conv(width, width, 3, stride), conv(width, 4 * width, 1, relu=False)
        )
        self.skip = conv(c, 4 * width, 1, stride, relu=False) if c != 4 * width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x).add_(self.skip(x)).relu_()
        return y


def resnet(depths: Sequence[int]) -> nn.Module:
    """He et al., Deep residual learning for image recognition, 2015."""
    blocks: list[nn.Module] = []
    c = 64
    for stage, depth in enumerate(depths):
        for i in range(depth):
            blocks.append(Bottleneck(c, 64 << stage, 2 if stage and not i else 1))
            c = 256 << stage
    return nn.Sequential(conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1), *blocks, *pooled(c))


class Join(nn.Module):
    """The channels of what several branches make of the same image."""

    def __init__(self, *branches: nn.Module):
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def valid(c: int, k: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """As `conv`, without padding."""
    layers = nn.Conv2d(c, k, kernel, stride, bias=False), nn.BatchNorm2d(k), nn.ReLU(inplace=True)
    return nn.Sequential(*layers)


def chain(c: int, *steps: tuple[int, int | tuple[int, int]]) -> nn.Sequential:
    """Convolutions of so many filters with such kernels, one after the other."""
    layers = []
    for k, kernel in steps:
        layers.append(conv(c, k, kernel))
        c = k
    return nn.Sequential(*layers)


def _inception_35(c: int, pool: int) -> Join:
    pooling = nn.Sequential(nn.AvgPool2d(3, 1, 1), conv(c, pool, 1))
    return Join(conv(c, 64, 1), chain(c, (48, 1), (64, 5)), chain(c, (64, 1), (96, 3), (96, 3)), pooling)


def _inception_17(c: int, k: int) -> Join:
    across, down = (1, 7), (7, 1)
    short, long = ((k, 1), (k, across), (192, down)), ((k, 1), (k, down), (k, across), (k, down), (192, across))
    pooling = nn.Sequential(nn.AvgPool2d(3, 1, 1), conv(c, 192, 1))
    return Join(conv(c, 192, 1), chain(c, *short), chain(c, *long), pooling)


def _inception_8(c: int) -> Join:
    def crossed() -> Join:
        return Join(conv(384, 384, (1, 3)), conv(384, 384, (3, 1)))

    pooling = nn.Sequential(nn.AvgPool2d(3, 1, 1), conv(c, 192, 1))
    short = nn.Sequential(conv(c, 384, 1), crossed())
    return Join(conv(c, 320, 1), short, nn.Sequential(chain(c, (448, 1), (384, 3)), crossed()), pooling)


def inception() -> nn.Module:
    """Szegedy et al., Rethinking the Inception architecture, 2015: version 3, without the auxiliary classifier."""
    pool = partial(nn.MaxPool2d, 3, 2)
    to_17 = Join(valid(288, 384, 3, 2), nn.Sequential(chain(288, (64, 1), (96, 3)), valid(96, 96, 3, 2)), pool())
    factored = chain(768, (192, 1), (192, (1, 7)), (192, (7, 1)))
    ends = nn.Sequential(conv(768, 192, 1), valid(192, 320, 3, 2)), nn.Sequential(factored, valid(192, 192, 3, 2))
    return nn.Sequential(
        valid(3, 32, 3, 2), valid(32, 32, 3), conv(32, 64, 3), pool(), valid(64, 80, 1), valid(80, 192, 3), pool(),
        _inception_35(192, 32), _inception_35(256, 64), _inception_35(288, 64), to_17,
        *(_inception_17(768, k) for k in (128, 160, 160, 192)), Join(*ends, pool()),
        _inception_8(1280), _inception_8(2048),
        nn.AdaptiveAvgPool2d(1), nn.Dropout(), nn.Flatten(), nn.Linear(2048, CLASSES),
    )  # fmt: skip


class DenseBlock(nn.Module):
    """Every layer reads the channels of all before it."""

    def __init__(self, c: int, growth: int, depth: int):
        super().__init__()
        self.layers = nn.ModuleList(_dense_layer(c + i * growth, growth) for i in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        return torch.cat(found, 1)


def _dense_layer(c: int, growth: int) -> nn.Sequential:
    bottleneck = nn.BatchNorm2d(c), nn.ReLU(inplace=True), nn.Conv2d(c, 4 * growth, 1, bias=False)
    wide = nn.BatchNorm2d(4 * growth), nn.ReLU(inplace=True), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)
    return nn.Sequential(*bottleneck, *wide)


def densenet(depths: Sequence[int] = (6, 12, 24, 16), growth: int = 32) -> nn.Module:
    """Huang et al., Densely connected convolutional networks, 2016; with these depths DenseNet-121."""
    c = 2 * growth
    layers: list[nn.Module] = [conv(3, c, 7, 2), nn.MaxPool2d(3, 2, 1)]
    for i, depth in enumerate(depths):
        if i:
            shrink = nn.BatchNorm2d(c), nn.ReLU(inplace=True), nn.Conv2d(c, c // 2, 1, bias=False), nn.AvgPool2d(2)
            layers += shrink
            c //= 2
        layers.append(DenseBlock(c, growth, depth))
        c += depth * growth
    return nn.Sequential(*layers, nn.BatchNorm2d(c), nn.ReLU(inplace=True), *pooled(c))


class UNet(nn.Module):
    """Ronneberger et al., 2015, with padding and norms, as it is used today."""

    def __init__(self, classes: int = 2, width: int = 64, depth: int = 4):
        super().__init__()
        widths = [width << i for i in range(depth + 1)]
        self.down = nn.ModuleList(chain(a, (b, 3), (b, 3)) for a, b in zip([3, *widths], widths, strict=False))
        self.pool = nn.MaxPool2d(2)
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(widths[:-1]))
        self.up = nn.ModuleList(chain(2 * w, (w, 3), (w, 3)) for w in reversed(widths[:-1]))
        self.end = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for i, layer in enumerate(self.down):
            x = layer(self.pool(x) if i else x)
            skips.append(x)
        for grow, up, skip in zip(self.grow, self.up, reversed(skips[:-1]), strict=True):
            x = up(torch.cat([skip, grow(x)], 1))
        y: Tensor = self.end(x)
        return y


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "AlexNet": (alexnet, 224),
    "ResNet-50": (partial(resnet, (3, 4, 6, 3)), 224),
    "ResNet-152": (partial(resnet, (3, 8, 36, 3)), 224),
    "InceptionV3": (inception, 299),
    "DenseNet-121": (densenet, 224),
    "U-Net": (UNet, 256),
}
"""How each is made, and the side of the images that it is trained on."""


def captured(name: str, batch: int) -> Graph:
    """A training step of one of `MODELS`; nothing is allocated."""
    make, side = MODELS[name]
    with torch.device("meta"):
        return capture(make(), torch.empty(batch, 3, side, side))


def parameters(name: str) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in MODELS[name][0]().parameters())
