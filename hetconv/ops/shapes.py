"""Operators that give the same numbers another shape or place, on parts."""

from __future__ import annotations

from typing import Any

import torch

from hetconv.calls import Call
from hetconv.comm.rank_group import Team
from hetconv.operators import Cat, PixelShuffle, Reshape, Stack
from hetconv.runtime.het_tensor import HetTensor
from hetconv.runtime.inputs import Args, Func, Kwargs, Runner, as_called, bring, empty_output
from hetconv.sharding.layer_rules import Step

from .views import link


def cat(call: Call, step: Step, team: Team, func: Func, args: Args, kwargs: Kwargs) -> HetTensor:
    """Concatenation, or along a new dimension."""
    assert isinstance(call.op, Cat | Stack)
    parts = [bring(x, r, team) for x, r in zip(call.inputs, step.reads, strict=True)]
    join = torch.cat if isinstance(call.op, Cat) else torch.stack
    return HetTensor.wrap(join(parts, call.op.dim), step.output, team)


def reshaped(call: Call, step: Step, team: Team, func: Func, args: Args, kwargs: Kwargs) -> HetTensor:
    """Operators whose local form is their own call on the part."""
    x = bring(call.inputs[0], step.reads[0], team)
    if not x.numel():  # torch's own backward gives an empty gradient of another shape
        return HetTensor.wrap(empty_output(step.output.boxes[team.rank].shape, x), step.output, team)
    return HetTensor.wrap(as_called(func, args, kwargs)(x), step.output, team)


def regrouped(call: Call, step: Step, team: Team, func: Func, args: Args, kwargs: Kwargs) -> HetTensor:
    """A view where the part lies in memory so that it can be one, else a copy: both count as views that are copies."""
    (x,), shape = call.inputs, step.output.boxes[team.rank].shape
    assert isinstance(x, HetTensor)
    y = HetTensor.wrap(x.local.reshape(shape), step.output, team)
    return link(y, x, as_called(func, args, kwargs), copies=True)


RUN: dict[type[Any], Runner] = {Cat: cat, PixelShuffle: reshaped, Reshape: regrouped, Stack: cat}
