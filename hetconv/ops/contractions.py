"""Matrix products and einsum on parts."""

from __future__ import annotations

from typing import Any

from hetconv.calls import Call
from hetconv.comm.rank_group import Team
from hetconv.operators import Contraction
from hetconv.runtime.het_tensor import HetTensor
from hetconv.runtime.inputs import Args, Func, Kwargs, Runner, bring
from hetconv.sharding.layer_rules import Step


def contracted(call: Call, step: Step, team: Team, func: Func, args: Args, kwargs: Kwargs) -> HetTensor:
    """As called, on own parts; one tensor may be two inputs, of which different parts are read."""
    parts = [bring(x, read, team) for x, read in zip(call.inputs, step.reads, strict=True)]
    equation = args[:1] if args and isinstance(args[0], str) else ()
    return HetTensor.wrap(func(*equation, *parts), step.output, team)


RUN: dict[type[Any], Runner] = {Contraction: contracted}
