"""Calls that make new tensors."""

from __future__ import annotations

from torch import Tensor

from hetconv.operators import Like
from hetconv.sharding.layer_rules import Gather

from .base import Args, Call, Kwargs, Reader, arg
from .shapes import sizes_of


def like(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x = arg(args, kwargs, 0, "input")
    return Call(Like(tuple(x.shape)), (x,)) if isinstance(x, Tensor) and not kwargs.get("requires_grad") else None


def _new(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    """A tensor of any shape: replicated, and of its source it takes only the dtype and the device."""
    shape = sizes_of(args[:2] if name == "new_full" else args, kwargs, "size")
    return Call(Gather(shape), ()) if shape is not None else None


READERS: dict[str, Reader] = {
    **dict.fromkeys(("empty_like", "full_like", "ones_like", "zeros_like"), like),
    **dict.fromkeys(("new_empty", "new_full", "new_ones", "new_zeros"), _new),
}
