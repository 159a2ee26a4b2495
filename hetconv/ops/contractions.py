"""Matrix products and einsum on parts."""

from __future__ import annotations

from typing import Any

from hetconv.calls import Call
from hetconv.following import Contraction
from hetconv.rules import Step
from hetconv.tensor import HetTensor
from hetconv.transport import Team

from .common import Args, Func, Kwargs, Runner, bring


def contracted(call: Call, step: Step, team: Team, func: Func, args: Args, kwargs: Kwargs) -> HetTensor:
    """As called, on own parts; one tensor may be two inputs, of which different parts are read."""
    parts = [bring(x, read, team) for x, read in zip(call.inputs, step.reads, strict=True)]
    equation = args[:1] if args and isinstance(args[0], str) else ()
    return HetTensor.wrap(func(*equation, *parts), step.output, team)


RUN: dict[type[Any], Runner] = {Contraction: contracted}
