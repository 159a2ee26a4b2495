"""What a convolution is, in integers: one dimension of a sliding window, and a whole
convolution of any rank.

Letters as in the literature: input (N, C, H, W), filters (K, C / groups, R, S), output
(N, K, P, Q). Of any rank: input (N, C, *size), filters (K, C / groups, *kernel).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from hetconv.errors import HetConvError

Span = tuple[int, int]
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
    """A sliding window: output p reads inputs p * stride - pad_lo + r * dilation, 0 <=
    r < kernel.
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    pad_lo: int = 0
    pad_hi: int = 0

    def out_size(self, size: int) -> int:
        return max(
            (size + self.pad_lo + self.pad_hi - self.dilation * (self.kernel - 1) - 1)
            // self.stride
            + 1,
            0,
        )

    def reads(self, out: Span, size: int) -> Span:
        """The input span (clipped to ``[0, size)``) that an output span reads; an empty
        one for an empty one.
        """
        lo, hi = self._unclipped(out)
        if out[0] >= out[1]:
            return (0, 0)
        lo = min(max(lo, 0), size)
        return lo, max(min(hi, size), lo)

    def padding(self, out: Span, size: int) -> Span:
        """The rows of padding above and below `reads`, so that the window gives the
        span ``out`` and nothing else.
        """
        if out[0] >= out[1]:
            return (0, 0)
        lo, hi = self._unclipped(out)
        return min(max(-lo, 0), hi - lo), min(max(hi - max(size, lo), 0), hi - lo)

    def segment(self, rows: Span, out: Span) -> Segment | None:
        """How the input rows ``[rows)`` add to the output rows ``[out)``, or None if no
        tap of theirs meets them.
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
Four = tuple[int, int, int, int]


class _Counted:
    """What follows from the numbers of a convolution, however they are spelled."""

    N: int
    C: int
    K: int
    stride: Ints
    padding: tuple[Span, ...]
    dilation: Ints
    groups: int
    dtype: str

    if TYPE_CHECKING:  # else a dataclass would take them for the defaults of its fields

        @property
        def size(self) -> Ints: ...

        @property
        def kernel(self) -> Ints: ...

    def __post_init__(self) -> None:
        if self.groups < 1 or self.C % self.groups or self.K % self.groups:
            raise HetConvError(
                f"groups={self.groups} must divide the {self.C} input channels and {self.K} "
                "filters of a convolution"
            )

    @property
    def windows(
        self,
    ) -> tuple[
        Window, ...
    ]:  # torch.compile traces the kernels' spec, and can do so only uncached
        sides = zip(self.kernel, self.stride, self.dilation, self.padding, strict=True)
        return tuple(Window(k, s, d, lo, hi) for k, s, d, (lo, hi) in sides)

    @property
    def x_shape(self) -> Ints:
        return (self.N, self.C, *self.size)

    @property
    def w_shape(self) -> Ints:
        return (self.K, self.C // self.groups, *self.kernel)

    @property
    def y_shape(self) -> Ints:
        return (
            self.N,
            self.K,
            *(v.out_size(n) for v, n in zip(self.windows, self.size, strict=True)),
        )

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def flops(self) -> int:
        """Multiplications and additions of the forward pass, padding included."""
        return 2 * prod(self.y_shape) * prod(self.w_shape[1:])

    @property
    def bytes(self) -> int:
        """Bytes of input, filters and output, each counted once."""
        return self.itemsize * sum(
            map(prod, (self.x_shape, self.w_shape, self.y_shape))
        )


@dataclass(frozen=True)
class ConvSpec(_Counted):
    """One convolution, with a size, kernel, stride, padding (before, after) and
    dilation per spatial dimension.

    ``dtype`` is torch's name for it.
    """

    N: int
    C: int
    size: Ints
    K: int
    kernel: Ints
    stride: Ints
    padding: tuple[Span, ...]
    dilation: Ints
    groups: int = 1
    dtype: str = "float32"

    @cached_property
    def windows(self) -> tuple[Window, ...]:  # the planner asks for them often
        return super().windows

    @property
    def spatial_dims(self) -> int:
        return len(self.size)


@dataclass(frozen=True)
class Conv2dSpec(_Counted):
    """One 2-D convolution as the kernels spell it. ``padding`` is ((top, bottom),
    (left, right)).
    """

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

    if TYPE_CHECKING:  # what they are of two dimensions

        @property
        def x_shape(self) -> Four: ...

        @property
        def w_shape(self) -> Four: ...

        @property
        def y_shape(self) -> Four: ...

    @property
    def size(self) -> Pair:
        return self.H, self.W

    @property
    def kernel(self) -> Pair:
        return self.R, self.S

    @property
    def P(self) -> int:
        return self.y_shape[2]

    @property
    def Q(self) -> int:
        return self.y_shape[3]


def pads_per_side(
    padding: str | int | Sequence[int], kernel: Ints, stride: Ints, dilation: Ints
) -> tuple[Span, ...]:
    """PyTorch's ``padding`` argument ("valid", "same", an int, one int per dimension)
    as rows per side.

    Raises `HetConvError` for what PyTorch refuses too: other words, and "same" under a stride.
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
