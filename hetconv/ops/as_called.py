"""Operators whose local computation is the call itself: elementwise functions,
reductions, products and new tensors.
"""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor

from hetconv.comm.rank_group import Team
from hetconv.operators.base import Call, name_of
from hetconv.operators.einsum import Contraction
from hetconv.operators.elementwise import Pointwise, PRelu
from hetconv.operators.random import Like
from hetconv.operators.reductions import Along, Reduction
from hetconv.runtime.het_tensor import HetTensor
from hetconv.runtime.inputs import (
    Args,
    Func,
    Kwargs,
    Runner,
    as_called,
    bring,
    called_on,
)
from hetconv.sharding.layer_rules import Step


def pointwise(
    call: Call, step: Step, team: Team, func: Func, args: Args, kwargs: Kwargs
) -> HetTensor:
    local = {
        id(x): bring(x, r, team) for x, r in zip(call.inputs, step.reads, strict=True)
    }
    return HetTensor.wrap(called_on(local, func, args, kwargs), step.output, team)


def contracted(
    call: Call, step: Step, team: Team, func: Func, args: Args, kwargs: Kwargs
) -> HetTensor:
    """As called, on own parts; one tensor may be two inputs, of which different parts are read."""
    parts = [
        bring(x, read, team) for x, read in zip(call.inputs, step.reads, strict=True)
    ]
    equation = args[:1] if args and isinstance(args[0], str) else ()
    return HetTensor.wrap(func(*equation, *parts), step.output, team)


OF_NONE = frozenset({"mean", "var", "std", "var_mean", "std_mean"})
"""Of which torch warns, or gives NaN, where there are no numbers."""


def along(
    call: Call, step: Step, team: Team, func: Func, args: Args, kwargs: Kwargs
) -> Any:
    """As called, on the own part; over a cut a mean counts as the part's share of all entries."""
    local = {
        id(x): bring(x, read, team)
        for x, read in zip(call.inputs, step.reads, strict=True)
    }
    (x, *_), op, name = local.values(), call.op, name_of(func)
    if isinstance(op, Reduction) and name in OF_NONE and not x.numel():
        nothing = x.sum(
            op.dims, keepdim=op.keepdim, dtype=kwargs.get("dtype") or x.dtype
        )
        y: Any = (nothing, nothing) if name.endswith("_mean") else nothing
    else:
        y = called_on(local, func, args, kwargs)
        if (
            isinstance(op, Reduction)
            and name == "mean"
            and step.output.kind == "partial"
        ):
            own, whole = (
                prod(t.shape[d] for d in op.dims) for t in (x, call.inputs[0])
            )
            y = y * (
                own / whole
            )  # after it: a sum of half precision may be beyond its range
    if isinstance(y, Tensor):
        return HetTensor.wrap(y, step.output, team)
    return type(y)(
        tuple(HetTensor.wrap(each, step.output, team) for each in y)
    )  # a named tuple, as torch's


def like(
    call: Call, step: Step, team: Team, func: Func, args: Args, kwargs: Kwargs
) -> HetTensor:
    return HetTensor.wrap(
        as_called(func, args, kwargs)(shown(call, step, team)), step.output, team
    )


def shown(call: Call, step: Step, team: Team) -> Tensor:
    """A tensor in the shape of this rank's part of the result, where it can be in the
    memory order of the input's.
    """
    (x,), shape = call.inputs, step.output.boxes[team.rank].shape
    assert isinstance(x, HetTensor)
    return x.local if x.local.shape == shape else x.local.new_empty(shape)


RUN: dict[type[Any], Runner] = {
    Along: along,
    Contraction: contracted,
    Like: like,
    Pointwise: pointwise,
    PRelu: pointwise,
    Reduction: along,
}
