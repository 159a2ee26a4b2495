"""Operators that resize images: interpolation, padding, cropping, pixel unshuffle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import floor
from struct import pack, unpack
from typing import Any, Literal

from hetconv.sharding.conv_spec import Span
from hetconv.sharding.layout import Layout, Layouts, Shape, apportion, spans
from hetconv.sharding.rule import Gather, OpSharding

from .base import (
    Args,
    Call,
    Kwargs,
    PerSampleOperator,
    Reader,
    WindowOperator,
    bind,
    reduce_scattered,
    slab_reads,
)
from .pooling import adaptive_pool

Filter = Literal["nearest", "nearest-exact", "linear", "cubic"]
PadMode = Literal["constant", "reflect", "replicate", "circular"]
TAPS: dict[Filter, Span] = {
    "nearest": (0, 1),
    "nearest-exact": (0, 1),
    "linear": (0, 2),
    "cubic": (-1, 3),
}
"""The inputs that an output reads, relative to the floor of its source coordinate."""


@dataclass(frozen=True)
class Interpolate(WindowOperator):
    """A separable interpolation.

    Attributes:
        shape: Shape of the output.
        filter: The filter; None (area, antialias) where only torch knows what an output
            reads.
        align_corners: Whether the corner pixels of input and output coincide.
        scales: For each spatial dimension the given scale factor, or None for the ratio
            of the sizes.
    """

    shape: Shape
    filter: Filter | None
    align_corners: bool
    scales: tuple[float | None, ...]

    def _follow(self, inputs: Layouts) -> OpSharding | None:
        sharding, x = super()._follow(inputs), reduce_scattered(inputs[0])
        if sharding is None:
            return None
        (reads,) = sharding.input_layouts
        reads_own_only = all(
            read == own or not (read.numel or own.numel)
            for read, own in zip(reads.boxes, x.boxes, strict=True)
        )
        return OpSharding((x,), sharding.output) if reads_own_only else sharding

    def _knows_reads(self, shape: Shape) -> bool:
        return self.filter is not None and all(
            self._rounds_alike(dim, shape[dim]) for dim in range(2, len(shape))
        )

    def ratio(self, dim: int, n: int) -> float:
        """Returns inputs per output along ``dim``, of ``n`` inputs, as torch does."""
        out, scale = self.shape[dim], self.scales[dim - 2]
        if self.align_corners:
            return (n - 1) / (out - 1) if out > 1 else 0.0
        return 1.0 / scale if scale is not None else n / out

    def factor(self, dim: int, n: int) -> int:
        """Returns the outputs per input along ``dim``, or 0 if not a whole number.

        With a whole number, torch can interpolate a slab by itself: every input has
        outputs at the same distances.
        """
        factor = self.shape[dim] // n
        if self.shape[dim] != factor * n or self.ratio(dim, n) != 1 / factor:
            return 0
        return factor

    def reads(self, dim: int, n: int, out: Span) -> Span:
        """Returns the inputs, of ``n`` along ``dim``, that the outputs ``out`` read."""
        if out[0] >= out[1]:
            return (0, 0)
        assert self.filter is not None
        below, above = TAPS[self.filter]
        first, last = self._source(dim, n, out[0]), self._source(dim, n, out[1] - 1)
        if self.filter == "linear" and last == floor(last):
            above = 1  # the second tap has weight zero
        lo = min(max(floor(first) + below, 0), n - 1)
        return lo, max(min(floor(last) + above, n), lo + 1)

    def _source(self, dim: int, n: int, p: int) -> float:
        """Returns the source coordinate of output ``p``."""
        ratio = self.ratio(dim, n)
        if self.filter == "nearest" or self.align_corners:
            return p * ratio
        return (p + 0.5) * ratio - (0.0 if self.filter == "nearest-exact" else 0.5)

    def _rounds_alike(self, dim: int, n: int) -> bool:
        """Whether nearest inputs are the same however torch rounds.

        Its forward and its backward may round differently.
        """
        if self.filter not in ("nearest", "nearest-exact"):
            return True
        offset = 0.5 if self.filter == "nearest-exact" else 0.0
        return _floors_agree(self.ratio(dim, n), self.shape[dim], offset)


def _to_float32(x: float) -> float:
    return float(unpack("f", pack("f", x))[0])


@lru_cache(maxsize=1024)
def _floors_agree(ratio: float, out: int, offset: float) -> bool:
    """Whether the floor of (p + offset) ratio is exact for p < out in single precision.

    The formulas are those of torch's kernels.
    """
    ratio32 = _to_float32(ratio)
    for p in range(out):
        position = p + offset
        product32 = _to_float32(position * ratio32)
        coordinates = (
            position * ratio32,
            product32,
            _to_float32(product32 - offset) + offset,
        )
        if any(floor(c) != floor(position * ratio) for c in coordinates):
            return False
    return True


@dataclass(frozen=True)
class Pad(PerSampleOperator):
    """A padding; negative sizes crop.

    Attributes:
        shape: Shape of the output.
        pads: Entries added (before, after), per dimension.
        mode: What the new entries are, as in `torch.nn.functional.pad`.
    """

    shape: Shape
    pads: tuple[Span, ...]
    mode: PadMode

    def _has_samples(self, inputs: Layouts) -> Sequence[bool] | None:
        return None if self.pads[0] != (0, 0) else super()._has_samples(inputs)

    def _follow(self, inputs: Layouts) -> OpSharding | None:
        x = reduce_scattered(inputs[0])
        sizes = self._sizes(x, x.dim) if x.dim is not None else None
        if sizes is None or x.dim is None:
            return None
        dim, n = x.dim, x.shape[x.dim]
        y = Layout.sharded(self.shape, dim, sizes)
        if self.mode != "reflect" or self.pads[dim] == (0, 0):
            return OpSharding((x,), y)
        reads = [_reflected_span(lo, hi, n) for lo, hi in self.sources(y)]
        needs_halo = any(
            lo < own_lo or hi > own_hi
            for (lo, hi), (own_lo, own_hi) in zip(reads, spans(x.sizes), strict=True)
            if lo < hi
        )
        return OpSharding((slab_reads(x.shape, dim, reads) if needs_halo else x,), y)

    def sources(self, y: Layout) -> list[Span]:
        """Returns the range of input entries that each rank's shard of ``y`` shows.

        Padding has negative indices, or indices beyond the last entry of the input.
        """
        dim = y.inner_dim
        assert dim is not None
        before = self.pads[dim][0]
        return [(b.lo[dim] - before, b.hi[dim] - before) for b in y.boxes]

    def _sizes(self, x: Layout, dim: int) -> list[int] | None:
        """Returns the sizes of output shards: what ranks keep, and padding at the ends."""
        before, after = self.pads[dim]
        lo, hi = max(-before, 0), x.shape[dim] - max(-after, 0)
        kept = [max(min(b, hi) - max(a, lo), 0) for a, b in spans(x.sizes)]
        ranks = [rank for rank, size in enumerate(kept) if size]
        if not ranks:
            return None
        kept[ranks[0]] += max(before, 0)
        kept[ranks[-1]] += max(after, 0)
        return kept


def _reflected_span(start: int, end: int, n: int) -> Span:
    """Returns the inputs, of ``n``, that [start, end) shows if both ends reflect."""
    if start >= end:
        return (0, 0)
    lo, hi = max(start, 0), min(end, n)
    if end > n:
        lo = min(lo, 2 * n - 1 - end)
    if start < 0:
        hi = max(hi, 1 - start)
    return lo, hi


@dataclass(frozen=True)
class CircularPad(Pad):
    """A padding with the entries of the other end.

    Its rule reads the input three times: for what is kept, what comes before, and what
    comes after. Where a crop meets the dimension that is split, inputs are gathered,
    because the other end then pads with entries that were cropped here.
    """

    def _follow(self, inputs: Layouts) -> OpSharding:
        x = inputs[0]
        sharding = super()._follow(inputs[:1])
        dim = sharding.output.dim if sharding is not None else None
        if sharding is None or (dim is not None and min(self.pads[dim]) < 0):
            sharding, dim = Gather(self.shape).sharding(inputs[:1]), None
        y = sharding.output
        if dim is None or self.pads[dim] == (0, 0):
            nothing = slab_reads(x.shape, 0, [(0, 0)] * x.world)
            return OpSharding((*sharding.input_layouts, nothing, nothing), y)
        n = x.shape[dim]
        reads = []
        for shift in (0, n, -n):
            shifted = [(lo + shift, hi + shift) for lo, hi in self.sources(y)]
            clipped = [(min(max(a, 0), n), min(max(b, 0), n)) for a, b in shifted]
            reads.append(slab_reads(x.shape, dim, clipped))
        return OpSharding(tuple(reads), y)


@dataclass(frozen=True)
class PixelUnshuffle(PerSampleOperator):
    """A pixel unshuffle, (N, C, H r, W r) -> (N, C r^2, H, W).

    Attributes:
        shape: Shape of the output.
        factor: The factor r.
    """

    shape: Shape
    factor: int

    def _follow(self, inputs: Layouts) -> OpSharding | None:
        x, r = inputs[0], self.factor
        if x.kind == "partial":
            return OpSharding((x,), Layout.partial(self.shape, x.world, x.shares))
        if x.dim is None:
            return None
        if x.dim < 2:
            scale = r * r if x.dim == 1 else 1
            sizes = [size * scale for size in x.sizes]
            return OpSharding((x,), Layout.sharded(self.shape, x.dim, sizes))
        # A few rows move where the input is split within a block of pixels.
        out_sizes = apportion(self.shape[x.dim], x.sizes)
        reads = Layout.sharded(x.shape, x.dim, [size * r for size in out_sizes])
        return OpSharding((reads,), Layout.sharded(self.shape, x.dim, out_sizes))


FILTERS: dict[tuple[str, int], Any] = {
    ("linear", 3): "linear",
    ("bilinear", 4): "linear",
    ("trilinear", 5): "linear",
    ("bicubic", 4): "cubic",
} | {(mode, rank): mode for mode in ("nearest", "nearest-exact") for rank in (3, 4, 5)}
"""Filters, by torch's mode and the rank of the input."""


def _read_interpolate(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, size, scale, mode, align_corners, recompute, antialias = bind(
        args,
        kwargs,
        input=None,
        size=None,
        scale_factor=None,
        mode="nearest",
        align_corners=None,
        recompute_scale_factor=None,
        antialias=False,
    )
    spatial = x.shape[2:]
    given = _numbers_per_dim(size if scale is None else scale, len(spatial))
    if (size is None) == (scale is None) or given is None:
        return None
    if not x.is_floating_point() or not 3 <= x.dim() <= 5:
        return None
    if scale is None:
        out = [int(n) for n in given]
    else:
        out = [int(n * factor) for n, factor in zip(spatial, given, strict=True)]
    shape = (*x.shape[:2], *out)
    known = FILTERS.get((mode, x.dim()))
    if 0 in shape or 0 in spatial:
        return None
    if known is None and mode not in ("area", "bicubic", "bilinear"):
        return None
    if mode == "area":
        plain = align_corners is None and not antialias
        return adaptive_pool("average", x, out) if plain else None
    scales: tuple[float | None, ...] = (None,) * len(out)
    if scale is not None and not recompute:
        scales = tuple(map(float, given))
    if antialias or _may_be_copied(mode, spatial, out, scales):
        known = None
    return Call(Interpolate(shape, known, bool(align_corners), scales), (x,))


def _may_be_copied(
    mode: str,
    spatial: Sequence[int],
    out: Sequence[int],
    scales: Sequence[float | None],
) -> bool:
    """Whether torch may copy entries instead of using a scale factor that was given.

    It may do so where the output has the size of the input, or in the nearest modes
    twice that, although the factor is another one.
    """
    factors = (1, 2) if mode.startswith("nearest") else (1,)
    for n, m, scale in zip(spatial, out, scales, strict=True):
        if scale is not None and m in [n * k for k in factors] and m != n * scale:
            return True
    return False


def _numbers_per_dim(value: Any, count: int) -> Sequence[Any] | None:
    """Returns a number for each dimension; None for anything else that torch may take."""
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,) * count
    if len(values) != count or not all(isinstance(v, (int, float)) for v in values):
        return None
    return values


def _read_pad(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, pad, mode = bind(args, kwargs, input=None, pad=None, mode="constant")
    if mode not in ("constant", "reflect", "replicate", "circular"):
        return None
    if len(pad) % 2 or len(pad) > 2 * x.dim():
        return None
    given = [(int(a), int(b)) for a, b in zip(pad[::2], pad[1::2], strict=True)]
    pads = ((0, 0),) * (x.dim() - len(given)) + tuple(reversed(given))
    shape = tuple(n + a + b for n, (a, b) in zip(x.shape, pads, strict=True))
    # torch refuses a circular padding of more entries than the input has, and a
    # reflection of as many.
    slack = {"circular": 0, "reflect": -1}.get(mode)
    sides = zip(pads, x.shape, strict=True)
    if slack is not None and any(max(pair) > n + slack for pair, n in sides):
        return None
    if min(shape, default=0) <= 0 or not all(x.shape):
        return None
    if mode != "constant" and x.dim() < 3:
        return None
    if mode == "circular":
        return Call(CircularPad(shape, pads, mode), (x, x, x))
    return Call(Pad(shape, pads, mode), (x,))


def _read_pixel_unshuffle(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, r = bind(args, kwargs, input=None, downscale_factor=None)
    if x.dim() != 4 or r < 2 or x.shape[2] % r or x.shape[3] % r or not all(x.shape):
        return None
    n, c, h, w = x.shape
    return Call(PixelUnshuffle((n, c * r * r, h // r, w // r), r), (x,))


READERS: dict[str, Reader] = {
    "interpolate": _read_interpolate,
    "pad": _read_pad,
    "pixel_unshuffle": _read_pixel_unshuffle,
}
