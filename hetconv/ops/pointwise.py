"""Elementwise functions and joins on parts."""

from __future__ import annotations

from typing import Any

from ..calls import Call
from ..following import Pointwise, PRelu
from ..rules import Step
from ..tensor import HetTensor
from ..transport import Team
from .common import Args, Func, Kwargs, Runner, bring, called_on


def pointwise(call: Call, step: Step, team: Team, func: Func, args: Args, kwargs: Kwargs) -> HetTensor:
    local = {id(x): bring(x, r, team) for x, r in zip(call.inputs, step.reads, strict=True)}
    return HetTensor.wrap(called_on(local, func, args, kwargs), step.output, team)


RUN: dict[type[Any], Runner] = {Pointwise: pointwise, PRelu: pointwise}
