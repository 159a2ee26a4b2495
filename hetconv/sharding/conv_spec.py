"""Convolutions in integers: one dimension of a sliding window, and a whole convolution.

Letters as in the literature: input (N, C, H, W), filters (K, C / groups, R, S), output
(N, K, P, Q). Of any rank: input (N, C, *size), filters (K, C / groups, *kernel).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal, NamedTuple

from hetconv.errors import HetConvError

Span = tuple[int, int]
MemoryFormat = Literal["channels_last", "contiguous_format"]
"""How images and filters lie in memory, by the names in torch."""
ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


class Segment(NamedTuple):
    """What one run of input rows adds to an output span, itself a small window operation.

    Input rows ``rows`` through taps ``taps``, with ``pad`` zero rows above and below,
    give the output rows ``out``.
    """

    rows: Span
    out: Span
    taps: Span
    pad: Span


@dataclass(frozen=True)
class Window:
    """A sliding window along one dimension.

    Output p reads the inputs p * stride - pad_lo + r * dilation, for 0 <= r < kernel.

    Attributes:
        kernel: number of taps.
        stride: inputs from one output to the next.
        dilation: inputs from one tap to the next.
        pad_lo: padding before the first input.
        pad_hi: padding after the last input.
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    pad_lo: int = 0
    pad_hi: int = 0

    def out_size(self, size: int) -> int:
        """Returns the number of outputs for a number of inputs."""
        return max(
            (size + self.pad_lo + self.pad_hi - self.dilation * (self.kernel - 1) - 1)
            // self.stride
            + 1,
            0,
        )

    def reads(self, out: Span, size: int) -> Span:
        """Returns the inputs, within ``[0, size)``, that a span of outputs reads.

        It is empty for an empty span.
        """
        lo, hi = self._unclipped(out)
        if out[0] >= out[1]:
            return (0, 0)
        lo = min(max(lo, 0), size)
        return lo, max(min(hi, size), lo)

    def padding(self, out: Span, size: int) -> Span:
        """Returns the padding before and after `reads` that gives exactly a span of outputs."""
        if out[0] >= out[1]:
            return (0, 0)
        lo, hi = self._unclipped(out)
        return min(max(-lo, 0), hi - lo), min(max(hi - max(size, lo), 0), hi - lo)

    def segment(self, rows: Span, out: Span) -> Segment | None:
        """Returns how a span of inputs contributes to a span of outputs.

        It is None if no tap of these inputs reaches the outputs.
        """
        (a, b), s, d = rows, self.stride, self.dilation
        hits = [
            (p, r)
            for r in range(self.kernel)
            for p in _first_last(
                a + self.pad_lo - r * d, b - 1 + self.pad_lo - r * d, s, out
            )
        ]
        if a >= b or not hits:
            return None
        lo, hi = min(p for p, _ in hits), max(p for p, _ in hits) + 1
        taps = min(r for _, r in hits), max(r for _, r in hits) + 1
        first = lo * s - self.pad_lo + taps[0] * d
        last = (hi - 1) * s - self.pad_lo + (taps[1] - 1) * d
        used = (max(a, first), min(b, last + 1))
        above, below = used[0] - first, last + 1 - used[1]
        # Up to stride - 1 more rows below, held or padded, add no output: enough to
        # leave rows uncut and pads equal.
        spare = min(b - used[1], s - 1)
        used = (used[0], used[1] + spare)
        if 0 < above - below <= s - 1 - spare:
            below = above
        return Segment(used, (lo, hi), taps, (above, below))

    def _unclipped(self, out: Span) -> Span:
        reach = self.dilation * (self.kernel - 1) + 1
        return out[0] * self.stride - self.pad_lo, (
            out[1] - 1
        ) * self.stride - self.pad_lo + reach


def _first_last(lo: int, hi: int, stride: int, out: Span) -> tuple[int, ...]:
    """The first and last p in ``[out)`` with lo <= p * stride <= hi, if any."""
    first, last = max(-(-lo // stride), out[0]), min(hi // stride, out[1] - 1)
    return (first, last) if first <= last else ()


Pair = tuple[int, int]
Ints = tuple[int, ...]
Padding = tuple[Span, ...]


class ConvGeometry(NamedTuple):
    """How the filters of a convolution move over its input.

    Attributes:
        stride: Input rows from output row to output row, per spatial dimension.
        padding: Zero rows (before, after) the input, per spatial dimension.
        dilation: Input rows from tap to tap of a filter, per spatial dimension.
        groups: Number of groups of channels that are convolved apart.
    """

    stride: Ints
    padding: Padding
    dilation: Ints
    groups: int


@dataclass(frozen=True)
class ConvSpec:
    """Shapes and geometry of one convolution with any number of spatial dimensions.

    H, W, R, S, P and Q are the names of two spatial dimensions.

    Attributes:
        N: Number of samples.
        C: Number of input channels, of all groups.
        size: Input size per spatial dimension.
        K: Number of filters, of all groups.
        kernel: Filter size per spatial dimension.
        stride: Stride of the kernel per spatial dimension.
        padding: Zeros before and after the input, per spatial dimension.
        dilation: Distance of the kernel's taps per spatial dimension.
        groups: Number of groups of channels.
        dtype: PyTorch's name of the data type of all tensors.
    """

    N: int
    C: int
    size: Ints
    K: int
    kernel: Ints
    stride: Ints
    padding: Padding
    dilation: Ints
    groups: int = 1
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.groups < 1 or self.C % self.groups or self.K % self.groups:
            raise HetConvError(
                f"groups={self.groups} must divide the {self.C} input channels and {self.K} "
                "filters of a convolution"
            )

    @property
    def geometry(self) -> ConvGeometry:
        """How the filters move over the input."""
        return ConvGeometry(self.stride, self.padding, self.dilation, self.groups)

    @cached_property
    def windows(self) -> tuple[Window, ...]:
        """Sliding window of each spatial dimension."""
        sides = zip(self.kernel, self.stride, self.dilation, self.padding, strict=True)
        return tuple(Window(k, s, d, lo, hi) for k, s, d, (lo, hi) in sides)

    @property
    def spatial_dims(self) -> int:
        """Number of spatial dimensions."""
        return len(self.size)

    @property
    def x_shape(self) -> Ints:
        """Shape of the input, (N, C, *size)."""
        return (self.N, self.C, *self.size)

    @property
    def w_shape(self) -> Ints:
        """Shape of the filters, (K, C / groups, *kernel)."""
        return (self.K, self.C // self.groups, *self.kernel)

    @property
    def y_shape(self) -> Ints:
        """Shape of the output, (N, K, *out_size)."""
        sizes = zip(self.windows, self.size, strict=True)
        return (self.N, self.K, *(window.out_size(n) for window, n in sizes))

    @property
    def H(self) -> int:
        """Rows of the input."""
        return self.size[0]

    @property
    def W(self) -> int:
        """Columns of the input."""
        return self.size[1]

    @property
    def R(self) -> int:
        """Rows of a filter."""
        return self.kernel[0]

    @property
    def S(self) -> int:
        """Columns of a filter."""
        return self.kernel[1]

    @property
    def P(self) -> int:
        """Rows of the output."""
        return self.y_shape[2]

    @property
    def Q(self) -> int:
        """Columns of the output."""
        return self.y_shape[3]

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return ITEMSIZE[self.dtype]

    @property
    def flops(self) -> int:
        """Multiplications and additions of the forward pass, padding included."""
        return 2 * prod(self.y_shape) * prod(self.w_shape[1:])

    @property
    def bytes(self) -> int:
        """Bytes of input, filters and output, each counted once."""
        shapes = (self.x_shape, self.w_shape, self.y_shape)
        return self.itemsize * sum(map(prod, shapes))


def pads_per_side(
    padding: str | int | Sequence[int], kernel: Ints, stride: Ints, dilation: Ints
) -> tuple[Span, ...]:
    """Returns PyTorch's ``padding`` argument as padding before and after each dimension.

    Args:
        padding: "valid", "same", a number, or one for each dimension.
        kernel: taps by dimension.
        stride: by dimension.
        dilation: by dimension.

    Raises:
        HetConvError: PyTorch refuses it too: another word, or "same" with a stride.
    """
    rank = len(kernel)
    if isinstance(padding, str):
        if padding == "valid":
            return ((0, 0),) * rank
        if padding != "same":
            raise HetConvError(
                f"padding={padding!r} is not known; give 'same', 'valid' or integers"
            )
        if stride != (1,) * rank:
            raise HetConvError(
                f"padding='same' needs stride 1, but the stride is {stride}; give integers instead"
            )
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return tuple((t // 2, t - t // 2) for t in total)
    given = (padding,) if isinstance(padding, int) else tuple(padding)
    p = given * rank if len(given) == 1 else given
    if len(p) != rank or min(p) < 0:
        raise HetConvError(
            f"padding={padding!r} does not fit a {rank}-D convolution; give one or {rank} "
            "non-negative integers"
        )
    return tuple((n, n) for n in p)
