"""Calls that give the same numbers another shape or place."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor

from hetconv.operators import Cat, PixelShuffle, Reshape, Stack

from .base import Args, Call, Kwargs, Reader, arg, dim_of


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
    return Call(Reshape((*x.shape[:start], prod(x.shape[start : end + 1]), *x.shape[end + 1 :])), (x,))


def sizes_of(args: Args, kwargs: Kwargs, name: str) -> tuple[int, ...] | None:
    """Integers given one by one, as a sequence, or by keyword; None for anything else."""
    given = args[1:] if len(args) > 1 else (kwargs.get(name),)
    listed = tuple(given[0]) if len(given) == 1 and isinstance(given[0], Sequence) else tuple(given)
    return listed if all(type(n) is int for n in listed) else None


def _filled(shape: tuple[int, ...], total: int) -> tuple[int, ...] | None:
    """A shape with the extent that a single -1 stands for; None where torch has something to say."""
    known = prod(n for n in shape if n != -1)
    if shape.count(-1) == 1 and known > 0 and total % known == 0:
        return tuple(total // known if n == -1 else n for n in shape)
    return shape if min(shape, default=0) >= 0 and known == total else None


def _reshape(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, shape = arg(args, kwargs, 0, "input"), sizes_of(args, kwargs, "size" if name == "view" else "shape")
    filled = _filled(shape, x.numel()) if isinstance(x, Tensor) and shape is not None else None
    return Call(Reshape(filled), (x,)) if filled is not None else None


def _unflatten(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, dim, sizes = (arg(args, kwargs, i, n) for i, n in enumerate(("input", "dim", "sizes")))
    dim = dim_of(dim, x.dim())
    if dim is None or not isinstance(sizes, Sequence):
        return None
    filled = _filled(tuple(sizes), x.shape[dim])
    return Call(Reshape((*x.shape[:dim], *filled, *x.shape[dim + 1 :])), (x,)) if filled else None


def _joined(args: Args, kwargs: Kwargs) -> tuple[tuple[Tensor, ...], Any] | None:
    """(the tensors of a concatenation, the dimension), unless they differ in rank."""
    tensors, dim = arg(args, kwargs, 0, "tensors"), arg(args, kwargs, 1, "dim", 0)
    same = isinstance(tensors, Sequence) and len({x.dim() for x in tensors}) == 1
    return (tuple(tensors), dim) if same and isinstance(dim, int) else None


def _cat(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    joined = _joined(args, kwargs)
    if joined is None:
        return None
    tensors, dim = joined
    dim %= tensors[0].dim()
    shape = list(tensors[0].shape)
    shape[dim] = sum(x.shape[dim] for x in tensors)
    return Call(Cat(tuple(shape), dim), tensors)


def _stack(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    joined = _joined(args, kwargs)
    if joined is None or len({x.shape for x in joined[0]}) != 1:
        return None
    tensors, shape = joined[0], joined[0][0].shape
    dim = dim_of(joined[1], len(shape) + 1)
    if dim is None:
        return None
    return Call(Stack((*shape[:dim], len(tensors), *shape[dim:]), dim), tensors)


READERS: dict[str, Reader] = {
    "pixel_shuffle": _pixel_shuffle, "flatten": _flatten, "cat": _cat, "stack": _stack, "reshape": _reshape,
    "view": _reshape, "unflatten": _unflatten,
}  # fmt: skip
