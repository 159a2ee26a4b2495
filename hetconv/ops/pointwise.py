"""Elementwise functions and joins on parts."""

from __future__ import annotations

from typing import Any

from hetconv.calls import Call
from hetconv.following import Pointwise, PRelu
from hetconv.rules import Step
from hetconv.tensor import HetTensor
from hetconv.transport import Team

from .common import Args, Func, Kwargs, Runner, bring, called_on


def pointwise(call: Call, step: Step, team: Team, func: Func, args: Args, kwargs: Kwargs) -> HetTensor:
    local = {id(x): bring(x, r, team) for x, r in zip(call.inputs, step.reads, strict=True)}
    return HetTensor.wrap(called_on(local, func, args, kwargs), step.output, team)


RUN: dict[type[Any], Runner] = {Pointwise: pointwise, PRelu: pointwise}
