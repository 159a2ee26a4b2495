"""Calls that give images another size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hetconv.operators import CircularPad, Interpolate, Pad, PixelUnshuffle

from .base import Args, Call, Kwargs, Reader, arg
from .pools import adaptive_pool

FILTERS: dict[tuple[str, int], Any] = {
    ("linear", 3): "linear", ("bilinear", 4): "linear", ("trilinear", 5): "linear", ("bicubic", 4): "cubic",
} | {(mode, rank): mode for mode in ("nearest", "nearest-exact") for rank in (3, 4, 5)}  # fmt: skip
"""By mode and number of dimensions."""


def _interpolate(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, mode = arg(args, kwargs, 0, "input"), arg(args, kwargs, 3, "mode", "nearest")
    size, scale = arg(args, kwargs, 1, "size"), arg(args, kwargs, 2, "scale_factor")
    align, recompute = arg(args, kwargs, 4, "align_corners"), arg(args, kwargs, 5, "recompute_scale_factor")
    antialias, spatial = arg(args, kwargs, 6, "antialias", False), x.shape[2:]
    given = _per_dimension(size if scale is None else scale, len(spatial))
    if (size is None) == (scale is None) or given is None or not x.is_floating_point() or not 3 <= x.dim() <= 5:
        return None
    out = [int(g) if scale is None else int(n * g) for n, g in zip(spatial, given, strict=True)]
    shape = (*x.shape[:2], *out)
    known = FILTERS.get((mode, x.dim()))
    if 0 in shape or 0 in spatial or (known is None and mode not in ("area", "bicubic", "bilinear")):
        return None
    if mode == "area":
        return adaptive_pool("average", x, out) if align is None and not antialias else None
    scales = (None,) * len(out) if scale is None or recompute else tuple(map(float, given))
    simple = (1, 2) if mode.startswith("nearest") else (1,)
    odd = (m == n * k != n * s for n, m, s in zip(spatial, out, scales, strict=True) if s is not None for k in simple)
    if antialias or any(odd):  # of once or twice the size by another factor, torch may or may not make a plain copy
        known = None
    return Call(Interpolate(shape, known, bool(align), scales), (x,))


def _per_dimension(value: Any, count: int) -> Sequence[Any] | None:
    """One number per dimension; None for what else torch may take or refuse."""
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,) * count
    return values if len(values) == count and all(isinstance(v, (int, float)) for v in values) else None


def _pad(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, pad, mode = arg(args, kwargs, 0, "input"), arg(args, kwargs, 1, "pad"), arg(args, kwargs, 2, "mode", "constant")
    if mode not in ("constant", "reflect", "replicate", "circular") or len(pad) % 2 or len(pad) > 2 * x.dim():
        return None
    given = [(int(a), int(b)) for a, b in zip(pad[::2], pad[1::2], strict=True)]
    pads = ((0, 0),) * (x.dim() - len(given)) + tuple(reversed(given))
    shape = tuple(n + a + b for n, (a, b) in zip(x.shape, pads, strict=True))
    most = {"circular": 0, "reflect": -1}.get(mode)
    if most is not None and any(max(pair) > n + most for pair, n in zip(pads, x.shape, strict=True)):
        return None  # torch refuses it: let it
    if min(shape, default=0) <= 0 or not all(x.shape) or (mode != "constant" and x.dim() < 3):
        return None
    return Call(CircularPad(shape, pads, mode), (x, x, x)) if mode == "circular" else Call(Pad(shape, pads, mode), (x,))


def _pixel_unshuffle(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, r = arg(args, kwargs, 0, "input"), arg(args, kwargs, 1, "downscale_factor")
    if x.dim() != 4 or r < 2 or x.shape[2] % r or x.shape[3] % r or not all(x.shape):
        return None
    n, c, h, w = x.shape
    return Call(PixelUnshuffle((n, c * r * r, h // r, w // r), r), (x,))


READERS: dict[str, Reader] = {"interpolate": _interpolate, "pad": _pad, "pixel_unshuffle": _pixel_unshuffle}
