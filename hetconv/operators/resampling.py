"""Operators that give images another size: interpolation, padding and cropping, pixels
folded into channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import floor
from struct import pack, unpack
from typing import Any, Literal

from hetconv.sharding.conv_spec import Span
from hetconv.sharding.layer_rules import REPLICATE, Gather, OpSharding, Split
from hetconv.sharding.layout import Layout, Shape, apportion, spans

from .base import (
    Args,
    Call,
    Kwargs,
    Reader,
    arg,
    inputs_unless,
    per_sample,
    reduce_scattered,
    resharded,
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
"""The inputs that an output reads, from the one at or below its source coordinate."""


@dataclass(frozen=True)
class Interpolate:
    """Separable interpolation. ``scales``: the given factor per spatial dimension, None
    for the ratio of the sizes.

    Without a ``filter`` (area, antialias) only torch knows what an output reads.
    """

    shape: Shape
    filter: Filter | None
    align_corners: bool
    scales: tuple[float | None, ...]

    @per_sample()
    def sharding(
        self, inputs: tuple[Layout, ...], split: Split = REPLICATE
    ) -> OpSharding:
        x = reduce_scattered(inputs[0])
        if x.kind != "sharded" or x.dim is None or (x.dim > 1 and self.filter is None):
            return Gather(self.shape).sharding(inputs)
        dim, n = x.dim, x.shape[x.dim]
        if dim < 2:
            return OpSharding((x,), resharded(x, self.shape, dim, x.sizes))
        if not all(self._settled(d, x.shape[d]) for d in range(2, len(x.shape))):
            return Gather(self.shape).sharding(inputs)
        y = resharded(x, self.shape, dim, apportion(self.shape[dim], x.sizes))
        reads = [self.reads(dim, n, (b.lo[dim], b.hi[dim])) for b in y.boxes]
        need = slab_reads(x.shape, dim, reads)
        own = all(
            a == b or not (a.numel or b.numel)
            for a, b in zip(need.boxes, x.boxes, strict=True)
        )
        return OpSharding((x if own else need,), y)

    def ratio(self, dim: int, n: int) -> float:
        """Inputs per output along ``dim``, as torch computes it."""
        out, scale = self.shape[dim], self.scales[dim - 2]
        if self.align_corners:
            return (n - 1) / (out - 1) if out > 1 else 0.0
        return 1.0 / scale if scale is not None else n / out

    def factor(self, dim: int, n: int) -> int:
        """k, where every input has k outputs at the same distances, so that torch can
        interpolate a slab; else 0.
        """
        k, ratio = self.shape[dim] // n, self.ratio(dim, n)
        if self.shape[dim] != k * n or ratio != 1 / k:
            return 0
        return k

    def reads(self, dim: int, n: int, out: Span) -> Span:
        """The inputs, of ``n`` along ``dim``, that the outputs ``out`` read."""
        if out[0] >= out[1]:
            return (0, 0)
        assert self.filter is not None
        below, above = TAPS[self.filter]
        first, last = self._source(dim, n, out[0]), self._source(dim, n, out[1] - 1)
        exact = self.filter == "linear" and last == floor(
            last
        )  # then the second tap weighs nothing
        lo, hi = floor(first) + below, floor(last) + (1 if exact else above)
        lo = min(max(lo, 0), n - 1)
        return lo, max(min(hi, n), lo + 1)

    def _source(self, dim: int, n: int, p: int) -> float:
        """The source coordinate of output ``p``."""
        ratio = self.ratio(dim, n)
        if self.filter == "nearest" or self.align_corners:
            return p * ratio
        return (p + 0.5) * ratio - (0.0 if self.filter == "nearest-exact" else 0.5)

    def _settled(self, dim: int, n: int) -> bool:
        """Whether nearest inputs are the same however torch rounds; its own forward and
        backward may differ else.
        """
        if self.filter not in ("nearest", "nearest-exact"):
            return True
        return _same_rounded(
            self.ratio(dim, n),
            self.shape[dim],
            0.5 if self.filter == "nearest-exact" else 0.0,
        )


def _single(x: float) -> float:
    """``x`` rounded to single precision, in which torch may compute coordinates."""
    return float(unpack("f", pack("f", x))[0])


@lru_cache(maxsize=1024)
def _same_rounded(ratio: float, out: int, offset: float) -> bool:
    """Whether the ways in which torch computes (p + offset) ratio for p < out agree on
    the pixel below.
    """
    short = _single(ratio)
    for p in range(out):
        at = p + offset
        ways = (
            at * short,
            _single(at * short),
            _single(_single(at * short) - offset) + offset,
        )
        if any(floor(way) != floor(at * ratio) for way in ways):
            return False
    return True


@dataclass(frozen=True)
class Pad:
    """Padding by ``pads`` (before, after) per dimension; negative ones crop."""

    shape: Shape
    pads: tuple[Span, ...]
    mode: PadMode

    @per_sample(inputs_unless(lambda op: op.pads[0] != (0, 0)))
    def sharding(
        self, inputs: tuple[Layout, ...], split: Split = REPLICATE
    ) -> OpSharding:
        x = reduce_scattered(inputs[0])
        sizes = self._sizes(x) if x.kind == "sharded" and x.dim is not None else None
        if sizes is None or x.dim is None:
            return Gather(self.shape).sharding(inputs)
        y = resharded(x, self.shape, x.dim, sizes)
        if self.mode != "reflect" or self.pads[x.dim] == (0, 0):
            return OpSharding((x,), y)
        reads = [_mirrored(a, b, x.shape[x.dim]) for a, b in self.sources(y)]
        beyond = any(
            lo < a or hi > b
            for (lo, hi), (a, b) in zip(reads, spans(x.sizes), strict=True)
            if lo < hi
        )
        return OpSharding((slab_reads(x.shape, x.dim, reads) if beyond else x,), y)

    def sources(self, y: Layout) -> list[Span]:
        """What each rank's part of the result shows along the cut, counted from the
        first entry of the input.
        """
        dim = y.inner_dim
        assert dim is not None
        before = self.pads[dim][0]
        return [(b.lo[dim] - before, b.hi[dim] - before) for b in y.boxes]

    def _sizes(self, x: Layout) -> list[int] | None:
        """Each rank keeps what is not cropped of its own; the first and the last with
        any take the padding.
        """
        assert x.dim is not None
        before, after = self.pads[x.dim]
        lo, hi = max(-before, 0), x.shape[x.dim] - max(-after, 0)
        kept = [max(min(b, hi) - max(a, lo), 0) for a, b in spans(x.sizes)]
        ranks = [r for r, size in enumerate(kept) if size]
        if not ranks:
            return None
        kept[ranks[0]] += max(before, 0)
        kept[ranks[-1]] += max(after, 0)
        return kept


def _mirrored(a: int, b: int, n: int) -> Span:
    """The entries of 0 .. n - 1 from which those of a .. b - 1 are taken, if they are
    mirrored at both ends.
    """
    lo, hi = max(a, 0), min(b, n)
    if a >= b:
        return (0, 0)
    return min(lo, 2 * n - 1 - b) if b > n else lo, max(hi, 1 - a) if a < 0 else hi


@dataclass(frozen=True)
class CircularPad(Pad):
    """Padding with what lies at the other end. Its input counts three times: for what
    is kept, comes before, and after.

    What is cropped at one end is not found there by the other: where a crop meets the
    cut, torch does it.
    """

    @per_sample(inputs_unless(lambda op: op.pads[0] != (0, 0)))
    def sharding(
        self, inputs: tuple[Layout, ...], split: Split = REPLICATE
    ) -> OpSharding:
        sharding, x = super().sharding(inputs[:1]), inputs[0]
        if sharding.output.dim is not None and min(self.pads[sharding.output.dim]) < 0:
            sharding = Gather(self.shape).sharding(inputs[:1])
        y, nothing = sharding.output, slab_reads(x.shape, 0, [(0, 0)] * x.world)
        if y.dim is None or self.pads[y.dim] == (0, 0):
            return OpSharding((*sharding.input_layouts, nothing, nothing), y)
        n, sources = x.shape[y.dim], self.sources(y)
        turns = (
            [(min(max(a + turn, 0), n), min(max(b + turn, 0), n)) for a, b in sources]
            for turn in (0, n, -n)
        )
        return OpSharding(
            tuple(slab_reads(x.shape, y.dim, reads) for reads in turns), y
        )


@dataclass(frozen=True)
class PixelUnshuffle:
    """(N, C, H r, W r) -> (N, C r^2, H, W)."""

    shape: Shape
    factor: int

    @per_sample()
    def sharding(
        self, inputs: tuple[Layout, ...], split: Split = REPLICATE
    ) -> OpSharding:
        x, r = inputs[0], self.factor
        if x.kind == "partial":
            return OpSharding((x,), Layout.partial(self.shape, x.world, x.shares))
        if x.kind != "sharded" or x.dim is None:
            return Gather(self.shape).sharding(inputs)
        if x.dim < 2:
            scale = r * r if x.dim == 1 else 1
            return OpSharding(
                (x,), resharded(x, self.shape, x.dim, [s * scale for s in x.sizes])
            )
        sizes = apportion(
            self.shape[x.dim], x.sizes
        )  # where a cut lies within a block of pixels, a few rows move
        return OpSharding(
            (Layout.sharded(x.shape, x.dim, [s * r for s in sizes]),),
            resharded(x, self.shape, x.dim, sizes),
        )


FILTERS: dict[tuple[str, int], Any] = {
    ("linear", 3): "linear",
    ("bilinear", 4): "linear",
    ("trilinear", 5): "linear",
    ("bicubic", 4): "cubic",
} | {(mode, rank): mode for mode in ("nearest", "nearest-exact") for rank in (3, 4, 5)}
"""By mode and number of dimensions."""


def _interpolate(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, mode = arg(args, kwargs, 0, "input"), arg(args, kwargs, 3, "mode", "nearest")
    size, scale = arg(args, kwargs, 1, "size"), arg(args, kwargs, 2, "scale_factor")
    align, recompute = (
        arg(args, kwargs, 4, "align_corners"),
        arg(args, kwargs, 5, "recompute_scale_factor"),
    )
    antialias, spatial = arg(args, kwargs, 6, "antialias", False), x.shape[2:]
    given = _per_dimension(size if scale is None else scale, len(spatial))
    if (
        (size is None) == (scale is None)
        or given is None
        or not x.is_floating_point()
        or not 3 <= x.dim() <= 5
    ):
        return None
    out = [
        int(g) if scale is None else int(n * g)
        for n, g in zip(spatial, given, strict=True)
    ]
    shape = (*x.shape[:2], *out)
    known = FILTERS.get((mode, x.dim()))
    if (
        0 in shape
        or 0 in spatial
        or (known is None and mode not in ("area", "bicubic", "bilinear"))
    ):
        return None
    if mode == "area":
        return (
            adaptive_pool("average", x, out)
            if align is None and not antialias
            else None
        )
    scales = (
        (None,) * len(out) if scale is None or recompute else tuple(map(float, given))
    )
    simple = (1, 2) if mode.startswith("nearest") else (1,)
    odd = (
        m == n * k != n * s
        for n, m, s in zip(spatial, out, scales, strict=True)
        if s is not None
        for k in simple
    )
    if (
        antialias or any(odd)
    ):  # of once or twice the size by another factor, torch may or may not make a plain copy
        known = None
    return Call(Interpolate(shape, known, bool(align), scales), (x,))


def _per_dimension(value: Any, count: int) -> Sequence[Any] | None:
    """One number per dimension; None for what else torch may take or refuse."""
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,) * count
    return (
        values
        if len(values) == count and all(isinstance(v, (int, float)) for v in values)
        else None
    )


def _pad(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, pad, mode = (
        arg(args, kwargs, 0, "input"),
        arg(args, kwargs, 1, "pad"),
        arg(args, kwargs, 2, "mode", "constant"),
    )
    if (
        mode not in ("constant", "reflect", "replicate", "circular")
        or len(pad) % 2
        or len(pad) > 2 * x.dim()
    ):
        return None
    given = [(int(a), int(b)) for a, b in zip(pad[::2], pad[1::2], strict=True)]
    pads = ((0, 0),) * (x.dim() - len(given)) + tuple(reversed(given))
    shape = tuple(n + a + b for n, (a, b) in zip(x.shape, pads, strict=True))
    most = {"circular": 0, "reflect": -1}.get(mode)
    if most is not None and any(
        max(pair) > n + most for pair, n in zip(pads, x.shape, strict=True)
    ):
        return None  # torch refuses it: let it
    if (
        min(shape, default=0) <= 0
        or not all(x.shape)
        or (mode != "constant" and x.dim() < 3)
    ):
        return None
    return (
        Call(CircularPad(shape, pads, mode), (x, x, x))
        if mode == "circular"
        else Call(Pad(shape, pads, mode), (x,))
    )


def _pixel_unshuffle(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, r = arg(args, kwargs, 0, "input"), arg(args, kwargs, 1, "downscale_factor")
    if x.dim() != 4 or r < 2 or x.shape[2] % r or x.shape[3] % r or not all(x.shape):
        return None
    n, c, h, w = x.shape
    return Call(PixelUnshuffle((n, c * r * r, h // r, w // r), r), (x,))


READERS: dict[str, Reader] = {
    "interpolate": _interpolate,
    "pad": _pad,
    "pixel_unshuffle": _pixel_unshuffle,
}
