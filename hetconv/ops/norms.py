"""Normalizations on parts with the statistics of the whole: parts weigh as they count (Chan et al., 1979)."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..calls import BatchNormCall, Call, NormCall, name_of
from ..following import BatchNorm, GroupNorm, OwnNorm
from ..kernels.finish import per_channel
from ..layout import Box, Layout
from ..movement import perform
from ..replicas import contributed
from ..rules import Step
from ..tensor import HetTensor, gather
from ..transport import Team
from .common import Args, Func, Kwargs, Runner, as_called, bring, called_on


def batch_norm(call: Call, step: Step, team: Team, func: Func, args: Args, kwargs: Kwargs) -> HetTensor:
    """x of any rank >= 2, cut over channels alone (statistics are local) or in any other way (they are combined)."""
    assert isinstance(call, BatchNormCall)
    assert isinstance(call.op, BatchNorm)
    op, layout = call.op, step.output
    x = bring(call.inputs[0], step.reads[0], team)
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
    if op.tracks:
        _track_own(call, x, step, team)
    if not x.numel():
        return _of_nothing(x, weight, bias)
    if not op.training:
        return F.batch_norm(x, _sliced(call.mean, own), _sliced(call.var, own), weight, bias, False, 0.0, call.eps)
    return F.batch_norm(x, None, None, weight, bias, True, 0.0, call.eps)


def _own_slice(step: Step, team: Team) -> slice | None:
    """This rank's channels, unless it has all."""
    box, channels = step.output.boxes[team.rank], step.output.shape[1]
    return slice(box.lo[1], box.hi[1]) if box.shape[1] < channels else None


def _sliced(t: Tensor | None, own: slice | None) -> Tensor | None:
    return t[own] if t is not None and own is not None else t


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
        call.mean.lerp_(mean.to(call.mean.dtype), call.momentum)
        call.var.lerp_(var.to(call.var.dtype) * (count / max(count - 1, 1)), call.momentum)


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
        exact = x.dtype if x.dtype == torch.float64 else torch.float32
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


def _of_nothing(x: Tensor, *params: Tensor | None) -> Tensor:
    """An empty result where torch refuses an empty input; the graph still reaches every tensor."""
    # The product saves a tensor, as norms of other parts do: by these a checkpoint knows how far to compute again.
    return sum((p.sum() * 0 for p in params if p is not None), x * x.new_ones(()))


def group_norm(call: Call, step: Step, team: Team, func: Func, args: Args, kwargs: Kwargs) -> HetTensor:
    """x (N, C, ...), cut over samples or whole groups of channels (all is local) or else (moments are combined)."""
    assert isinstance(call, NormCall)
    assert isinstance(call.op, GroupNorm)
    op, box = call.op, step.output.boxes[team.rank]
    x = bring(call.inputs[0], step.reads[0], team)
    if name_of(func) == "group_norm" and torch.is_autocast_enabled("cuda") and x.is_cuda and x.dtype != torch.float64:
        x = x.float()  # as torch's autocast does, though for instance norm it does not
    own = slice(box.lo[1], box.hi[1])
    weight, bias = (contributed(team, gather(p))[own] if p is not None else None for p in (call.weight, call.bias))
    if step.forward:
        y = _SplitGroupNorm.apply(x, weight, bias, call.eps, op, step, team)
    elif not x.numel():
        y = _of_nothing(x, weight, bias)
    else:  # torch.nn.functional's refuses a part of one element per group
        y = torch.group_norm(x, x.shape[1] // op.channels, weight, bias, call.eps)
    return HetTensor.wrap(y, step.output, team)


class _SplitGroupNorm(torch.autograd.Function):
    """Ranks hold parts of the same groups. Of weight and bias they are given their own channels.

    Letters: x (n, c, ...) of own samples and channels; mean, invstd (n, G) of the groups.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, op: GroupNorm, step: Step,
        team: Team,
    ) -> Tensor:  # fmt: skip
        exact = x.dtype if x.dtype == torch.float64 else torch.float32
        layout, lo = step.output, step.output.boxes[team.rank].lo[1]
        own = _group_moments(x.to(exact), op, lo)
        (move,) = step.forward
        each = perform(team, own[None], move.forward, move.src.boxes[team.rank], move.dst.boxes[team.rank])
        variances, means = each.view(len(each), 2, -1, op.groups).unbind(1)
        mates = layout.mates(team.rank)
        share = each.new_tensor(op.shares(layout)[mates.start : mates.stop])[:, None]
        mean = (share * means).sum(0)
        invstd = ((share * (variances + (means - mean) ** 2)).sum(0) + eps).rsqrt()
        scale, centre = _to_channels(invstd, op, lo, x), _to_channels(mean, op, lo, x)
        scale = scale if weight is None else scale * per_channel(weight.to(exact), x)
        shift = -centre * scale if bias is None else per_channel(bias.to(exact), x) - centre * scale
        ctx.save_for_backward(x, weight, mean, invstd)
        ctx.op, ctx.step, ctx.team, ctx.lo = op, step, team, lo
        ctx.bias_dtype = bias.dtype if bias is not None else None
        return torch.addcmul(shift, x.to(exact), scale).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd = ctx.saved_tensors
        op, lo, dims = ctx.op, ctx.lo, list(range(2, x.dim()))
        scale = _to_channels(invstd, op, lo, x)
        centred = (x.to(mean.dtype) - _to_channels(mean, op, lo, x)) * scale
        g = g.to(mean.dtype)
        of_weight, of_bias = (g * centred).sum(dims), g.sum(dims)  # (N, c)
        gains = mean.new_ones(x.shape[1]) if weight is None else weight.to(mean.dtype)
        own = torch.stack([_to_groups(s * gains, op, lo).flatten() for s in (of_weight, of_bias)])
        (move,) = ctx.step.backward
        whole = Box.whole(tuple(own.shape))
        along, total = perform(ctx.team, own, move.forward, whole, whole).view(2, *mean.shape)
        gx = None
        if ctx.needs_input_grad[0]:
            g = g if weight is None else g * per_channel(gains, x)
            along, total = (_to_channels(s, op, lo, x) for s in (along, total))
            gx = ((g - (total + centred * along) / (op.channels * prod(op.shape[2:]))) * scale).to(x.dtype)
        g_weight = of_weight.sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        g_bias = of_bias.sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return gx, g_weight, g_bias, None, None, None, None


def _group_moments(x: Tensor, op: GroupNorm, lo: int) -> Tensor:
    """(2, n G): variance and mean of the own part of every group; zero of an empty one, which weighs nothing."""
    if not x.numel():
        return x.new_zeros((2, len(x) * op.groups))
    var, mean = torch.var_mean(x, list(range(2, x.dim())), correction=0)
    held = _to_groups(torch.ones_like(mean), op, lo).clamp(min=1)
    centre = _to_groups(mean, op, lo) / held
    apart = mean - _to_channels(centre, op, lo, mean)
    return torch.stack([(_to_groups(var + apart**2, op, lo) / held).flatten(), centre.flatten()])


def _to_groups(v: Tensor, op: GroupNorm, lo: int) -> Tensor:
    """(N, c) of the own channels, which begin at ``lo``, to their sums (N, G) per group."""
    return F.pad(v, (lo, op.shape[1] - lo - v.shape[1])).reshape(-1, op.groups, op.channels).sum(2)


def _to_channels(v: Tensor, op: GroupNorm, lo: int, like: Tensor) -> Tensor:
    """(N, G) to (N, c, 1, ...) of the own channels, with as many dimensions as ``like``, which has c channels."""
    own = v.repeat_interleave(op.channels, 1)[:, lo : lo + like.shape[1]]
    return own.view(*own.shape, *[1] * (like.dim() - 2))


def own_norm(call: Call, step: Step, team: Team, func: Func, args: Args, kwargs: Kwargs) -> HetTensor:
    """As called, on the own part."""
    x = bring(call.inputs[0], step.reads[0], team)
    if name_of(func) == "local_response_norm" and not x.numel():  # torch returns x itself, not of autocast's dtype
        one = as_called(func, args, kwargs)(x.new_ones((1,) * x.dim()))
        return HetTensor.wrap((x * 1).to(one.dtype), step.output, team)
    local = {id(call.inputs[0]): x} | {id(p): contributed(team, gather(p)) for p in call.params}
    return HetTensor.wrap(called_on(local, func, args, kwargs), step.output, team)


RUN: dict[type[Any], Runner] = {BatchNorm: batch_norm, GroupNorm: group_norm, OwnNorm: own_norm}
