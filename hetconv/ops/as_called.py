"""Elementwise functions and joins on parts."""

from __future__ import annotations

from typing import Any

from hetconv.calls import Call
from hetconv.comm.rank_group import Team
from hetconv.operators import Pointwise, PRelu
from hetconv.runtime.het_tensor import HetTensor
from hetconv.runtime.inputs import Args, Func, Kwargs, Runner, bring, called_on
from hetconv.sharding.layer_rules import Step


def pointwise(call: Call, step: Step, team: Team, func: Func, args: Args, kwargs: Kwargs) -> HetTensor:
    local = {id(x): bring(x, r, team) for x, r in zip(call.inputs, step.reads, strict=True)}
    return HetTensor.wrap(called_on(local, func, args, kwargs), step.output, team)


RUN: dict[type[Any], Runner] = {Pointwise: pointwise, PRelu: pointwise}
