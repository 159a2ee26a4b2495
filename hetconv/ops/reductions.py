"""Functions along some dimensions on parts."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor

from hetconv.calls import Call, name_of
from hetconv.comm.rank_group import Team
from hetconv.operators import Along, Reduction
from hetconv.runtime.het_tensor import HetTensor
from hetconv.runtime.inputs import Args, Func, Kwargs, Runner, bring, called_on
from hetconv.sharding.layer_rules import Step

OF_NONE = frozenset({"mean", "var", "std", "var_mean", "std_mean"})
"""Of which torch warns, or gives NaN, where there are no numbers."""


def along(call: Call, step: Step, team: Team, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """As called, on the own part; over a cut a mean counts as the part's share of all entries."""
    local = {id(x): bring(x, read, team) for x, read in zip(call.inputs, step.reads, strict=True)}
    (x, *_), op, name = local.values(), call.op, name_of(func)
    if isinstance(op, Reduction) and name in OF_NONE and not x.numel():
        nothing = x.sum(op.dims, keepdim=op.keepdim, dtype=kwargs.get("dtype") or x.dtype)
        y: Any = (nothing, nothing) if name.endswith("_mean") else nothing
    else:
        y = called_on(local, func, args, kwargs)
        if isinstance(op, Reduction) and name == "mean" and step.output.kind == "partial":
            own, whole = (prod(t.shape[d] for d in op.dims) for t in (x, call.inputs[0]))
            y = y * (own / whole)  # after it: a sum of half precision may be beyond its range
    if isinstance(y, Tensor):
        return HetTensor.wrap(y, step.output, team)
    return type(y)(tuple(HetTensor.wrap(each, step.output, team) for each in y))  # a named tuple, as torch's


RUN: dict[type[Any], Runner] = {Reduction: along, Along: along}
