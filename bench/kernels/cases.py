"""The convolutions that `bench kernels` measures, as data: layers of well-known
networks, and slices of their filters.

Letters as in `hetconv.sharding.conv_spec`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from hetconv.errors import KernelError
from hetconv.kernels.tiles import Pass
from hetconv.sharding.conv_spec import ConvSpec

Dtype = Literal["bf16", "fp16", "tf32"]
TORCH: dict[Dtype, str] = {"bf16": "bfloat16", "fp16": "float16", "tf32": "float32"}
PASSES: tuple[Pass, ...] = get_args(Pass)
MAX_BYTES = (
    10 << 30
)  # of input, filters and output together; a run holds several times that


@dataclass(frozen=True)
class Case:
    """One convolution. ``part`` says which share of the ``filters`` of its layer K is."""

    name: str
    N: int
    C: int
    H: int
    W: int
    K: int
    R: int
    S: int
    stride: int
    padding: int
    dilation: int
    dtype: Dtype
    part: str
    filters: int

    @property
    def spec(self) -> ConvSpec:
        pads = (self.padding, self.padding)
        return ConvSpec(
            self.N,
            self.C,
            (self.H, self.W),
            self.K,
            (self.R, self.S),
            (self.stride, self.stride),
            (pads, pads),
            (self.dilation, self.dilation),
            1,
            TORCH[self.dtype],
        )

    @property
    def is_slice(self) -> bool:
        return self.filters > self.K

    @property
    def passes(self) -> tuple[Pass, ...]:
        """Nobody trains the image, so a network's first layer has no input gradient."""
        return PASSES if self.C > 3 else ("forward", "weight gradient")


class Layer(NamedTuple):
    net: str
    C: int
    K: int
    kernel: int
    size: int
    stride: int = 1
    dilation: int = 1
    batches: tuple[int, ...] = (32, 256, 1)

    @property
    def name(self) -> str:
        stride = f"/{self.stride}" if self.stride > 1 else ""
        dilation = f" d{self.dilation}" if self.dilation > 1 else ""
        return (
            f"{self.net} {self.C}-{self.K} {self.kernel}x{self.kernel}{stride}{dilation} "
            f"@{self.size}"
        )


LAYERS = (
    Layer("resnet50", 3, 64, 7, 224, 2),
    Layer("resnet50", 64, 64, 1, 56),
    Layer("resnet50", 64, 64, 3, 56),
    Layer("resnet50", 64, 256, 1, 56),
    Layer("resnet50", 256, 64, 1, 56),
    Layer("resnet50", 128, 128, 3, 56, 2),
    Layer("resnet50", 128, 128, 3, 28),
    Layer("resnet50", 512, 128, 1, 28),
    Layer("resnet50", 256, 256, 3, 14),
    Layer("resnet50", 1024, 256, 1, 14),
    Layer("resnet50", 512, 512, 3, 7),
    Layer("resnet50", 2048, 512, 1, 7),
    Layer("resnet50", 256, 512, 1, 56, 2),
    Layer("resnet50", 512, 1024, 1, 28, 2),
    Layer("resnet50", 1024, 2048, 1, 14, 2),
    Layer("vgg16", 64, 64, 3, 224),
    Layer("vgg16", 256, 256, 3, 56),
    Layer("vgg16", 512, 512, 3, 28),
    Layer("unet", 320, 320, 3, 64),
    Layer("unet", 640, 640, 3, 32),
    Layer("vae", 128, 128, 3, 512),
    Layer("vae", 256, 256, 3, 256),
    Layer("vae", 512, 512, 3, 64),
    Layer("dilated", 512, 512, 3, 28, dilation=2),
    Layer("wide", 384, 384, 3, 64, batches=(128,)),
)

# What decides most stands first: a run that is cut short has measured that.
QUICK = (
    "vgg16 256-256 3x3 @56",
    "resnet50 64-256 1x1 @56",
    "resnet50 256-256 3x3 @14",
    "resnet50 128-128 3x3 @28",
    "resnet50 512-512 3x3 @7",
    "unet 320-320 3x3 @64",
    "resnet50 64-64 3x3 @56",
    "resnet50 1024-256 1x1 @14",
    "resnet50 128-128 3x3/2 @56",
    "resnet50 512-1024 1x1/2 @28",
    "resnet50 3-64 7x7/2 @224",
    "vgg16 64-64 3x3 @224",
    "vgg16 512-512 3x3 @28",
    "dilated 512-512 3x3 d2 @28",
    "unet 640-640 3x3 @32",
    "vae 256-256 3x3 @256",
    "wide 384-384 3x3 @64",
)
QUICK_SLICES = QUICK[:6]
QUICK_FP16 = QUICK[:2]
QUICK_ALONE = QUICK[2:5]  # at N 1


def cases(most_bytes: int = MAX_BYTES) -> list[Case]:
    """The whole suite, bf16 at N 32 first, without what would take more memory than
    ``most_bytes``.
    """
    found = [
        case
        for dtype in TORCH
        for n in (32, 128, 256, 1)
        for layer in LAYERS
        if n in layer.batches
        for case in _slices(layer, n, dtype)
    ]
    return [case for case in found if case.spec.bytes <= most_bytes]


def quick(most_bytes: int = MAX_BYTES) -> list[Case]:
    """The cases that a few minutes suffice for: whole layers, then slices, then fp16,
    then single images.
    """
    every = {case.name: case for case in cases(most_bytes)}
    batches = {layer.name: layer.batches[0] for layer in LAYERS}
    names = [f"{q} N{batches[q]} bf16 K" for q in QUICK]
    names += [f"{q} N32 bf16 {part}" for q in QUICK_SLICES for part in ("3K/4", "K/4")]
    names += [f"{q} N32 fp16 K" for q in QUICK_FP16] + [
        f"{q} N1 bf16 K" for q in QUICK_ALONE
    ]
    return [every[name] for name in names if name in every]


def _slices(layer: Layer, n: int, dtype: Dtype) -> Iterator[Case]:
    """The layer and slices of its filters in multiples of 16, which is what a plan
    gives to a device.
    """
    K, pad, seen = layer.K, layer.dilation * (layer.kernel // 2), set()
    parts = {
        "K": K,
        "3K/4": 3 * K // 4,
        "K/4": K // 4,
        "K/8": K // 8,
        "48": 48,
        "160": 160,
    }
    for part, k in parts.items():
        if k in seen or k > K or k % 16:
            continue
        seen.add(k)
        yield Case(
            f"{layer.name} N{n} {dtype} {part}",
            n,
            layer.C,
            layer.size,
            layer.size,
            k,
            layer.kernel,
            layer.kernel,
            layer.stride,
            pad,
            layer.dilation,
            dtype,
            part,
            K,
        )


def matching(suite: Sequence[Case], regex: str) -> list[Case]:
    """Returns the cases whose name a regular expression matches somewhere.

    Raises:
        KernelError: It matches none, or is no regular expression.
    """
    try:
        pattern = re.compile(regex)
    except re.error as e:
        raise KernelError(f"--filter {regex!r} is no regular expression: {e}") from e
    found = [case for case in suite if pattern.search(case.name)]
    if not found:
        raise KernelError(
            f"no case matches --filter {regex!r}; names are like {suite[0].name!r}"
        )
    return found
