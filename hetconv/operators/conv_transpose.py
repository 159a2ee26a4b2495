"""Transposed convolutions, which a plan does not name: they follow their input."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from torch import Tensor

from hetconv.sharding.conv_spec import Span
from hetconv.sharding.layer_rules import REPLICATE, Gather, OpSharding, Split
from hetconv.sharding.layout import Box, Layout, ReadRegion, Shape, apportion

from .base import (
    Args,
    Call,
    Kwargs,
    Reader,
    arg,
    per_dim,
    per_sample,
    reduce_scattered,
    resharded,
)


class TransposedWindow(NamedTuple):
    """Input i adds to the outputs i * stride - pad + r * dilation, 0 <= r < kernel;
    ``extra`` outputs follow.
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    pad: int = 0
    extra: int = 0

    @property
    def reach(self) -> int:
        return self.dilation * (self.kernel - 1) + 1

    def out_size(self, size: int) -> int:
        return (size - 1) * self.stride - 2 * self.pad + self.reach + self.extra

    def reads(self, out: Span, size: int) -> Span:
        """The inputs that add to a span of outputs; an empty span for an empty one."""
        if out[0] >= out[1]:
            return (0, 0)
        lo = min(max(-(-(out[0] + self.pad - self.reach + 1) // self.stride), 0), size)
        return lo, max(min((out[1] - 1 + self.pad) // self.stride + 1, size), lo)

    def first(self, i: int) -> int:
        """The first output that input ``i`` adds to; before the image, it is cut off."""
        return i * self.stride - self.pad


@dataclass(frozen=True)
class ConvTranspose:
    """(N, C, *size) -> (N, K, *size) of any rank with whole weights: over samples, or
    over space with halos.
    """

    shape: Shape
    windows: tuple[TransposedWindow, ...]
    groups: int = 1

    def flops(self, inputs: int) -> int:
        """Multiplications and additions for this many elements of the input, cut-off
        outputs included.
        """
        return (
            2
            * inputs
            * (self.shape[1] // self.groups)
            * prod(v.kernel for v in self.windows)
        )

    @per_sample()
    def sharding(
        self, inputs: tuple[Layout, ...], split: Split = REPLICATE
    ) -> OpSharding:
        x = reduce_scattered(inputs[0])
        if x.kind != "sharded" or x.dim is None or x.dim == 1:
            return Gather(self.shape).sharding(inputs)
        if x.dim == 0:
            return OpSharding(
                (x,), resharded(x, self.shape, 0, x.sizes), partial_grads=True
            )
        window, size, extent = (
            self.windows[x.dim - 2],
            x.shape[x.dim],
            self.shape[x.dim],
        )
        whole = extent == size * window.stride
        y = resharded(
            x,
            self.shape,
            x.dim,
            [s * window.stride for s in x.sizes]
            if whole
            else apportion(extent, x.sizes),
        )
        reads = (window.reads((b.lo[x.dim], b.hi[x.dim]), size) for b in y.boxes)
        need = tuple(Box.whole(x.shape).along(x.dim, lo, hi) for lo, hi in reads)
        return OpSharding((ReadRegion(x.shape, need),), y, partial_grads=True)


@dataclass(frozen=True)
class ConvTransposeCall(Call):
    weight: Tensor | None = None
    bias: Tensor | None = None

    @property
    def params(self) -> tuple[Tensor, ...]:
        return tuple(p for p in (self.weight, self.bias) if p is not None)


def _conv_transpose(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, w, b = (
        arg(args, kwargs, i, n) for i, n in enumerate(("input", "weight", "bias"))
    )
    if x.dim() != w.dim():
        return None
    given = (
        (3, "stride", 1),
        (4, "padding", 0),
        (5, "output_padding", 0),
        (7, "dilation", 1),
    )
    stride, pad, extra, dilation = (
        per_dim(arg(args, kwargs, i, n, default), x.dim() - 2)
        for i, n, default in given
    )
    groups = arg(args, kwargs, 6, "groups", 1)
    sides = zip(w.shape[2:], stride, dilation, pad, extra, strict=True)
    windows = tuple(TransposedWindow(*side) for side in sides)
    sizes = [v.out_size(n) for v, n in zip(windows, x.shape[2:], strict=True)]
    if min(sizes) < 1 or x.shape[1] != w.shape[0]:
        return None  # torch refuses it: let it
    op = ConvTranspose((x.shape[0], w.shape[1] * groups, *sizes), windows, groups)
    return ConvTransposeCall(op, (x,), weight=w, bias=b)


READERS: dict[str, Reader] = dict.fromkeys(
    ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _conv_transpose
)
