"""Batch norm on parts with the statistics of the whole: parts weigh as they count (Chan et al., 1979)."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..calls import BatchNormCall, Call
from ..following import BatchNorm
from ..kernels.finish import per_channel
from ..layout import Box, Layout
from ..movement import perform
from ..replicas import contributed, running_of
from ..rules import Step
from ..running import Running
from ..tensor import HetTensor
from ..transport import Team
from .common import Args, Func, Kwargs, bring


def batch_norm(call: Call, step: Step, team: Team, func: Func, args: Args, kwargs: Kwargs) -> HetTensor:
    """x of any rank >= 2, cut over channels alone (statistics are local) or in any other way (they are combined)."""
    assert isinstance(call, BatchNormCall)
    assert isinstance(call.op, BatchNorm)
    op, layout = call.op, step.output
    x = bring(call.inputs[0], step.reads[0], team)
    if call.mean is not None and (running := running_of(team)) is not None:
        running.settle(call.mean, layout.sizes if layout.dim == 1 else ())
    if team.size == 1:
        tracked = (call.mean, call.var) if op.tracks or not op.training else (None, None)
        y = F.batch_norm(x, *tracked, call.weight, call.bias, op.training, call.momentum, call.eps)
    elif not op.training or layout.dim == 1:
        y = _own_channels(call, x, step, team)
    else:
        y = _SplitBatchNorm.apply(x, call.weight, call.bias, call, step, team)
    return HetTensor.wrap(y, layout, team)


def _own_channels(call: BatchNormCall, x: Tensor, step: Step, team: Team) -> Tensor:
    """Every statistic that this rank uses is its own: evaluation, or a cut over channels."""
    op, own = call.op, _own_slice(step, team)
    assert isinstance(op, BatchNorm)
    weight, bias = (contributed(team, p) if p is not None else None for p in (call.weight, call.bias))
    weight, bias = _sliced(weight, own), _sliced(bias, own)
    mean, var, momentum = _sliced(call.mean, own), _sliced(call.var, own), 0.0
    if op.tracks:
        mean, var, momentum = _tracked(call, x, step, team)
    if not x.numel():
        return of_nothing(x, weight, bias)
    return F.batch_norm(x, mean, var, weight, bias, op.training, momentum, call.eps)


def _own_slice(step: Step, team: Team) -> slice | None:
    """This rank's channels, unless it has all."""
    box, channels = step.output.boxes[team.rank], step.output.shape[1]
    return slice(box.lo[1], box.hi[1]) if box.shape[1] < channels else None


def _sliced(t: Tensor | None, own: slice | None) -> Tensor | None:
    return t[own] if t is not None and own is not None else t


def _tracked(call: BatchNormCall, x: Tensor, step: Step, team: Team) -> tuple[Tensor, Tensor, float]:
    """The running statistics of this rank's channels, and the momentum with which torch is to update them yet."""
    assert call.mean is not None
    assert call.var is not None
    own = _own_slice(step, team) or slice(None)
    # Autograd keeps what torch is given, and would not let anybody write to the statistics until the backward.
    mean, var = call.mean.data[own], call.var.data[own]
    later = running_of(team)
    running = later if later is not None else Running(team)
    running.note((call.mean, call.var), step.output.sizes, exact_of(x))
    if later is not None:
        return mean, var, call.momentum
    if x.numel():  # before anything is saved: by that a checkpoint knows how far to compute again
        with torch.no_grad():
            torch.batch_norm_update_stats(x, mean, var, call.momentum)
    running.tell()
    return mean, var, 0.0


def _track(call: BatchNormCall, mean: Tensor, var: Tensor, count: int) -> None:
    assert call.mean is not None
    assert call.var is not None
    with torch.no_grad():
        call.mean.lerp_(mean.to(call.mean.dtype), call.momentum)
        call.var.lerp_(var.to(call.var.dtype) * (count / max(count - 1, 1)), call.momentum)


def exact_of(x: Tensor) -> torch.dtype:
    """In which its statistics are."""
    return x.dtype if x.dtype == torch.float64 else torch.float32


def _moments(x: Tensor, exact: torch.dtype) -> Tensor:
    """(2, c): variance and mean of the own part; zero of an empty one, which weighs nothing."""
    if not x.numel():
        return x.new_zeros((2, x.shape[1]), dtype=exact)
    mean, var = torch.batch_norm_update_stats(x.to(exact), None, None, 0.0)  # on a CPU many times var_mean's speed
    return torch.stack((var, mean))


class _SplitBatchNorm(torch.autograd.Function):
    """Training over parts of the batch or of space. Gradients of weight and bias, from global sums, are whole.

    Letters: C channels, of which this rank has c.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, call: BatchNormCall, step: Step, team: Team
    ) -> Tensor:
        count = prod(step.output.shape) // step.output.shape[1]
        exact = exact_of(x)
        held = _own_slice(step, team)
        own = _among_all(_moments(x, exact), held, step)
        (move,) = step.forward
        each = perform(team, own[None], move.forward, move.src.boxes[team.rank], move.dst.boxes[team.rank])
        variances, means = each.unbind(1)
        share = _shares(step.output, exact, x.device)
        mean = (share * means).sum(0)
        apart = means - mean
        var = (share * torch.addcmul(variances, apart, apart)).sum(0)
        # One fused pass, in the input's own precision outside (x, y) and in `exact` inside.
        gain, shift = (_sliced(_as(p, exact, x), held) for p in (weight, bias))
        if x.numel():
            y = F.batch_norm(x, _sliced(mean, held), _sliced(var, held), gain, shift, False, 0.0, call.eps)
        else:
            y = x.clone()  # torch refuses one without channels
        if call.mean is not None:  # before anything is saved: by that a checkpoint knows how far to compute again
            _track(call, mean, var, count)
        ctx.save_for_backward(x, weight, _sliced(mean, held), _sliced((var + call.eps).rsqrt(), held))
        ctx.step, ctx.team, ctx.count, ctx.held = step, team, count, held
        ctx.bias_dtype = bias.dtype if bias is not None else None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd = ctx.saved_tensors
        held, (move,) = ctx.held, ctx.step.backward
        own = _among_all(_sums(g, x, mean, invstd), held, ctx.step)
        whole = Box.whole(tuple(own.shape))
        sums = perform(ctx.team, own, move.forward, whole, whole)
        gx = None
        if ctx.needs_input_grad[0]:
            scale = invstd if weight is None else invstd * _sliced(weight, held)
            along, shift = (sums if held is None else sums[:, held]) * (-scale / ctx.count)
            along = along * invstd
            scale, along, shift = (per_channel(t, x) for t in (scale, along, shift - along * mean))
            gx = torch.addcmul(shift, g, scale).addcmul_(x, along).to(x.dtype)
        g_weight = sums[0].to(weight.dtype) if ctx.needs_input_grad[1] else None
        g_bias = sums[1].to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return gx, g_weight, g_bias, None, None, None


@lru_cache(1024)
def _shares(layout: Layout, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(P, C): what part of the numbers of each channel each rank has."""
    shares, count = torch.zeros((layout.world, layout.shape[1]), dtype=dtype), prod(layout.shape) // layout.shape[1]
    for of_rank, box in zip(shares, layout.boxes, strict=True):
        of_rank[box.lo[1] : box.hi[1]] = box.numel // max(box.shape[1], 1) / max(count, 1)
    return shares.to(device)


def _among_all(own: Tensor, held: slice | None, step: Step) -> Tensor:
    """(2, c) of own channels to (2, C) of all, zero of the others."""
    return own if held is None else F.pad(own, (held.start, step.output.shape[1] - held.stop))


def _sums(g: Tensor, x: Tensor, mean: Tensor, invstd: Tensor) -> Tensor:
    """(2, c): over the own part, the sums of g times normalized x, and of g."""
    if not x.numel():
        return torch.zeros((2, x.shape[1]), dtype=mean.dtype, device=mean.device)
    _, along, total = torch.ops.aten.native_batch_norm_backward(
        g, x, None, None, None, mean, invstd, True, 0.0, [False, True, True]
    )
    if total.dtype != mean.dtype:  # half precision, where g is
        total = g.sum([d for d in range(g.dim()) if d != 1], dtype=mean.dtype)
    return torch.stack([along, total])


def _as(p: Tensor | None, exact: torch.dtype, x: Tensor) -> Tensor | None:
    """Mixed precision takes half inputs with float32 parameters throughout."""
    return p.to(exact) if p is not None and x.dtype != exact else p


def of_nothing(x: Tensor, *params: Tensor | None) -> Tensor:
    """An empty result where torch refuses an empty input; the graph still reaches every tensor."""
    # The product saves a tensor, as norms of other parts do: by these a checkpoint knows how far to compute again.
    return sum((p.sum() * 0 for p in params if p is not None), x * x.new_ones(()))
