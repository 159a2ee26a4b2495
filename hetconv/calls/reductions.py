"""Calls of reductions and of softmax."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..following import Reduction, Softmax
from .base import Args, Call, Kwargs, Reader, arg, dim_of, dims_of

LINEAR = frozenset({"sum", "mean"})
OTHERS = frozenset({"amax", "amin", "var", "std", "logsumexp"})
OPTIONS = frozenset({"input", "dim", "keepdim", "dtype", "correction", "unbiased"})


def _dims(dim: Any, rank: int) -> tuple[int, ...] | None:
    """The dimensions that a ``dim`` names: all for None; None where torch is left to say what it means."""
    if dim is None:
        return tuple(range(rank))
    listed = dims_of(dim, rank)
    return tuple(sorted(listed)) if listed else None


def _reduction(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x = arg(args, kwargs, 0, "input")
    keepdim = arg(args, kwargs, 3 if name in ("var", "std") else 2, "keepdim", False)
    if not isinstance(x, Tensor) or type(keepdim) is not bool or not OPTIONS.issuperset(kwargs):
        return None
    dims = _dims(arg(args, kwargs, 1, "dim"), x.dim())
    if dims is None:
        return None
    kept = ((d, n) for d, n in enumerate(x.shape) if keepdim or d not in dims)
    return Call(Reduction(tuple(1 if d in dims else n for d, n in kept), dims, keepdim, name in LINEAR), (x,))


def _softmax(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x = arg(args, kwargs, 0, "input")
    dim = dim_of(arg(args, kwargs, 1, "dim"), x.dim()) if isinstance(x, Tensor) else None
    return Call(Softmax(tuple(x.shape), dim), (x,)) if dim is not None else None


READERS: dict[str, Reader] = {
    **dict.fromkeys(LINEAR | OTHERS, _reduction),
    **dict.fromkeys(("softmax", "log_softmax"), _softmax),
}
