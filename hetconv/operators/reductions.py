"""Operators along some dimensions: sums, extremes, softmax, sorting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from hetconv.sharding.layout import Layout, Layouts, Shape
from hetconv.sharding.moves import Move
from hetconv.sharding.rule import OpSharding

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
    reduce_scattered,
)
from .elementwise import read_elementwise


def _split_outside(inputs: Layouts, dims: tuple[int, ...]) -> tuple[Layout, int] | None:
    """Returns the first sharded input and its dimension, unless it is one of ``dims``."""
    layouts = map(reduce_scattered, inputs)
    lead = next((x for x in layouts if x.kind == "sharded"), None)
    if lead is None or lead.dim is None or lead.dim in dims:
        return None
    return lead, lead.dim


@dataclass(frozen=True)
class Reduction(PerSampleOperator):
    """An operator that reduces all entries along some dimensions to one.

    Several inputs are read alike. The result may be several tensors of one shape, such
    as values and indices.

    Attributes:
        shape: Shape of the output.
        dims: The dimensions that are reduced, in ascending order.
        keepdim: Whether they remain with extent 1.
        linear: Whether it is a sum or mean, of which shards along ``dims`` give a
            partial result.
    """

    shape: Shape
    dims: tuple[int, ...]
    keepdim: bool
    linear: bool

    def _has_samples(self, inputs: Layouts) -> Sequence[bool] | None:
        return None if 0 in self.dims else super()._has_samples(inputs)

    def _follow(self, inputs: Layouts) -> OpSharding | None:
        x = inputs[0]
        if self.linear and x.kind == "partial":
            return OpSharding((x,), Layout.partial(self.shape, x.world, x.shares))
        if self.linear and x.dim is not None and x.dim in self.dims:
            return OpSharding((x,), Layout.partial(self.shape, x.world, x.sizes))
        found = _split_outside(inputs, self.dims)
        if found is None:
            return None
        lead, dim = found
        if not self.keepdim:
            dim -= sum(reduced < dim for reduced in self.dims)
        y = Layout.sharded(self.shape, dim, lead.sizes)
        return OpSharding((lead,) * len(inputs), y)


@dataclass(frozen=True)
class Extreme(Reduction):
    """A largest or smallest entry along some dimensions; so are any and all of truths.

    If one of the dimensions is sharded, ranks all-gather the extremes of their shards,
    and each rank takes the extremes of these.

    Attributes:
        counts_ties: Whether each extreme is sent together with the number of entries
            that are equal to it, which share its gradient.
    """

    counts_ties: bool

    def _follow(self, inputs: Layouts) -> OpSharding | None:
        x = reduce_scattered(inputs[0])
        if x.dim is None or x.dim not in self.dims:
            return super()._follow(inputs)
        y = Layout.replicated(self.shape, x.world)
        return OpSharding((x,), y, forward_moves=(self._gather_extremes(x),))

    def _gather_extremes(self, x: Layout) -> Move:
        """Returns the all-gather of (1, 2, K) or (1, 1, K) from each non-empty shard.

        K is the number of extremes.
        """
        sizes = [min(size, 1) for size in x.sizes]
        shape = (sum(sizes), 1 + self.counts_ties, prod(self.shape))
        each = Layout.sharded(shape, 0, sizes)
        return Move(each, Layout.replicated(shape, x.world))


@dataclass(frozen=True)
class AlongDim(PerSampleOperator):
    """An operator whose results along some dimensions depend on all entries there.

    Examples are softmax, cumulative sums and sorting. The number of results may differ
    from that of the entries.

    Attributes:
        shape: Shape of the output.
        dims: The dimensions.
    """

    shape: Shape
    dims: tuple[int, ...]

    def _has_samples(self, inputs: Layouts) -> Sequence[bool] | None:
        return None if 0 in self.dims else super()._has_samples(inputs)

    def _follow(self, inputs: Layouts) -> OpSharding | None:
        found = _split_outside(inputs, self.dims)
        if found is None:
            return None
        lead, dim = found
        y = Layout.sharded(self.shape, dim, lead.sizes)
        return OpSharding((lead,) * len(inputs), y)


LINEAR_REDUCTIONS = frozenset({"sum", "mean"})
EXTREMES = frozenset({"amax", "amin", "any", "all"})
REDUCTION_ARGS = {
    **dict.fromkeys("sum mean amax amin logsumexp argmax argmin".split(), (1, 2)),
    **dict.fromkeys("prod any all count_nonzero".split(), (1, 2)),
    **dict.fromkeys("var std var_mean std_mean".split(), (1, 3)),
    **dict.fromkeys(("norm", "linalg_vector_norm"), (2, 3)),
}
"""Positions of the arguments ``dim`` and ``keepdim``; without dim all are reduced."""
REDUCTIONS_WITH_INDICES = frozenset({"max", "min", "median", "nanmedian"})
REDUCTION_OPTIONS = frozenset(
    "input dim axis keepdim dtype correction unbiased p ord out".split()
)
ALONG_DIM_ARGS: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys("softmax log_softmax softmin".split(), (1, None)),
    **dict.fromkeys("cumsum cumprod cummax cummin logcumsumexp".split(), (1, None)),
    **dict.fromkeys(("sort", "argsort"), (1, -1)),
    "normalize": (2, 1),
}
"""Functions that keep the shape: position and default of the argument ``dim``."""


def _reduced_shape(x: Tensor, dims: tuple[int, ...], keepdim: bool) -> Shape:
    return tuple(
        1 if d in dims else n for d, n in enumerate(x.shape) if keepdim or d not in dims
    )


def _reduction_call(
    inputs: tuple[Tensor, ...],
    dims: tuple[int, ...],
    keepdim: bool,
    linear: bool = False,
) -> Call:
    shape = _reduced_shape(inputs[0], dims, keepdim)
    return Call(Reduction(shape, dims, keepdim, linear), inputs)


def _read_reduction(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x = arg(args, kwargs, 0, "input")
    dim_position, keepdim_position = REDUCTION_ARGS[name]
    keepdim = arg(args, kwargs, keepdim_position, "keepdim", False)
    if not isinstance(x, Tensor) or type(keepdim) is not bool:
        return None
    if not REDUCTION_OPTIONS.issuperset(kwargs):
        return None
    dim = arg(args, kwargs, dim_position, "dim", kwargs.get("axis"))
    given = canonical_dims(range(x.dim()) if dim is None else dim, x.dim())
    # torch decides what an empty list of dimensions means.
    if given is None or (dim is not None and not given):
        return None
    dims = tuple(sorted(given))
    if name in EXTREMES and "out" not in kwargs:
        counts_ties = name in ("amax", "amin") and x.is_floating_point()
        shape = _reduced_shape(x, dims, keepdim)
        return Call(Extreme(shape, dims, keepdim, False, counts_ties), (x,))
    return _reduction_call((x,), dims, keepdim, name in LINEAR_REDUCTIONS)


def _read_extreme(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    """Reads an extreme of two tensors, or along a dimension with its indices.

    Every rank computes that of all elements.
    """
    x = arg(args, kwargs, 0, "input")
    second = arg(args, kwargs, 1, "dim", kwargs.get("other", kwargs.get("axis")))
    if isinstance(second, Tensor):
        return read_elementwise(name, args, kwargs)
    keepdim = arg(args, kwargs, 2, "keepdim", False)
    if not isinstance(x, Tensor) or not REDUCTION_OPTIONS.issuperset(kwargs):
        return None
    dim = canonical_index(second, x.dim())
    if dim is None or type(keepdim) is not bool:
        return None
    return _reduction_call((x,), (dim,), keepdim)


def _read_cosine_similarity(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    a, b, dim = bind(args, kwargs, x1=None, x2=None, dim=1)
    dim = canonical_index(dim, a.dim())
    if dim is None or a.shape != b.shape:
        return None
    return _reduction_call((a, b), (dim,), False)


def _read_along_dim(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, (position, default) = arg(args, kwargs, 0, "input"), ALONG_DIM_ARGS[name]
    if not isinstance(x, Tensor):
        return None
    dim = canonical_index(arg(args, kwargs, position, "dim", default), x.dim())
    return Call(AlongDim(tuple(x.shape), (dim,)), (x,)) if dim is not None else None


def _resized_call(x: Any, dim: Any, size: Any) -> Call | None:
    """Returns a call with another number of entries along ``dim``."""
    dim = canonical_index(dim, x.dim()) if isinstance(x, Tensor) else None
    if dim is None or type(size) is not int or size < 0:
        return None
    shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
    return Call(AlongDim(shape, (dim,)), (x,))


def _read_glu(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, dim = bind(args, kwargs, input=None, dim=-1)
    if canonical_index(dim, x.dim()) is None or x.shape[dim] % 2:
        return None
    return _resized_call(x, dim, x.shape[dim] // 2)


def _read_topk(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, k, dim = bind(args, kwargs, input=None, k=None, dim=-1)
    return _resized_call(x, dim, k)


def _read_flip_or_roll(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x = arg(args, kwargs, 0, "input")
    if name == "flip" and len(args) > 2:
        given: Any = args[1:]
    else:
        given = arg(args, kwargs, 1 if name == "flip" else 2, "dims")
    dims = canonical_dims(given, x.dim())
    return Call(AlongDim(tuple(x.shape), tuple(dims)), (x,)) if dims else None


def _read_channel_shuffle(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x = arg(args, kwargs, 0, "input")
    return Call(AlongDim(tuple(x.shape), (1,)), (x,)) if x.dim() > 2 else None


READERS: dict[str, Reader] = {
    "channel_shuffle": _read_channel_shuffle,
    **dict.fromkeys(REDUCTION_ARGS, _read_reduction),
    **dict.fromkeys(REDUCTIONS_WITH_INDICES, _read_extreme),
    **dict.fromkeys(ALONG_DIM_ARGS, _read_along_dim),
    **dict.fromkeys(("flip", "roll"), _read_flip_or_roll),
    "cosine_similarity": _read_cosine_similarity,
    "glu": _read_glu,
    "topk": _read_topk,
}
