"""Operators whose results share memory with their input: other orders, ranges and
pieces of its dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from types import EllipsisType
from typing import Any

from torch import Tensor

from hetconv.sharding.conv_spec import Span
from hetconv.sharding.layer_rules import REPLICATE, Gather, OpSharding, Split
from hetconv.sharding.layout import Box, Layout, Shape, spans

from .base import (
    Args,
    Call,
    Kwargs,
    Reader,
    arg,
    dim_of,
    dims_of,
    inputs_unless,
    per_sample,
    sharded_dims,
)
from .shapes import sizes_of


@dataclass(frozen=True)
class View:
    """A permutation, an index, a broadcast. ``dims``: for each output dimension that of
    the input, None for a new one.

    ``spans`` are the ranges of the input that are seen; a dimension that is not among
    ``dims`` is dropped. Of a range, every entry is seen, or every so many as ``steps``
    says.
    """

    shape: Shape
    spans: tuple[Span, ...]
    dims: tuple[int | None, ...]
    strides: tuple[int, ...] = ()

    @per_sample(inputs_unless(lambda op: op.dims[:1] != (0,)))
    def sharding(
        self, inputs: tuple[Layout, ...], split: Split = REPLICATE
    ) -> OpSharding:
        x = inputs[0]
        if x.kind == "partial" and prod(self.shape) <= prod(
            x.shape
        ):  # else a sum of many more numbers would follow
            return OpSharding((x,), Layout.partial(self.shape, x.world, x.shares))
        if (
            x.kind != "sharded"
            or not sharded_dims(x) <= set(self.dims)
            or 0 in self.shape
        ):
            return Gather(self.shape).sharding(inputs)
        return OpSharding(
            (x,), Layout(self.shape, "sharded", tuple(map(self.seen, x.boxes)))
        )

    def seen(self, box: Box) -> Box:
        """Where what a box of the input shows lies in the output; what shows nothing
        keeps its place in the order.
        """
        ends: list[Span] = []
        for d, n in zip(self.dims, self.shape, strict=True):
            ends.append((0, n) if d is None else self.taken(d, (box.lo[d], box.hi[d])))
        return Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))

    def taken(self, d: int, held: Span) -> Span:
        """Where the entries of a range of input dimension ``d`` that are seen lie in the output."""
        (lo, hi), step = self.spans[d], self.stride_along(d)
        a, b = (-(-(min(max(end, lo), hi) - lo) // step) for end in held)
        return a, b

    def stride_along(self, d: int) -> int:
        return self.strides[d] if self.strides else 1


@dataclass(frozen=True)
class SplitView:
    """Several views of one input, one after another along ``dim``."""

    views: tuple[View, ...]
    dim: int

    def sharding(
        self, inputs: tuple[Layout, ...], split: Split = REPLICATE
    ) -> OpSharding:
        return self.shardings(inputs)[0]

    def shardings(self, inputs: tuple[Layout, ...]) -> tuple[OpSharding, ...]:
        """One for each view."""
        if inputs[0].kind == "sharded" and self.dim in sharded_dims(inputs[0]):
            return tuple(Gather(view.shape).sharding(inputs) for view in self.views)
        return tuple(view.sharding(inputs) for view in self.views)


def view_of(
    x: Tensor,
    dims: Sequence[int | None],
    ranges: dict[int, tuple[int, int]] | None = None,
    steps: dict[int, int] | None = None,
) -> View:
    """The view whose output dimensions are these of the input, with ranges of them;
    None for a new one of size 1.
    """
    seen = [(ranges or {}).get(d, (0, n)) for d, n in enumerate(x.shape)]
    every = [(steps or {}).get(d, 1) for d in range(x.dim())]
    shape = (
        1 if d is None else -(-(seen[d][1] - seen[d][0]) // every[d]) for d in dims
    )
    return View(tuple(shape), tuple(seen), tuple(dims), tuple(every) if steps else ())


def _permute(x: Tensor, name: str, args: Args, kwargs: Kwargs) -> View | None:
    dims = dims_of(sizes_of(args, kwargs, "dims"), x.dim())
    return view_of(x, dims) if dims is not None and len(dims) == x.dim() else None


def _transpose(x: Tensor, name: str, args: Args, kwargs: Kwargs) -> View | None:
    if name in ("T", "t"):
        return view_of(x, range(x.dim())[::-1]) if x.dim() <= 2 else None
    names = ("axis0", "axis1") if name == "swapaxes" else ("dim0", "dim1")
    pair = (
        (-2, -1)
        if name == "mT"
        else [arg(args, kwargs, i + 1, n) for i, n in enumerate(names)]
    )
    a, b = (dim_of(d, x.dim()) for d in pair)
    if a is None or b is None:
        return None
    order = list(range(x.dim()))
    order[a], order[b] = b, a
    return view_of(x, order)


def _movedim(x: Tensor, name: str, args: Args, kwargs: Kwargs) -> View | None:
    source, target = (
        dims_of(arg(args, kwargs, i, n), x.dim())
        for i, n in ((1, "source"), (2, "destination"))
    )
    if source is None or target is None or len(source) != len(target):
        return None
    order = [d for d in range(x.dim()) if d not in source]
    for to, d in sorted(zip(target, source, strict=True)):
        order.insert(to, d)
    return view_of(x, order)


def _unsqueeze(x: Tensor, name: str, args: Args, kwargs: Kwargs) -> View | None:
    dim = dim_of(arg(args, kwargs, 1, "dim"), x.dim() + 1)
    return (
        view_of(x, [*range(dim), None, *range(dim, x.dim())])
        if dim is not None
        else None
    )


def _squeeze(x: Tensor, name: str, args: Args, kwargs: Kwargs) -> View | None:
    given = len(args) > 1 or "dim" in kwargs
    dims = (
        dims_of(arg(args, kwargs, 1, "dim"), x.dim()) if given else list(range(x.dim()))
    )
    return (
        view_of(x, [d for d, n in enumerate(x.shape) if n != 1 or d not in dims])
        if dims is not None
        else None
    )


def _expand(x: Tensor, name: str, args: Args, kwargs: Kwargs) -> View | None:
    if name == "expand_as":
        other = arg(args, kwargs, 1, "other")
        sizes = tuple(other.shape) if isinstance(other, Tensor) else None
    else:
        sizes = sizes_of(
            args, {k: v for k, v in kwargs.items() if k != "implicit"}, "size"
        )
    if sizes is None or len(sizes) < x.dim():
        return None
    new = len(sizes) - x.dim()
    if (
        min(sizes, default=0) < -1
        or -1 in sizes[:new]
        or any(
            n not in (-1, m) and m != 1
            for n, m in zip(sizes[new:], x.shape, strict=True)
        )
    ):
        return None
    kept = [d if n in (-1, x.shape[d]) else None for d, n in enumerate(sizes[new:])]
    view = view_of(x, [None] * new + kept)
    return View(
        tuple(m if n == -1 else n for n, m in zip(sizes, view.shape, strict=True)),
        view.spans,
        view.dims,
    )


def _getitem(x: Tensor, name: str, args: Args, kwargs: Kwargs) -> View | None:
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    taken = sum(type(i) is int or isinstance(i, slice) for i in index)
    dots = [k for k, i in enumerate(index) if isinstance(i, EllipsisType)]
    if (
        len(dots) > 1
        or taken > x.dim()
        or not all(i is None or _is_basic(i) for i in index)
    ):
        return None
    at = dots[0] if dots else len(index)
    full = (*index[:at], *(slice(None),) * (x.dim() - taken), *index[at + 1 :])
    dims: list[int | None] = []
    ranges: dict[int, tuple[int, int]] = {}
    steps: dict[int, int] = {}
    d = 0
    for i in full:
        if i is None:
            dims.append(None)
            continue
        if isinstance(i, slice):
            lo, hi, step = i.indices(x.shape[d])
            ranges[d] = (lo, max(lo, hi))
            if step > 1:
                steps[d] = step
            dims.append(d)
        else:
            entry = _entry(x, d, i)
            if entry is None:
                return None
            ranges[d] = entry
        d += 1
    return view_of(x, dims, ranges, steps)


def _is_basic(i: Any) -> bool:
    if isinstance(i, slice):
        whole = all(e is None or type(e) is int for e in (i.start, i.stop, i.step))
        return whole and (i.step is None or i.step > 0)  # torch refuses others
    return type(i) is int or isinstance(i, EllipsisType)


def _entry(x: Tensor, dim: int, i: Any) -> tuple[int, int] | None:
    n = x.shape[dim]
    return (i % n, i % n + 1) if type(i) is int and -n <= i < n else None


def _select(x: Tensor, name: str, args: Args, kwargs: Kwargs) -> View | None:
    dim = dim_of(arg(args, kwargs, 1, "dim"), x.dim())
    entry = _entry(x, dim, arg(args, kwargs, 2, "index")) if dim is not None else None
    if dim is None or entry is None:
        return None
    return view_of(x, [d for d in range(x.dim()) if d != dim], {dim: entry})


def _narrow(x: Tensor, name: str, args: Args, kwargs: Kwargs) -> View | None:
    dim = dim_of(arg(args, kwargs, 1, "dim"), x.dim())
    lo, n = arg(args, kwargs, 2, "start"), arg(args, kwargs, 3, "length")
    if dim is None or type(lo) is not int or type(n) is not int:
        return None
    lo = lo + x.shape[dim] if lo < 0 else lo
    return (
        view_of(x, range(x.dim()), {dim: (lo, lo + n)})
        if 0 <= lo <= lo + n <= x.shape[dim]
        else None
    )


def _pieces(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, dim = (
        arg(args, kwargs, 0, "input"),
        arg(args, kwargs, 1 if name == "unbind" else 2, "dim", 0),
    )
    dim = dim_of(dim, x.dim()) if isinstance(x, Tensor) else None
    if dim is None:
        return None
    if name == "unbind":
        kept = [d for d in range(x.dim()) if d != dim]
        views = tuple(view_of(x, kept, {dim: (i, i + 1)}) for i in range(x.shape[dim]))
        return Call(SplitView(views, dim), (x,)) if views else None
    how = {
        "chunk": "chunks",
        "split": "split_size_or_sections",
        "split_with_sizes": "split_sizes",
    }
    sizes = _sizes(
        name, x.shape[dim], arg(args, kwargs, 1, how.get(name, "indices_or_sections"))
    )
    if not sizes or min(sizes) < 0 or sum(sizes) != x.shape[dim]:
        return None
    return Call(
        SplitView(
            tuple(view_of(x, range(x.dim()), {dim: span}) for span in spans(sizes)), dim
        ),
        (x,),
    )


def _sizes(name: str, n: int, how: Any) -> tuple[int, ...] | None:
    """The extents of the pieces; None where torch is left to say them."""
    if name == "tensor_split":
        if type(how) is int:
            return (
                tuple(n // how + (i < n % how) for i in range(how)) if how > 0 else None
            )
        return None
    if type(how) is int:
        each = -(-n // how) if name == "chunk" and how > 0 else how
        return (
            tuple(min(each, n - lo) for lo in range(0, n, each)) if each > 0 else None
        )
    return (
        tuple(how)
        if isinstance(how, Sequence) and all(type(s) is int for s in how)
        else None
    )


def _reading(view: Callable[[Tensor, str, Args, Kwargs], View | None]) -> Reader:
    def read(name: str, args: Args, kwargs: Kwargs) -> Call | None:
        x = arg(args, kwargs, 0, "input")
        op = view(x, name, args, kwargs) if isinstance(x, Tensor) else None
        return Call(op, (x,)) if op is not None else None

    return read


READERS: dict[str, Reader] = {
    **dict.fromkeys(
        ("transpose", "swapaxes", "swapdims", "t", "T", "mT"), _reading(_transpose)
    ),
    **dict.fromkeys(("movedim", "moveaxis"), _reading(_movedim)),
    **dict.fromkeys(("expand", "expand_as"), _reading(_expand)),
    **dict.fromkeys(
        ("chunk", "split", "split_with_sizes", "tensor_split", "unbind"), _pieces
    ),
    "permute": _reading(_permute),
    "unsqueeze": _reading(_unsqueeze),
    "squeeze": _reading(_squeeze),
    "getitem": _reading(_getitem),
    "select": _reading(_select),
    "narrow": _reading(_narrow),
}
