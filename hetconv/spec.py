"""What a convolution is, in integers: one dimension of a sliding window, and a whole 2-D convolution.

Letters as in the literature: input (N, C, H, W), filters (K, C / groups, R, S), output (N, K, P, Q).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .errors import HetConvError

Span = tuple[int, int]
ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


class Segment(NamedTuple):
    """What one run of input rows adds to an output span, itself a small window operation.

    Input rows ``rows`` through taps ``taps``, with ``pad`` zero rows above and below, give the output rows ``out``.
    """

    rows: Span
    out: Span
    taps: Span
    pad: Span


@dataclass(frozen=True)
class Window:
    """A sliding window: output p reads inputs p * stride - pad_lo + r * dilation, 0 <= r < kernel."""

    kernel: int
    stride: int = 1
    dilation: int = 1
    pad_lo: int = 0
    pad_hi: int = 0

    def out_size(self, size: int) -> int:
        return max((size + self.pad_lo + self.pad_hi - self.dilation * (self.kernel - 1) - 1) // self.stride + 1, 0)

    def reads(self, out: Span, size: int) -> Span:
        """The input span (clipped to ``[0, size)``) that an output span reads; an empty one for an empty one."""
        lo, hi = self._unclipped(out)
        if out[0] >= out[1]:
            return (0, 0)
        lo = min(max(lo, 0), size)
        return lo, max(min(hi, size), lo)

    def padding(self, out: Span, size: int) -> Span:
        """The rows of padding above and below `reads`, so that the window gives the span ``out`` and nothing else."""
        if out[0] >= out[1]:
            return (0, 0)
        lo, hi = self._unclipped(out)
        return min(max(-lo, 0), hi - lo), min(max(hi - max(size, lo), 0), hi - lo)

    def segment(self, rows: Span, out: Span) -> Segment | None:
        """How the input rows ``[rows)`` add to the output rows ``[out)``, or None if no tap of theirs meets them."""
        (a, b), s, d = rows, self.stride, self.dilation
        hits = [
            (p, r)
            for r in range(self.kernel)
            for p in _first_last(a + self.pad_lo - r * d, b - 1 + self.pad_lo - r * d, s, out)
        ]
        if a >= b or not hits:
            return None
        lo, hi = min(p for p, _ in hits), max(p for p, _ in hits) + 1
        taps = min(r for _, r in hits), max(r for _, r in hits) + 1
        first = lo * s - self.pad_lo + taps[0] * d
        last = (hi - 1) * s - self.pad_lo + (taps[1] - 1) * d
        used = (max(a, first), min(b, last + 1))
        above, below = used[0] - first, last + 1 - used[1]
        # Up to stride - 1 more rows below, held or padded, add no output: enough to leave rows uncut and pads equal.
        spare = min(b - used[1], s - 1)
        used = (used[0], used[1] + spare)
        if 0 < above - below <= s - 1 - spare:
            below = above
        return Segment(used, (lo, hi), taps, (above, below))

    def _unclipped(self, out: Span) -> Span:
        reach = self.dilation * (self.kernel - 1) + 1
        return out[0] * self.stride - self.pad_lo, (out[1] - 1) * self.stride - self.pad_lo + reach


def _first_last(lo: int, hi: int, stride: int, out: Span) -> tuple[int, ...]:
    """The first and last p in ``[out)`` with lo <= p * stride <= hi, if any."""
    first, last = max(-(-lo // stride), out[0]), min(hi // stride, out[1] - 1)
    return (first, last) if first <= last else ()


Pair = tuple[int, int]


@dataclass(frozen=True)
class Conv2dSpec:
    """One 2-D convolution. ``padding`` is ((top, bottom), (left, right)); ``dtype`` is torch's name for it."""

    N: int
    C: int
    H: int
    W: int
    K: int
    R: int
    S: int
    stride: Pair = (1, 1)
    padding: tuple[Span, Span] = ((0, 0), (0, 0))
    dilation: Pair = (1, 1)
    groups: int = 1
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.groups < 1 or self.C % self.groups or self.K % self.groups:
            raise HetConvError(
                f"groups={self.groups} must divide the {self.C} input channels and {self.K} filters of a convolution"
            )

    @property
    def windows(self) -> tuple[Window, Window]:
        return (
            Window(self.R, self.stride[0], self.dilation[0], *self.padding[0]),
            Window(self.S, self.stride[1], self.dilation[1], *self.padding[1]),
        )

    @property
    def P(self) -> int:
        return self.windows[0].out_size(self.H)

    @property
    def Q(self) -> int:
        return self.windows[1].out_size(self.W)

    @property
    def x_shape(self) -> tuple[int, int, int, int]:
        return self.N, self.C, self.H, self.W

    @property
    def w_shape(self) -> tuple[int, int, int, int]:
        return self.K, self.C // self.groups, self.R, self.S

    @property
    def y_shape(self) -> tuple[int, int, int, int]:
        return self.N, self.K, self.P, self.Q

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def flops(self) -> int:
        """Multiplications and additions of the forward pass, padding included."""
        return 2 * self.N * self.K * self.P * self.Q * (self.C // self.groups) * self.R * self.S

    @property
    def bytes(self) -> int:
        """Bytes of input, filters and output, each counted once."""
        x, w, y = self.x_shape, self.w_shape, self.y_shape
        return self.itemsize * sum(a * b * c * d for a, b, c, d in (x, w, y))

    def rows(self, out: Span) -> Span:
        """The input rows that the output rows ``[out)`` read, clipped to the input."""
        return self.windows[0].reads(out, self.H)


def pads_per_side(padding: str | int | Sequence[int], kernel: Pair, stride: Pair, dilation: Pair) -> tuple[Span, Span]:
    """PyTorch's ``padding`` argument ("valid", "same", an int, one int per dimension) as rows per side.

    Raises `HetConvError` for what PyTorch refuses too: other words, and "same" under a stride.
    """
    if isinstance(padding, str):
        if padding == "valid":
            return (0, 0), (0, 0)
        if padding != "same":
            raise HetConvError(f"padding={padding!r} is not known; give 'same', 'valid' or integers")
        if stride != (1, 1):
            raise HetConvError(f"padding='same' needs stride 1, but the stride is {stride}; give integers instead")
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return (total[0] // 2, total[0] - total[0] // 2), (total[1] // 2, total[1] - total[1] // 2)
    p = (padding, padding) if isinstance(padding, int) else tuple(padding)
    if len(p) == 1:
        p = p * 2
    if len(p) != 2 or min(p) < 0:
        raise HetConvError(f"padding={padding!r} does not fit a 2-D convolution; give one or two non-negative integers")
    return (p[0], p[0]), (p[1], p[1])
