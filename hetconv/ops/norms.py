"""Batch norm on parts with the statistics of the whole batch: parts weigh as they count (Chan et al., 1979)."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..calls import BatchNormCall, Call
from ..following import BatchNorm
from ..layout import Box
from ..movement import perform
from ..replicas import contributed
from ..rules import Step
from ..tensor import HetTensor
from ..transport import Team
from .common import Args, Func, Kwargs, Runner, bring


def batch_norm(call: Call, step: Step, team: Team, func: Func, args: Args, kwargs: Kwargs) -> HetTensor:
    """x of any rank >= 2, cut over samples or space (statistics are combined) or over channels (they are local)."""
    assert isinstance(call, BatchNormCall)
    assert isinstance(call.op, BatchNorm)
    op, layout = call.op, step.output
    x = bring(call.inputs[0], step.reads[0], team)
    if not op.training or layout.dim == 1:
        y = _own_channels(call, x, step, team)
    else:
        count = prod(op.shape) // op.shape[1]
        y, mean, var = _SplitBatchNorm.apply(x, call.weight, call.bias, call.eps, step, team, count)
        if op.tracks:
            _track(call, mean, var, count)
    return HetTensor.wrap(y, layout, team)


def _own_channels(call: BatchNormCall, x: Tensor, step: Step, team: Team) -> Tensor:
    """Every statistic that this rank uses is its own: evaluation, or a cut over channels."""
    op, box = call.op, step.output.boxes[team.rank]
    assert isinstance(op, BatchNorm)
    own = slice(box.lo[1], box.hi[1])
    weight = contributed(team, call.weight)[own] if call.weight is not None else None
    bias = contributed(team, call.bias)[own] if call.bias is not None else None
    if op.tracks:
        _track_own(call, x, step, team)
    if not x.numel():  # torch refuses it; the graph must still reach every tensor
        return sum((p.sum() * 0 for p in (weight, bias) if p is not None), x * 1)
    if not op.training:
        assert call.mean is not None
        assert call.var is not None
        return F.batch_norm(x, call.mean[own], call.var[own], weight, bias, False, 0.0, call.eps)
    return F.batch_norm(x, None, None, weight, bias, True, 0.0, call.eps)


def _track_own(call: BatchNormCall, x: Tensor, step: Step, team: Team) -> None:
    """The running statistics of all channels from those of each rank's own."""
    with torch.no_grad():
        stats = _moments(x, x.dtype if x.dtype == torch.float64 else torch.float32)
        (move,) = step.forward
        var, mean = perform(team, stats, move.forward, move.src.boxes[team.rank], move.dst.boxes[team.rank])
    _track(call, mean, var, prod(step.output.shape) // step.output.shape[1])


def _track(call: BatchNormCall, mean: Tensor, var: Tensor, count: int) -> None:
    assert call.mean is not None
    assert call.var is not None
    with torch.no_grad():
        call.mean.mul_(1 - call.momentum).add_(mean.to(call.mean.dtype), alpha=call.momentum)
        unbiased = var.to(call.var.dtype) * (count / max(count - 1, 1))
        call.var.mul_(1 - call.momentum).add_(unbiased, alpha=call.momentum)


def _moments(x: Tensor, exact: torch.dtype) -> Tensor:
    """(2, C): variance and mean of the own part; zero of an empty one, which weighs nothing."""
    if not x.numel():
        return x.new_zeros((2, x.shape[1]), dtype=exact)
    return torch.stack(torch.var_mean(x.to(exact), [d for d in range(x.dim()) if d != 1], correction=0))


class _SplitBatchNorm(torch.autograd.Function):
    """Training over parts of the batch or of space. Gradients of weight and bias, from global sums, are whole."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, step: Step, team: Team, count: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        dims = [d for d in range(x.dim()) if d != 1]
        exact = x.dtype if x.dtype == torch.float64 else torch.float32
        channels, numel = step.output.shape[1], step.output.boxes
        own = _moments(x, exact)
        (move,) = step.forward
        each = perform(team, own[None], move.forward, move.src.boxes[team.rank], move.dst.boxes[team.rank])
        share = each.new_tensor([b.numel / channels / count for b in numel])[:, None]
        mean = (share * each[:, 1]).sum(0)
        var = (share * (each[:, 0] + (each[:, 1] - mean) ** 2)).sum(0)
        # One fused pass, in the input's own precision outside (x, y) and in `exact` inside.
        y = F.batch_norm(x, mean, var, _as(weight, exact, x), _as(bias, exact, x), False, 0.0, eps)
        ctx.save_for_backward(x, weight, mean, (var + eps).rsqrt())
        ctx.step, ctx.team, ctx.count, ctx.dims = step, team, count, dims
        ctx.bias_dtype = bias.dtype if bias is not None else None
        ctx.mark_non_differentiable(mean, var)
        return y, mean, var

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd = ctx.saved_tensors
        shape = [1, -1] + [1] * (x.dim() - 2)
        exact = mean.dtype
        centred = (x.to(exact) - mean.view(shape)) * invstd.view(shape)
        g_exact = g.to(exact)
        own = torch.stack([(g_exact * centred).sum(ctx.dims), g_exact.sum(ctx.dims)])
        (move,) = ctx.step.backward
        whole = Box.whole(tuple(own.shape))
        g_weight, g_bias = perform(ctx.team, own, move.forward, whole, whole)
        gx = None
        if ctx.needs_input_grad[0]:
            scale = invstd if weight is None else invstd * weight.to(exact)
            inner = g_exact - (g_bias.view(shape) + centred * g_weight.view(shape)) / ctx.count
            gx = (inner * scale.view(shape)).to(x.dtype)
        g_weight = g_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None
        g_bias = g_bias.to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return gx, g_weight, g_bias, None, None, None, None


def _as(p: Tensor | None, exact: torch.dtype, x: Tensor) -> Tensor | None:
    """Mixed precision takes half inputs with float32 parameters throughout."""
    return p.to(exact) if p is not None and x.dtype != exact else p


RUN: dict[type[Any], Runner] = {BatchNorm: batch_norm}
