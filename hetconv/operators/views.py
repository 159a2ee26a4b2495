"""Views: operators whose results share memory with their input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import EllipsisType
from typing import Any

from torch import Tensor

from hetconv.sharding.conv_spec import Span
from hetconv.sharding.layout import Box, Layout, Layouts, Shape, sharded_dims, spans
from hetconv.sharding.rule import Gather, OpSharding
from hetconv.sharding.split import REPLICATE, Split

from .base import (
    Args,
    Call,
    Kwargs,
    PerSampleOperator,
    Reader,
    arg,
    bind,
    canonical_dims,
    canonical_index,
    span_along,
)
from .shapes import read_sizes


@dataclass(frozen=True)
class View(PerSampleOperator):
    """A permutation, an index or a broadcast.

    Attributes:
        shape: Shape of the output.
        spans: The range of each input dimension that is visible.
        dims: For each output dimension that of the input, None for a new one. An input
            dimension that is not among them is dropped.
        strides: For each input dimension the step between visible entries; empty if all
            are 1.
    """

    shape: Shape
    spans: tuple[Span, ...]
    dims: tuple[int | None, ...]
    strides: tuple[int, ...] = ()

    def _has_samples(self, inputs: Layouts) -> Sequence[bool] | None:
        return None if self.dims[:1] != (0,) else super()._has_samples(inputs)

    def _follow(self, inputs: Layouts) -> OpSharding | None:
        x = inputs[0]
        # A larger view of a partial sum would take more bytes to reduce afterwards.
        if x.kind == "partial" and prod(self.shape) <= prod(x.shape):
            return OpSharding((x,), Layout.partial(self.shape, x.world, x.shares))
        keeps_dims = set(sharded_dims(x.shape, x.boxes)) <= set(self.dims)
        if x.kind != "sharded" or not keeps_dims or 0 in self.shape:
            return None
        boxes = tuple(map(self.visible_box, x.boxes))
        return OpSharding((x,), Layout(self.shape, "sharded", boxes))

    def visible_box(self, box: Box) -> Box:
        """Returns where the visible entries of an input's box are in the output.

        A box without any keeps its place in the order.
        """
        ranges = [
            (0, n) if dim is None else self.visible_span(dim, span_along(box, dim))
            for dim, n in zip(self.dims, self.shape, strict=True)
        ]
        return Box(tuple(lo for lo, _ in ranges), tuple(hi for _, hi in ranges))

    def visible_span(self, dim: int, held: Span) -> Span:
        """Returns where the visible entries of a range are in the output.

        Args:
            dim: Dimension of the input.
            held: Range of entries along it.
        """
        (lo, hi), stride = self.spans[dim], self.stride_along(dim)
        start, end = (-(-(min(max(e, lo), hi) - lo) // stride) for e in held)
        return start, end

    def stride_along(self, dim: int) -> int:
        """Returns the step between visible entries of input dimension ``dim``."""
        return self.strides[dim] if self.strides else 1


@dataclass(frozen=True)
class SplitView:
    """Several views of one input, one after another along one dimension.

    Attributes:
        views: The views.
        dim: The dimension.
    """

    views: tuple[View, ...]
    dim: int

    def sharding(self, inputs: Layouts, split: Split = REPLICATE) -> OpSharding:
        """Returns how the first view runs; see `Operator`."""
        return self.shardings(inputs)[0]

    def shardings(self, inputs: Layouts) -> tuple[OpSharding, ...]:
        """Returns how each view runs.

        Args:
            inputs: Layout of the input.
        """
        x = inputs[0]
        if x.kind == "sharded" and self.dim in sharded_dims(x.shape, x.boxes):
            return tuple(Gather(view.shape).sharding(inputs) for view in self.views)
        return tuple(view.sharding(inputs) for view in self.views)


def _view(
    x: Tensor,
    dims: Sequence[int | None],
    ranges: dict[int, Span] | None = None,
    strides: dict[int, int] | None = None,
) -> View:
    """Returns a view of ``x``.

    Args:
        x: The input.
        dims: For each output dimension that of the input; None for a new one of size 1.
        ranges: By input dimension the visible range, where it is not the whole.
        strides: By input dimension the step, where it is not 1.
    """
    visible = [(ranges or {}).get(d, (0, n)) for d, n in enumerate(x.shape)]
    steps = [(strides or {}).get(d, 1) for d in range(x.dim())]
    counts = [-(-(hi - lo) // s) for (lo, hi), s in zip(visible, steps, strict=True)]
    shape = tuple(1 if d is None else counts[d] for d in dims)
    return View(shape, tuple(visible), tuple(dims), tuple(steps) if strides else ())


def _permute(x: Tensor, name: str, args: Args, kwargs: Kwargs) -> View | None:
    dims = canonical_dims(read_sizes(args, kwargs, "dims"), x.dim())
    return _view(x, dims) if dims is not None and len(dims) == x.dim() else None


def _transpose(x: Tensor, name: str, args: Args, kwargs: Kwargs) -> View | None:
    if name in ("T", "t"):
        return _view(x, range(x.dim())[::-1]) if x.dim() <= 2 else None
    if name == "mT":
        pair = [-2, -1]
    elif name == "swapaxes":
        pair = bind(args, kwargs, input=x, axis0=None, axis1=None)[1:]
    else:
        pair = bind(args, kwargs, input=x, dim0=None, dim1=None)[1:]
    a, b = (canonical_index(dim, x.dim()) for dim in pair)
    if a is None or b is None:
        return None
    order = list(range(x.dim()))
    order[a], order[b] = b, a
    return _view(x, order)


def _movedim(x: Tensor, name: str, args: Args, kwargs: Kwargs) -> View | None:
    _, *given = bind(args, kwargs, input=x, source=None, destination=None)
    source, target = (canonical_dims(dims, x.dim()) for dims in given)
    if source is None or target is None or len(source) != len(target):
        return None
    order = [d for d in range(x.dim()) if d not in source]
    for position, dim in sorted(zip(target, source, strict=True)):
        order.insert(position, dim)
    return _view(x, order)


def _unsqueeze(x: Tensor, name: str, args: Args, kwargs: Kwargs) -> View | None:
    dim = canonical_index(arg(args, kwargs, 1, "dim"), x.dim() + 1)
    if dim is None:
        return None
    return _view(x, [*range(dim), None, *range(dim, x.dim())])


def _squeeze(x: Tensor, name: str, args: Args, kwargs: Kwargs) -> View | None:
    dims = canonical_dims(arg(args, kwargs, 1, "dim", range(x.dim())), x.dim())
    if dims is None:
        return None
    return _view(x, [d for d, n in enumerate(x.shape) if n != 1 or d not in dims])


def _expand(x: Tensor, name: str, args: Args, kwargs: Kwargs) -> View | None:
    if name == "expand_as":
        other = arg(args, kwargs, 1, "other")
        sizes = tuple(other.shape) if isinstance(other, Tensor) else None
    else:
        named = {key: value for key, value in kwargs.items() if key != "implicit"}
        sizes = read_sizes(args, named, "size")
    if sizes is None or len(sizes) < x.dim():
        return None
    new_dims = len(sizes) - x.dim()
    if min(sizes, default=0) < -1 or -1 in sizes[:new_dims]:
        return None
    kept: list[int | None] = []
    for dim, (size, n) in enumerate(zip(sizes[new_dims:], x.shape, strict=True)):
        if size not in (-1, n) and n != 1:
            return None
        kept.append(dim if size in (-1, n) else None)
    view = _view(x, [None] * new_dims + kept)
    extents = zip(sizes, view.shape, strict=True)
    return replace(view, shape=tuple(n if size == -1 else size for size, n in extents))


def _getitem(x: Tensor, name: str, args: Args, kwargs: Kwargs) -> View | None:
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    indexed = sum(type(i) is int or isinstance(i, slice) for i in index)
    dots = [k for k, i in enumerate(index) if isinstance(i, EllipsisType)]
    if len(dots) > 1 or indexed > x.dim():
        return None
    if not all(i is None or _is_basic(i) for i in index):
        return None
    position = dots[0] if dots else len(index)
    rest = (slice(None),) * (x.dim() - indexed)
    dims: list[int | None] = []
    ranges: dict[int, Span] = {}
    strides: dict[int, int] = {}
    dim = 0
    for i in (*index[:position], *rest, *index[position + 1 :]):
        if i is None:
            dims.append(None)
            continue
        if isinstance(i, slice):
            lo, hi, step = i.indices(x.shape[dim])
            ranges[dim] = (lo, max(lo, hi))
            if step > 1:
                strides[dim] = step
            dims.append(dim)
        else:
            entry = canonical_index(i, x.shape[dim])
            if entry is None:
                return None
            ranges[dim] = (entry, entry + 1)
        dim += 1
    return _view(x, dims, ranges, strides)


def _is_basic(i: Any) -> bool:
    """Whether an index is an integer, an ellipsis or a slice that torch accepts."""
    if isinstance(i, slice):
        whole = all(e is None or type(e) is int for e in (i.start, i.stop, i.step))
        return whole and (i.step is None or i.step > 0)
    return type(i) is int or isinstance(i, EllipsisType)


def _select(x: Tensor, name: str, args: Args, kwargs: Kwargs) -> View | None:
    _, dim, index = bind(args, kwargs, input=x, dim=None, index=None)
    dim = canonical_index(dim, x.dim())
    entry = canonical_index(index, x.shape[dim]) if dim is not None else None
    if dim is None or entry is None:
        return None
    kept = [d for d in range(x.dim()) if d != dim]
    return _view(x, kept, {dim: (entry, entry + 1)})


def _narrow(x: Tensor, name: str, args: Args, kwargs: Kwargs) -> View | None:
    _, dim, lo, length = bind(args, kwargs, input=x, dim=None, start=None, length=None)
    dim = canonical_index(dim, x.dim())
    if dim is None or type(lo) is not int or type(length) is not int:
        return None
    lo = lo + x.shape[dim] if lo < 0 else lo
    if not 0 <= lo <= lo + length <= x.shape[dim]:
        return None
    return _view(x, range(x.dim()), {dim: (lo, lo + length)})


def _read_unbind(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, dim = bind(args, kwargs, input=None, dim=0)
    dim = canonical_index(dim, x.dim()) if isinstance(x, Tensor) else None
    if dim is None:
        return None
    kept = [d for d in range(x.dim()) if d != dim]
    views = tuple(_view(x, kept, {dim: (i, i + 1)}) for i in range(x.shape[dim]))
    return Call(SplitView(views, dim), (x,)) if views else None


SPLIT_SIZE_ARGS = {
    "chunk": "chunks",
    "split": "split_size_or_sections",
    "split_with_sizes": "split_sizes",
    "tensor_split": "indices_or_sections",
}
"""Name of the argument that says into what a function splits a tensor."""


def _read_split(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x = arg(args, kwargs, 0, "input")
    pieces = arg(args, kwargs, 1, SPLIT_SIZE_ARGS[name])
    dim = arg(args, kwargs, 2, "dim", 0)
    dim = canonical_index(dim, x.dim()) if isinstance(x, Tensor) else None
    if dim is None:
        return None
    sizes = _piece_sizes(name, x.shape[dim], pieces)
    if not sizes or min(sizes) < 0 or sum(sizes) != x.shape[dim]:
        return None
    views = (_view(x, range(x.dim()), {dim: span}) for span in spans(sizes))
    return Call(SplitView(tuple(views), dim), (x,))


def _piece_sizes(name: str, n: int, pieces: Any) -> tuple[int, ...] | None:
    """Returns the extents of the pieces of ``n`` entries."""
    if type(pieces) is int:
        if pieces < 1:
            return None
        if name == "tensor_split":
            return tuple(n // pieces + (i < n % pieces) for i in range(pieces))
        size = -(-n // pieces) if name == "chunk" else pieces
        return tuple(min(size, n - lo) for lo in range(0, n, size)) if size else None
    if name == "tensor_split" or not isinstance(pieces, Sequence):
        return None
    return tuple(pieces) if all(type(size) is int for size in pieces) else None


def _view_reader(view: Callable[[Tensor, str, Args, Kwargs], View | None]) -> Reader:
    """Returns the reader of a function that makes one view of a tensor."""

    def read(name: str, args: Args, kwargs: Kwargs) -> Call | None:
        x = arg(args, kwargs, 0, "input")
        op = view(x, name, args, kwargs) if isinstance(x, Tensor) else None
        return Call(op, (x,)) if op is not None else None

    return read


READERS: dict[str, Reader] = {
    **dict.fromkeys(
        ("transpose", "swapaxes", "swapdims", "t", "T", "mT"), _view_reader(_transpose)
    ),
    **dict.fromkeys(("movedim", "moveaxis"), _view_reader(_movedim)),
    **dict.fromkeys(("expand", "expand_as"), _view_reader(_expand)),
    **dict.fromkeys(SPLIT_SIZE_ARGS, _read_split),
    "unbind": _read_unbind,
    "permute": _view_reader(_permute),
    "unsqueeze": _view_reader(_unsqueeze),
    "squeeze": _view_reader(_squeeze),
    "getitem": _view_reader(_getitem),
    "select": _view_reader(_select),
    "narrow": _view_reader(_narrow),
}
