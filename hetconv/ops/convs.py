"""Transposed convolutions on parts."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..calls import Call, ConvTransposeCall
from ..emulate import stretched
from ..following import ConvTranspose
from ..kernels.finish import per_channel
from ..replicas import contributed
from ..rules import Step
from ..spec import Span
from ..tensor import HetTensor
from ..transport import Team
from .common import Args, Func, Kwargs, Runner, bring


def conv_transpose(call: Call, step: Step, team: Team, func: Func, args: Args, kwargs: Kwargs) -> HetTensor:
    """Each rank computes its own outputs from all inputs that add to them, and cuts off what is others'."""
    assert isinstance(call, ConvTransposeCall)
    op = call.op
    assert isinstance(op, ConvTranspose)
    assert call.weight is not None
    x, own = bring(call.inputs[0], step.reads[0], team), step.output.boxes[team.rank]
    w = contributed(team, call.weight)
    b = contributed(team, call.bias) if call.bias is not None else None
    if not (x.numel() and own.numel):  # the graph still reaches every tensor
        y = ((x.sum() + w.sum()) * 0).to(x.dtype).expand(own.shape)
        return HetTensor.wrap(y if b is None else y + per_channel(b, y), step.output, team)
    dim, need = step.output.inner, step.reads[0].boxes[team.rank]
    assert dim is not None
    y = stretched(lambda: _own_outputs(op, func, x, w, b, dim, need.lo[dim], (own.lo[dim], own.hi[dim])), x.device)
    return HetTensor.wrap(y, step.output, team)


def _own_outputs(
    op: ConvTranspose, func: Func, x: Tensor, w: Tensor, b: Tensor | None, dim: int, x_lo: int, own: Span
) -> Tensor:
    windows = op.windows
    pad, extra = [v.pad for v in windows], [v.extra for v in windows]
    if dim > 1:  # all that the slab adds to, and own outputs of that
        pad[dim - 2] = extra[dim - 2] = 0
    stride, dilation = [v.stride for v in windows], [v.dilation for v in windows]
    y: Tensor = func(x, w, b if dim < 2 else None, stride, pad, extra, op.groups, dilation)
    if dim < 2:
        return y
    first = windows[dim - 2].first(x_lo)
    lo, hi = own[0] - first, own[1] - first
    before, beyond = max(-lo, 0), max(hi - y.shape[dim], 0)  # outputs to which no input adds
    y = F.pad(y, (*(0, 0) * (y.dim() - 1 - dim), before, beyond)) if before or beyond else y
    y = y.narrow(dim, lo + before, hi - lo)
    return y if b is None else y + per_channel(b, y).to(y.dtype)


RUN: dict[type[Any], Runner] = {ConvTranspose: conv_transpose}
