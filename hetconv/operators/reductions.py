"""Operators along some dimensions: sums, extremes, softmax, sorting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hetconv.sharding.layer_rules import REPLICATE, Gather, OpSharding, Split
from hetconv.sharding.layout import Layout, Shape

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
    reduce_scattered,
    resharded,
)
from .elementwise import elementwise


def _cut_elsewhere(inputs: tuple[Layout, ...], dims: tuple[int, ...]) -> Layout | None:
    """The layout of the first input that is cut, unless along one of ``dims``."""
    lead = next((x for x in map(reduce_scattered, inputs) if x.kind == "sharded"), None)
    return (
        lead
        if lead is not None and lead.dim is not None and lead.dim not in dims
        else None
    )


@dataclass(frozen=True)
class Reduction:
    """One number for all entries along ``dims``. Of a sum or mean (``linear``) a part
    along them gives a summand.

    Of several inputs all are read alike; the result may be several tensors of one
    shape, such as values and indices.
    """

    shape: Shape
    dims: tuple[int, ...]
    keepdim: bool
    linear: bool

    @per_sample(inputs_unless(lambda op: 0 in op.dims))
    def sharding(
        self, inputs: tuple[Layout, ...], split: Split = REPLICATE
    ) -> OpSharding:
        x = inputs[0]
        if self.linear and x.kind == "partial":
            return OpSharding((x,), Layout.partial(self.shape, x.world, x.shares))
        if self.linear and x.dim is not None and x.dim in self.dims:
            return OpSharding((x,), Layout.partial(self.shape, x.world, x.sizes))
        lead = _cut_elsewhere(inputs, self.dims)
        if lead is None or lead.dim is None:
            return Gather(self.shape).sharding(inputs)
        d = (
            lead.dim
            if self.keepdim
            else lead.dim - sum(r < lead.dim for r in self.dims)
        )
        return OpSharding(
            (lead,) * len(inputs), resharded(lead, self.shape, d, lead.sizes)
        )


@dataclass(frozen=True)
class AlongDim:
    """Results along ``dims`` depend on all entries there, and may be more or fewer:
    softmax, a running sum, sorting.
    """

    shape: Shape
    dims: tuple[int, ...]

    @per_sample(inputs_unless(lambda op: 0 in op.dims))
    def sharding(
        self, inputs: tuple[Layout, ...], split: Split = REPLICATE
    ) -> OpSharding:
        lead = _cut_elsewhere(inputs, self.dims)
        if lead is None or lead.dim is None:
            return Gather(self.shape).sharding(inputs)
        return OpSharding(
            (lead,) * len(inputs), resharded(lead, self.shape, lead.dim, lead.sizes)
        )


LINEAR = frozenset({"sum", "mean"})
OF_ALL = {
    **dict.fromkeys(
        (
            "sum",
            "mean",
            "amax",
            "amin",
            "logsumexp",
            "argmax",
            "argmin",
            "prod",
            "any",
            "all",
        ),
        (1, 2),
    ),
    **dict.fromkeys(("var", "std", "var_mean", "std_mean"), (1, 3)),
    **dict.fromkeys(("norm", "linalg_vector_norm"), (2, 3)),
    "count_nonzero": (1, 2),
}
"""Over all dimensions if none is given; where ``dim`` and ``keepdim`` stand among the arguments."""
WITH_INDICES = frozenset({"max", "min", "median", "nanmedian"})
OPTIONS = frozenset(
    {
        "input",
        "dim",
        "axis",
        "keepdim",
        "dtype",
        "correction",
        "unbiased",
        "p",
        "ord",
        "out",
    }
)
ALONG = {
    **dict.fromkeys(("softmax", "log_softmax", "softmin"), (1, None)),
    **dict.fromkeys(
        ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"), (1, None)
    ),
    **dict.fromkeys(("sort", "argsort"), (1, -1)),
    "normalize": (2, 1),
}
"""Of one shape with their input; where ``dim`` stands, and what it is if it is not given."""


def _dims(dim: Any, rank: int) -> tuple[int, ...] | None:
    """The dimensions that a ``dim`` names: all for None; None where torch is left to
    say what it means.
    """
    if dim is None:
        return tuple(range(rank))
    listed = dims_of(dim, rank)
    return tuple(sorted(listed)) if listed else None


def _reduced(
    inputs: tuple[Tensor, ...],
    dims: tuple[int, ...],
    keepdim: bool,
    linear: bool = False,
) -> Call:
    kept = ((d, n) for d, n in enumerate(inputs[0].shape) if keepdim or d not in dims)
    return Call(
        Reduction(tuple(1 if d in dims else n for d, n in kept), dims, keepdim, linear),
        inputs,
    )


def _reduction(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, (at, keep) = arg(args, kwargs, 0, "input"), OF_ALL[name]
    keepdim = arg(args, kwargs, keep, "keepdim", False)
    if (
        not isinstance(x, Tensor)
        or type(keepdim) is not bool
        or not OPTIONS.issuperset(kwargs)
    ):
        return None
    dims = _dims(arg(args, kwargs, at, "dim", kwargs.get("axis")), x.dim())
    return _reduced((x,), dims, keepdim, name in LINEAR) if dims is not None else None


def _extreme(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    """With the indices along a dimension, or of two tensors; of all numbers every rank
    computes it.
    """
    x, second = (
        arg(args, kwargs, 0, "input"),
        arg(args, kwargs, 1, "dim", kwargs.get("other", kwargs.get("axis"))),
    )
    if isinstance(second, Tensor):
        return elementwise(name, args, kwargs)
    keepdim = arg(args, kwargs, 2, "keepdim", False)
    dim = (
        dim_of(second, x.dim())
        if isinstance(x, Tensor) and OPTIONS.issuperset(kwargs)
        else None
    )
    return (
        _reduced((x,), (dim,), keepdim)
        if dim is not None and type(keepdim) is bool
        else None
    )


def _cosine(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    a, b = (arg(args, kwargs, i, n) for i, n in enumerate(("x1", "x2")))
    dim = dim_of(arg(args, kwargs, 2, "dim", 1), a.dim())
    return (
        _reduced((a, b), (dim,), False)
        if dim is not None and a.shape == b.shape
        else None
    )


def _along(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, (at, default) = arg(args, kwargs, 0, "input"), ALONG[name]
    dim = (
        dim_of(arg(args, kwargs, at, "dim", default), x.dim())
        if isinstance(x, Tensor)
        else None
    )
    return Call(AlongDim(tuple(x.shape), (dim,)), (x,)) if dim is not None else None


def _resized(x: Any, dim: Any, size: Any) -> Call | None:
    """Another number of entries along ``dim``; None for what torch has something to say to."""
    dim = dim_of(dim, x.dim()) if isinstance(x, Tensor) else None
    if dim is None or type(size) is not int or size < 0:
        return None
    return Call(AlongDim((*x.shape[:dim], size, *x.shape[dim + 1 :]), (dim,)), (x,))


def _glu(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, dim = arg(args, kwargs, 0, "input"), arg(args, kwargs, 1, "dim", -1)
    even = dim_of(dim, x.dim()) is not None and x.shape[dim] % 2 == 0
    return _resized(x, dim, x.shape[dim] // 2) if even else None


def _topk(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    return _resized(
        arg(args, kwargs, 0, "input"),
        arg(args, kwargs, 2, "dim", -1),
        arg(args, kwargs, 1, "k"),
    )


def _moved_along(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    """flip and roll."""
    x = arg(args, kwargs, 0, "input")
    given = (
        args[1:]
        if name == "flip" and len(args) > 2
        else arg(args, kwargs, 1 if name == "flip" else 2, "dims")
    )
    dims = dims_of(tuple(given) if isinstance(given, Sequence) else given, x.dim())
    return Call(AlongDim(tuple(x.shape), tuple(dims)), (x,)) if dims else None


READERS: dict[str, Reader] = {
    **dict.fromkeys(OF_ALL, _reduction),
    **dict.fromkeys(WITH_INDICES, _extreme),
    **dict.fromkeys(ALONG, _along),
    **dict.fromkeys(("flip", "roll"), _moved_along),
    "cosine_similarity": _cosine,
    "glu": _glu,
    "topk": _topk,
}
