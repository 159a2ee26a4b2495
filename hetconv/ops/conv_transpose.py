"""Transposed convolutions on parts."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from hetconv import kernels
from hetconv.comm.rank_group import Team
from hetconv.kernels.epilogue import per_channel
from hetconv.operators.base import Call
from hetconv.operators.conv_transpose import ConvTranspose, ConvTransposeCall
from hetconv.runtime.gradient_sync import contributed
from hetconv.runtime.het_tensor import HetTensor, gather
from hetconv.runtime.inputs import Args, Func, Kwargs, Runner, bring, cropped
from hetconv.sharding.conv_spec import Span
from hetconv.sharding.layer_rules import Step


def conv_transpose(call: Call, step: Step, team: Team, func: Func, args: Args, kwargs: Kwargs) -> HetTensor:
    """Each rank computes its own outputs from all inputs that add to them, and cuts off what is others'."""
    assert isinstance(call, ConvTransposeCall)
    op = call.op
    assert isinstance(op, ConvTranspose)
    assert call.weight is not None
    x, own = bring(call.inputs[0], step.reads[0], team), step.output.boxes[team.rank]
    w = contributed(team, gather(call.weight))
    b = contributed(team, gather(call.bias)) if call.bias is not None else None
    if not (x.numel() and own.numel):  # the graph still reaches every tensor
        y = ((x.sum() + w.sum()) * 0).to(x.dtype).expand(own.shape)
        return HetTensor.wrap(y if b is None else y + per_channel(b, y), step.output, team)
    dim, need = step.output.inner, step.reads[0].boxes[team.rank]
    assert dim is not None
    y = _own_outputs(op, func, x, w, b, dim, need.lo[dim], (own.lo[dim], own.hi[dim]))
    return HetTensor.wrap(y, step.output, team)


def _own_outputs(
    op: ConvTranspose, func: Func, x: Tensor, w: Tensor, b: Tensor | None, dim: int, x_lo: int, own: Span
) -> Tensor:
    pad, extra = [v.pad for v in op.windows], [v.extra for v in op.windows]
    stride, dilation = [v.stride for v in op.windows], [v.dilation for v in op.windows]
    if dim < 2:
        return kernels.call_layer(func, x, w, b, stride, pad, extra, op.groups, dilation)
    pad[dim - 2] = extra[dim - 2] = 0  # all that the slab adds to, and own outputs of that
    window = op.windows[dim - 2]
    lo, hi = (n - window.first(x_lo) for n in own)
    before, beyond = max(-lo, 0), max(hi - window._replace(pad=0, extra=0).out_size(x.shape[dim]), 0)
    padded = bool(before or beyond)  # with outputs to which no input adds, but a bias
    y = kernels.call_layer(func, x, w, None if padded else b, stride, pad, extra, op.groups, dilation)
    y = F.pad(y, (*(0, 0) * (y.dim() - 1 - dim), before, beyond)) if padded else y
    y = cropped(y, dim, (lo + before, hi + before))
    return y + per_channel(b, y).to(y.dtype) if padded and b is not None else y


RUN: dict[type[Any], Runner] = {ConvTranspose: conv_transpose}
