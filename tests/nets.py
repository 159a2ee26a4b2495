"""Small models in the shapes that people use, and plans for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetconv.nn.layers import PlainConv
from hetconv.operators.layers import conv_spec
from hetconv.planner.partition import with_whole_sum
from hetconv.schemas.plan import LayerPlan, Plan
from hetconv.sharding.layer_rules import Conv, Linear
from hetconv.sharding.layout import apportion
from hetconv.sharding.split import KINDS, REPLICATE, SPATIAL_KINDS, Split, SplitKind


def kinds_of(rank: int) -> tuple[SplitKind, ...]:
    """The kinds that a net on (N, C, ...) with so many spatial dimensions can be cut by."""
    return tuple(kind for kind in KINDS if SPATIAL_KINDS.get(kind, 0) <= rank)


IMAGE_KINDS = kinds_of(2)


class Block(nn.Module):
    """A residual block; ``+=`` and ReLU write in place."""

    def __init__(self, c: int, k: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = (
            nn.Conv2d(c, k, 3, stride, 1, bias=False),
            nn.BatchNorm2d(k),
        )
        self.conv2, self.bn2 = nn.Conv2d(k, k, 3, 1, 1, bias=False), nn.BatchNorm2d(k)
        self.down = (
            nn.Sequential(nn.Conv2d(c, k, 1, stride, bias=False), nn.BatchNorm2d(k))
            if c != k
            else None
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.down is None else self.down(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += shortcut
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn, self.pool = (
            nn.Conv2d(3, 8, 7, 2, 3, bias=False),
            nn.BatchNorm2d(8),
            nn.MaxPool2d(3, 2, 1),
        )
        self.blocks = nn.Sequential(Block(8, 8), Block(8, 12, 2))
        self.average, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.pool(torch.relu(self.bn(self.stem(x)))))
        return self.head(torch.flatten(self.average(x), 1))


class UNet(nn.Module):
    """Down, up, and a concatenated skip; one layer per common option."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (
            nn.Conv2d(3, 6, 3, padding=1),
            nn.Conv2d(6, 8, 3, stride=2, padding=1),
        )
        self.c, self.d = (
            nn.Conv2d(8, 8, 3, padding=2, dilation=2),
            nn.Conv2d(14, 6, 3, padding=1),
        )
        self.out = nn.Conv2d(6, 2, 1)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.silu(self.a(x))
        deep = F.gelu(self.norm(self.c(F.leaky_relu(self.b(skip), 0.1))))
        deep = F.interpolate(deep, size=skip.shape[2:], mode="nearest")
        return torch.sigmoid(self.out(F.relu(self.d(torch.cat([deep, skip], 1)))))


class MobileBlock(nn.Module):
    """Expansion, depthwise convolution, squeeze and excitation, projection."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.depthwise = (
            nn.Conv2d(4, 12, 1),
            nn.Conv2d(12, 12, 3, padding=1, groups=12, bias=False),
        )
        self.bn = nn.BatchNorm2d(12)
        self.squeeze, self.excite = nn.Conv2d(12, 3, 1), nn.Conv2d(3, 12, 1)
        self.project = nn.Conv2d(12, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self.bn(self.depthwise(F.relu6(self.expand(x)))))
        y = y * torch.sigmoid(
            self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1))))
        )
        return x + self.project(y)


class SuperResolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = (
            nn.Conv2d(3, 8, 5, padding=2),
            nn.Conv2d(8, 8, 3, padding=1),
        )
        self.tail = nn.Conv2d(8, 12, 3, padding=1)
        self.scale = nn.Parameter(torch.full((8, 1, 1), 0.5))
        self.shuffle = nn.PixelShuffle(2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(x)
        y = y + self.scale * torch.tanh(self.body(y))
        return torch.clamp(self.shuffle(self.tail(y)) * 0.5 + 0.1, -1, 1)


class Chain(nn.Module):
    """Convolutions with nothing but a ReLU between them, and linears at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (
            nn.Conv2d(4, 8, 3, padding=1),
            nn.Conv2d(8, 6, 3, padding=1),
        )
        self.three = nn.Conv2d(6, 4, 3, stride=2, padding=1)
        self.pool = nn.AvgPool2d(2)
        self.hidden, self.head = nn.Linear(64, 10), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.pool(self.three(F.relu(self.two(F.relu(self.one(x))))))
        return self.head(F.relu(self.hidden(torch.flatten(y, 1))))


class Twice(nn.Module):
    """One convolution called twice, and known by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.again = self.conv

    def forward(self, x: Tensor) -> Tensor:
        return self.again(F.relu(self.conv(F.relu(self.conv(x)))))


class Volumes(nn.Module):
    """A 3-D U-Net: strided down, transposed up, a concatenated skip, norms, a pool, PReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = (
            nn.Conv3d(2, 4, (3, 1, 3), padding="same", bias=False),
            nn.BatchNorm3d(4),
        )
        self.down, self.act = nn.Conv3d(4, 6, 3, 2, 1, bias=False), nn.PReLU(6)
        self.deep, self.group = (
            nn.Conv3d(6, 6, 3, padding=2, dilation=2, groups=2),
            nn.GroupNorm(2, 6),
        )
        self.up, self.out = nn.ConvTranspose3d(6, 4, 3, 2, 1, 1), nn.Conv3d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.max_pool3d(F.relu(self.norm(self.a(x))), 3, 1, 1)
        deep = self.group(self.deep(self.act(self.down(skip))))
        return self.out(torch.cat([self.up(deep), skip], 1))


class Waves(nn.Module):
    """Convolutions of sequences, depthwise, strided and transposed ones among them, and
    a linear head.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv1d(2, 6, 7, 2, 3, bias=False), nn.BatchNorm1d(6)
        self.depthwise, self.point = (
            nn.Conv1d(6, 6, 5, padding=4, dilation=2, groups=6),
            nn.Conv1d(6, 8, 1),
        )
        self.up, self.ring = (
            nn.ConvTranspose1d(8, 4, 4, 2, 1),
            nn.Conv1d(4, 4, 3, padding=1, padding_mode="circular"),
        )
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.norm(self.stem(x)))
        y = F.avg_pool1d(F.silu(self.point(self.depthwise(y))), 3, 1, 1)
        return self.head(self.ring(F.relu(self.up(y))).mean(2))


class Peaks(nn.Module):
    """Attention by extremes: of space for channels, of channels for pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 4, 3, 2, 1)
        self.gate, self.head = nn.Conv2d(6, 6, 1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y = y * torch.sigmoid(self.gate(y.amax((2, 3), keepdim=True)))
        y = self.b(y * torch.sigmoid(y.amin(1, keepdim=True)))
        return self.head(y.amax((2, 3)))


NETS: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "resnet": (ResNet, (3, 3, 37, 30)),
    "unet": (UNet, (2, 3, 17, 14)),
    "mobile": (MobileBlock, (3, 4, 9, 8)),
    "super resolution": (SuperResolution, (1, 3, 11, 12)),
    "chain": (Chain, (2, 4, 16, 16)),
    "peaks": (Peaks, (2, 3, 11, 10)),
}
OTHER_RANKS: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "waves": (Waves, (2, 2, 38)),
    "volumes": (Volumes, (2, 2, 10, 8, 6)),
}


def operator_of(layer: nn.Module) -> Conv | Linear | None:
    if isinstance(layer, PlainConv):
        padding = layer.padding if layer.padding_mode == "zeros" else 0
        rest = (layer.stride, padding, layer.dilation, layer.groups)
        x_shape = (1, layer.in_channels, *(64,) * len(layer.kernel_size))
        return Conv(conv_spec(x_shape, layer.weight.shape, layer.weight.dtype, *rest))
    return (
        Linear((4, layer.in_features), layer.out_features)
        if isinstance(layer, nn.Linear)
        else None
    )


def split_of(op: Conv | Linear, kind: SplitKind, ratio: Sequence[int]) -> Split:
    """A split of ``kind`` in a ratio; a linear layer, which has no rows, is cut by
    filter instead.
    """
    if kind == "replicate":
        return REPLICATE
    if isinstance(op, Linear):
        kind = "filter" if kind in SPATIAL_KINDS else kind
        extent, granularity = (
            {"filter": op.features, "channel": op.x_shape[-1]}.get(kind),
            1,
        )
    else:
        extent = {"filter": op.spec.K, "channel": op.spec.C}.get(kind)
        granularity = (
            op.spec.C // op.spec.groups
            if kind == "channel" and op.spec.groups > 1
            else 1
        )
    return Split(
        kind,
        tuple(ratio)
        if extent is None
        else apportion(extent, tuple(ratio), granularity),
    )


def plan_of(
    model: nn.Module,
    splits: Mapping[str, Split],
    world: int,
    following: Mapping[str, tuple[str, ...]] | None = None,
) -> Plan:
    layers = dict(model.named_modules())
    named = {}
    for name, split in splits.items():
        op = operator_of(layers[name])
        assert op is not None
        named[name] = LayerPlan(op, split, fusible=(following or {}).get(name, ()))
    return Plan(("cpu",) * world, "train", type(model).__name__, (), named, "by hand")


def splits_of(
    model: nn.Module,
    kinds: Sequence[SplitKind],
    ratio: Sequence[int],
    whole: bool = False,
) -> dict[str, Split]:
    """Every convolution and linear of a model, the kinds taken in turn. ``whole``: the
    sums of channel splits are.
    """
    ops = [
        (name, op)
        for name, layer in model.named_modules()
        if (op := operator_of(layer)) is not None
    ]
    splits = {
        name: split_of(op, kinds[i % len(kinds)], ratio)
        for i, (name, op) in enumerate(ops)
    }
    return (
        {name: with_whole_sum(split) for name, split in splits.items()}
        if whole
        else splits
    )
