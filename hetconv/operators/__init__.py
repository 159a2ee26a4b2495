"""Operators: how a call of a torch function is read, and the sharding rule of each
operator. No ranks.

A family of operators has a module here. It holds the operators, frozen dataclasses
whose `step` is the sharding rule, and `READERS`, which read torch's calls into them.
`ops` has a module of the same family that runs them on shards. The tracer and the
runtime read calls here alike, so that a plan prices the operators that will run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from . import (
    conv_transpose,
    einsum,
    elementwise,
    norms,
    pooling,
    random,
    reductions,
    resampling,
    shapes,
    views,
)
from .base import Args, Call, Kwargs, Reader, name_of, writes_in_place

VIEWS = (views.SplitView, shapes.Reshape, views.View)
"""Operators whose results share memory with their input, a `Reshape`'s where the memory
order allows it.
"""

READERS: dict[str, Reader] = {}
"""By the bare name of the function, see `name_of`."""

for family in (
    conv_transpose,
    einsum,
    elementwise,
    norms,
    pooling,
    random,
    reductions,
    resampling,
    shapes,
    views,
):
    READERS |= family.READERS


def read_call(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Call | None:
    """Reads a call of a torch function.

    Args:
        func: the function, as ``__torch_function__`` is given it.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns: The operator and its inputs, or None where there is no rule for the call:
        then its inputs are gathered.
    """
    if kwargs.get("out") is not None:
        return None
    name = name_of(func)
    reader = READERS.get(name)
    if reader is None:
        return None
    call = reader(name, args, kwargs)
    if call is None or not writes_in_place(func, kwargs):
        return call
    return (
        replace(call, in_place=True) if not isinstance(call.op, VIEWS) else None
    )  # unsqueeze_ changes the shape
