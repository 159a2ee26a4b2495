"""Reductions and softmax on parts."""

from __future__ import annotations

from typing import Any

from ..calls import Call, name_of
from ..following import Reduction, Softmax
from ..rules import Step
from ..tensor import HetTensor
from ..transport import Team
from .common import Args, Func, Kwargs, Runner, as_called, bring


def reduced(call: Call, step: Step, team: Team, func: Func, args: Args, kwargs: Kwargs) -> HetTensor:
    """As called, on the own part; over a cut a mean counts as the part's share of all entries."""
    x, op = bring(call.inputs[0], step.reads[0], team), call.op
    linear, name = step.output.kind == "partial", name_of(func)
    if isinstance(op, Reduction) and not x.numel() and name != "sum":  # torch warns of it, or gives NaN
        y = x.sum(op.dims, keepdim=op.keepdim, dtype=kwargs.get("dtype") or x.dtype)
    else:
        y = as_called(func, args, kwargs)(x)
        if linear and name == "mean":  # scaled after it: a sum of half precision may be beyond its range
            y = y * (x.numel() / call.inputs[0].numel())
    return HetTensor.wrap(y, step.output, team)


RUN: dict[type[Any], Runner] = {Reduction: reduced, Softmax: reduced}
