"""Operators that give the same numbers another shape or place, on parts."""

from __future__ import annotations

from typing import Any

import torch

from ..calls import Call
from ..following import Cat, Flatten, PixelShuffle
from ..rules import Step
from ..tensor import HetTensor
from ..transport import Team
from .common import Args, Func, Kwargs, Runner, bring, empty_output, without_input


def cat(call: Call, step: Step, team: Team, func: Func, args: Args, kwargs: Kwargs) -> HetTensor:
    assert isinstance(call.op, Cat)
    parts = [bring(x, r, team) for x, r in zip(call.inputs, step.reads, strict=True)]
    return HetTensor.wrap(torch.cat(parts, call.op.dim), step.output, team)


def reshaped(call: Call, step: Step, team: Team, func: Func, args: Args, kwargs: Kwargs) -> HetTensor:
    """Operators whose local form is their own call on the part."""
    x = bring(call.inputs[0], step.reads[0], team)
    if isinstance(call.op, Flatten):
        return HetTensor.wrap(x.reshape(step.output.boxes[team.rank].shape), step.output, team)
    if not x.numel():  # torch's own backward gives an empty gradient of another shape
        return HetTensor.wrap(empty_output(x, step.output.boxes[team.rank].shape), step.output, team)
    return HetTensor.wrap(func(x, *args[1:], **without_input(kwargs)), step.output, team)


RUN: dict[type[Any], Runner] = {Cat: cat, Flatten: reshaped, PixelShuffle: reshaped}
