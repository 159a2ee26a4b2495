"""Calls that give the same numbers another shape or place."""

from __future__ import annotations

import torch

from ..following import Cat, Flatten, PixelShuffle
from .base import Args, Call, Kwargs, Reader, arg


def _pixel_shuffle(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, r = arg(args, kwargs, 0, "input"), arg(args, kwargs, 1, "upscale_factor")
    if x.dim() != 4 or x.shape[1] % (r * r):
        return None
    n, c, h, w = x.shape
    return Call(PixelShuffle((n, c // (r * r), h * r, w * r), r), (x,))


def _flatten(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x = arg(args, kwargs, 0, "input")
    if x.dim() == 0:
        return None
    start, end = (arg(args, kwargs, i, n, d) % x.dim() for i, n, d in ((1, "start_dim", 0), (2, "end_dim", -1)))
    if start >= end:
        return None
    flat = tuple(x.shape[start : end + 1])
    return Call(Flatten((*x.shape[:start], torch.Size(flat).numel(), *x.shape[end + 1 :]), start, end), (x,))


def _cat(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    tensors, dim = arg(args, kwargs, 0, "tensors"), arg(args, kwargs, 1, "dim", 0)
    dims = {x.dim() for x in tensors}
    if not isinstance(dim, int) or len(dims) != 1:
        return None
    dim %= dims.pop()
    shape = list(tensors[0].shape)
    shape[dim] = sum(x.shape[dim] for x in tensors)
    return Call(Cat(tuple(shape), dim), tuple(tensors))


READERS: dict[str, Reader] = {"pixel_shuffle": _pixel_shuffle, "flatten": _flatten, "cat": _cat}
