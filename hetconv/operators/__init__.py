"""Operators: how calls of torch functions are read, and how each operator is sharded.

Every module holds one family: its operators, frozen dataclasses whose method
``sharding`` is the rule, and ``READERS``, which read torch's calls. `hetconv.ops` has a
module for each family that runs them on shards. The tracer and the runtime read calls
by the same readers, so that a plan predicts the operators that will run.
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
from .base import Args, Call, Kwargs, Reader, function_name, writes_in_place

VIEWS = (views.SplitView, shapes.Reshape, views.View)
"""Operators whose results share memory with their input.

Those of a `Reshape` do where the order in memory allows it.
"""

READERS: dict[str, Reader] = {}
"""Readers, by the bare name of the function; see `function_name`."""

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
        func: The function, as ``__torch_function__`` is given it.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.

    Returns:
        The operator and its inputs, or None where no rule fits the call, so that its
        inputs are gathered.
    """
    if kwargs.get("out") is not None:
        return None
    name = function_name(func)
    reader = READERS.get(name)
    call = reader(name, args, kwargs) if reader is not None else None
    if call is None or not writes_in_place(func, kwargs):
        return call
    # A view in place, such as unsqueeze_, changes the shape of its input.
    return None if isinstance(call.op, VIEWS) else replace(call, in_place=True)
