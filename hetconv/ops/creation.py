"""New tensors on parts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hetconv.calls import Call
from hetconv.comm.rank_group import Team
from hetconv.operators import Like
from hetconv.runtime.het_tensor import HetTensor
from hetconv.runtime.inputs import Args, Func, Kwargs, Runner, as_called
from hetconv.sharding.layer_rules import Step


def like(call: Call, step: Step, team: Team, func: Func, args: Args, kwargs: Kwargs) -> HetTensor:
    return HetTensor.wrap(as_called(func, args, kwargs)(shown(call, step, team)), step.output, team)


def shown(call: Call, step: Step, team: Team) -> Tensor:
    """A tensor in the shape of this rank's part of the result, where it can be in the memory order of the input's."""
    (x,), shape = call.inputs, step.output.boxes[team.rank].shape
    assert isinstance(x, HetTensor)
    return x.local if x.local.shape == shape else x.local.new_empty(shape)


RUN: dict[type[Any], Runner] = {Like: like}
