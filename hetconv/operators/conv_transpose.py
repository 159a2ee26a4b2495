"""Transposed convolutions, which follow their input."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from hetconv.sharding.conv_spec import Span
from hetconv.sharding.layout import Layout, Layouts, Shape, apportion
from hetconv.sharding.rule import OpSharding

from .base import (
    Args,
    Call,
    Kwargs,
    PerSampleOperator,
    Reader,
    WeightedCall,
    bind,
    per_dim,
    reduce_scattered,
    slab_reads,
    span_along,
)


class TransposedWindow(NamedTuple):
    """The window of a transposed convolution in one dimension.

    Input i adds to the outputs i * stride - pad + r * dilation, 0 <= r < kernel.

    Attributes:
        kernel: Number of taps.
        stride: Outputs between two inputs.
        dilation: Outputs between two taps.
        pad: Outputs that are cut off at each end.
        extra: Outputs that follow after the last (``output_padding``).
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    pad: int = 0
    extra: int = 0

    @property
    def reach(self) -> int:
        """Number of outputs from the first to the last tap of an input."""
        return self.dilation * (self.kernel - 1) + 1

    def out_size(self, size: int) -> int:
        """Returns the number of outputs of ``size`` inputs."""
        return (size - 1) * self.stride - 2 * self.pad + self.reach + self.extra

    def reads(self, out: Span, size: int) -> Span:
        """Returns the inputs, of ``size``, that add to the outputs ``out``."""
        if out[0] >= out[1]:
            return (0, 0)
        first = -(-(out[0] + self.pad - self.reach + 1) // self.stride)
        end = (out[1] - 1 + self.pad) // self.stride + 1
        lo = min(max(first, 0), size)
        return lo, max(min(end, size), lo)

    def first(self, i: int) -> int:
        """Returns the first output to which input ``i`` adds; negative if cut off."""
        return i * self.stride - self.pad


@dataclass(frozen=True)
class ConvTranspose(PerSampleOperator):
    """A transposed convolution, (N, C, *size) -> (N, K, *size), with replicated weights.

    It runs on shards of samples, or of a spatial dimension with halos.

    Attributes:
        shape: Shape of the output.
        windows: The window along each spatial dimension.
        groups: Number of groups.
    """

    shape: Shape
    windows: tuple[TransposedWindow, ...]
    groups: int = 1

    def flops(self, inputs: int) -> int:
        """Returns multiplications and additions for ``inputs`` elements of the input.

        Outputs that are cut off count too.
        """
        taps = prod(window.kernel for window in self.windows)
        return 2 * inputs * (self.shape[1] // self.groups) * taps

    def _follow(self, inputs: Layouts) -> OpSharding | None:
        x = reduce_scattered(inputs[0])
        if x.dim is None or x.dim == 1:
            return None
        dim, extent = x.dim, self.shape[x.dim]
        if dim == 0:
            y = Layout.sharded(self.shape, 0, x.sizes)
            return OpSharding((x,), y, partial_grads=True)
        window, size = self.windows[dim - 2], x.shape[dim]
        if extent == size * window.stride:
            sizes = tuple(n * window.stride for n in x.sizes)
        else:
            sizes = apportion(extent, x.sizes)
        y = Layout.sharded(self.shape, dim, sizes)
        reads = [window.reads(span_along(box, dim), size) for box in y.boxes]
        return OpSharding((slab_reads(x.shape, dim, reads),), y, partial_grads=True)


def _read_conv_transpose(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, weight, bias, stride, padding, output_padding, groups, dilation = bind(
        args,
        kwargs,
        input=None,
        weight=None,
        bias=None,
        stride=1,
        padding=0,
        output_padding=0,
        groups=1,
        dilation=1,
    )
    if x.dim() != weight.dim():
        return None
    rank = x.dim() - 2
    options = (per_dim(n, rank) for n in (stride, dilation, padding, output_padding))
    sides = zip(weight.shape[2:], *options, strict=True)
    windows = tuple(TransposedWindow(*side) for side in sides)
    sizes = [w.out_size(n) for w, n in zip(windows, x.shape[2:], strict=True)]
    if min(sizes) < 1 or x.shape[1] != weight.shape[0]:
        return None
    shape = (x.shape[0], weight.shape[1] * groups, *sizes)
    op = ConvTranspose(shape, windows, groups)
    return WeightedCall(op, (x,), weight=weight, bias=bias)


READERS: dict[str, Reader] = dict.fromkeys(
    ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _read_conv_transpose
)
