"""Elementwise functions and joins on parts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..calls import Call
from ..following import Pointwise, PRelu
from ..rules import Step
from ..tensor import HetTensor
from ..transport import Team
from .common import Args, Func, Kwargs, Runner, bring


def pointwise(call: Call, step: Step, team: Team, func: Func, args: Args, kwargs: Kwargs) -> HetTensor:
    local = {id(x): bring(x, r, team) for x, r in zip(call.inputs, step.reads, strict=True)}

    def part(a: Any) -> Any:
        return local.get(id(a), a) if isinstance(a, Tensor) else a

    y = func(*map(part, args), **{k: part(v) for k, v in kwargs.items()})
    return HetTensor.wrap(y, step.output, team)


RUN: dict[type[Any], Runner] = {Pointwise: pointwise, PRelu: pointwise}
