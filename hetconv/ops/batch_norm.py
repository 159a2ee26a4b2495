"""Batch norm on parts with the statistics of the whole: parts weigh as they count (Chan
et al., 1979).
"""

from __future__ import annotations

from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hetconv.comm import call_tags
from hetconv.comm.rank_group import Team
from hetconv.comm.redistribute import moved, perform
from hetconv.kernels.epilogue import per_channel
from hetconv.operators.base import Call
from hetconv.operators.norms import BatchNorm, BatchNormCall
from hetconv.runtime.gradient_sync import contributed, running_of
from hetconv.runtime.het_tensor import HetTensor
from hetconv.runtime.inputs import Args, Func, Kwargs, bring, differentiable_gradients
from hetconv.runtime.running_stats import Running
from hetconv.sharding.layer_rules import Step
from hetconv.sharding.layout import Box, Layout, Need


class Norm(NamedTuple):
    """A batch norm of C channels, all (C,): its parameters, and the statistics that it
    reads, or is to update.

    ``tracks``: it is in training, and updates them.
    """

    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor | None
    var: Tensor | None
    training: bool
    momentum: float
    eps: float

    @property
    def tracks(self) -> bool:
        return self.training and self.mean is not None


def norm_of(call: BatchNormCall) -> Norm:
    assert isinstance(call.op, BatchNorm)
    return Norm(
        call.weight,
        call.bias,
        call.mean,
        call.var,
        call.op.training,
        call.momentum,
        call.eps,
    )


def batch_norm(
    call: Call, step: Step, team: Team, func: Func, args: Args, kwargs: Kwargs
) -> HetTensor:
    """x of any rank >= 2, cut over channels alone (statistics are local) or in any
    other way (they are combined).
    """
    assert isinstance(call, BatchNormCall)
    layout, norm = step.output, norm_of(call)
    x = bring(call.inputs[0], step.reads[0], team)
    if not norm.training or layout.dim == 1 or team.size == 1:
        return HetTensor.wrap(on_own_channels(x, norm, layout, team), layout, team)
    _settle(norm, (), team)
    return HetTensor.wrap(
        _SplitBatchNorm.apply(x, norm.weight, norm.bias, norm, step, team), layout, team
    )


def on_own_channels(x: Tensor, norm: Norm, layout: Layout, team: Team) -> Tensor:
    """Of this rank's part ``x``, where every statistic that it uses is its own:
    evaluation, or a cut over channels.
    """
    sizes = _told_sizes(layout)
    running = _settle(norm, sizes, team)
    own = _own_slice(layout, team)
    weight, bias, mean, var, training, momentum, eps = norm
    weight, bias = (
        _sliced(contributed(team, p), own) if p is not None else None
        for p in (weight, bias)
    )
    if norm.tracks and team.size > 1:
        mean, var, momentum = _tracked(x, norm, sizes, own, running, team)
    else:
        mean, var = _sliced(mean, own), _sliced(var, own)
    if not x.numel() and team.size > 1:
        return of_nothing(x, weight, bias)
    return torch.batch_norm(
        x,
        weight,
        bias,
        mean,
        var,
        training,
        momentum,
        eps,
        torch.backends.cudnn.enabled,
    )


def scale_and_shift(
    norm: Norm, dtype: torch.dtype, layout: Layout, team: Team
) -> tuple[Tensor, Tensor]:
    """What evaluation multiplies own channels by, and adds then, to a part of this
    ``dtype``; without autograd.
    """
    _settle(norm, _told_sizes(layout), team)
    own, exact = _own_slice(layout, team), torch.promote_types(dtype, torch.float32)
    of_own = (_sliced(t, own) for t in (norm.mean, norm.var, norm.weight, norm.bias))
    mean, var, weight, bias = (t.to(exact) if t is not None else None for t in of_own)
    assert mean is not None
    assert var is not None
    scale = (var + norm.eps).rsqrt_()
    scale = scale.mul_(weight) if weight is not None else scale
    shift = (
        -mean * scale if bias is None else torch.addcmul(bias, mean, scale, value=-1)
    )
    return scale, shift


def _told_sizes(layout: Layout) -> tuple[int, ...]:
    """In which ranges of channels ranks know their own statistics; none where all know all."""
    return layout.sizes if layout.dim == 1 else ()


def _settle(norm: Norm, sizes: tuple[int, ...], team: Team) -> Running | None:
    """All ranks use all channels' statistics now, or each its own of so many. Who is
    told later what they become.
    """
    running = running_of(team)
    if running is not None and norm.mean is not None:
        running.settle(norm.mean, sizes)
    return running


def _own_slice(layout: Layout, team: Team) -> slice | None:
    """This rank's channels, unless it has all."""
    box = layout.boxes[team.rank]
    lo, hi = box.lo[1], box.hi[1]
    return slice(lo, hi) if hi - lo < layout.shape[1] else None


def _sliced(t: Tensor | None, own: slice | None) -> Tensor | None:
    return t[own] if t is not None and own is not None else t


def _tracked(
    x: Tensor,
    norm: Norm,
    sizes: tuple[int, ...],
    own: slice | None,
    later: Running | None,
    team: Team,
) -> tuple[Tensor | None, Tensor | None, float]:
    """The running statistics of this rank's channels, and the momentum with which torch
    is to update them yet.
    """
    assert norm.mean is not None
    assert norm.var is not None
    # Autograd keeps what torch is given, and would not let anybody write to the
    # statistics until the backward.
    mean, var = _sliced(norm.mean.data, own), _sliced(norm.var.data, own)
    running = later if later is not None else Running(team)
    running.note((norm.mean, norm.var), sizes, exact_of(x))
    if later is not None:
        return mean, var, norm.momentum
    if (
        x.numel()
    ):  # before anything is saved: by that a checkpoint knows how far to compute again
        with torch.no_grad():
            torch.batch_norm_update_stats(x, mean, var, norm.momentum)
    running.tell()
    return mean, var, 0.0


def _track(norm: Norm, mean: Tensor, var: Tensor, count: int) -> None:
    assert norm.mean is not None
    assert norm.var is not None
    with torch.no_grad():
        norm.mean.lerp_(mean.to(norm.mean.dtype), norm.momentum)
        norm.var.lerp_(
            var.to(norm.var.dtype) * (count / max(count - 1, 1)), norm.momentum
        )


def exact_of(x: Tensor) -> torch.dtype:
    """In which its statistics are."""
    return x.dtype if x.dtype == torch.float64 else torch.float32


def _moments(x: Tensor, exact: torch.dtype) -> Tensor:
    """(2, c): variance and mean of the own part; zero of an empty one, which weighs nothing."""
    if not x.numel():
        return x.new_zeros((2, x.shape[1]), dtype=exact)
    mean, var = torch.batch_norm_update_stats(
        x.to(exact), None, None, 0.0
    )  # on a CPU many times var_mean's speed
    return torch.stack((var, mean))


class _SplitBatchNorm(torch.autograd.Function):
    """Training over parts of the batch or of space. Gradients of weight and bias, from
    global sums, are whole.

    Letters: C channels, of which this rank has c.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        norm: Norm,
        step: Step,
        team: Team,
    ) -> Tensor:
        count = prod(step.output.shape) // step.output.shape[1]
        exact = exact_of(x)
        held = _own_slice(step.output, team)
        own = _among_all(_moments(x, exact), held, step)
        (move,) = step.forward
        each = perform(
            team,
            own[None],
            move.forward,
            move.src.boxes[team.rank],
            move.dst.boxes[team.rank],
        )
        variances, means = each.unbind(1)
        share = _shares(step.output, exact, x.device)
        mean = (share * means).sum(0)
        apart = means - mean
        var = (share * torch.addcmul(variances, apart, apart)).sum(0)
        # One fused pass, in the input's own precision outside (x, y) and in `exact` inside.
        gain, shift = (_sliced(_as(p, exact, x), held) for p in (weight, bias))
        if x.numel():
            y = F.batch_norm(
                x,
                _sliced(mean, held),
                _sliced(var, held),
                gain,
                shift,
                False,
                0.0,
                norm.eps,
            )
        else:
            y = x.clone()  # torch refuses one without channels
        if (
            norm.mean is not None
        ):  # before anything is saved: by that a checkpoint knows how far to compute again
            _track(norm, mean, var, count)
        ctx.save_for_backward(
            x, weight, _sliced(mean, held), _sliced((var + norm.eps).rsqrt(), held)
        )
        ctx.step, ctx.team, ctx.count, ctx.held, ctx.eps = (
            step,
            team,
            count,
            held,
            norm.eps,
        )
        ctx.bias_dtype = bias.dtype if bias is not None else None
        ctx.call = call_tags.forward_call()
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd = ctx.saved_tensors
        call_tags.enter_backward(ctx.call)
        if torch.is_grad_enabled():
            bias = x.new_zeros(
                ctx.step.output.shape[1], dtype=ctx.bias_dtype or x.dtype
            )
            bias.requires_grad_(ctx.needs_input_grad[2])
            again = partial(_differentiable, ctx.eps, ctx.step, ctx.team)
            return (
                *differentiable_gradients(again, (x, weight, bias), g),
                None,
                None,
                None,
            )
        held, (move,) = ctx.held, ctx.step.backward
        own = _among_all(_sums(g, x, mean, invstd), held, ctx.step)
        whole = Box.whole(tuple(own.shape))
        sums = perform(ctx.team, own, move.forward, whole, whole)
        gx = None
        if ctx.needs_input_grad[0]:
            scale = invstd if weight is None else invstd * _sliced(weight, held)
            along, shift = (sums if held is None else sums[:, held]) * (
                -scale / ctx.count
            )
            along = along * invstd
            scale, along, shift = (
                per_channel(t, x) for t in (scale, along, shift - along * mean)
            )
            gx = torch.addcmul(shift, g, scale).addcmul_(x, along).to(x.dtype)
        g_weight = sums[0].to(weight.dtype) if ctx.needs_input_grad[1] else None
        g_bias = sums[1].to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return gx, g_weight, g_bias, None, None, None


def _differentiable(
    eps: float, step: Step, team: Team, x: Tensor, weight: Tensor | None, bias: Tensor
) -> Tensor:
    """`_SplitBatchNorm`, by operators that autograd knows."""
    held, exact, (move,) = _own_slice(step.output, team), exact_of(x), step.forward
    if x.numel():
        var, mean = torch.var_mean(
            x.to(exact), [d for d in range(x.dim()) if d != 1], correction=0
        )
        own = torch.stack((var, mean))
    else:
        own = x.sum().to(exact).expand(2, x.shape[1]) * 0
    # Each rank uses all statistics, and the whole weight, for its own part: their
    # gradients are contributions.
    each = moved(
        team,
        _among_all(own, held, step)[None],
        move.src,
        Need(move.dst.shape, move.dst.boxes),
    )
    variances, means = each.unbind(1)
    share = _shares(step.output, exact, x.device)
    mean = (share * means).sum(0)
    invstd = ((share * (variances + (means - mean) ** 2)).sum(0) + eps).rsqrt()
    shape, world = (step.output.shape[1],), team.size
    gain, shift = (
        moved(team, p, Layout.replicated(shape, world), Need.everything(shape, world))
        if p is not None
        else None
        for p in (weight, bias)
    )
    scale = invstd if gain is None else invstd * gain.to(exact)
    assert shift is not None
    of_all = torch.stack((scale, shift.to(exact) - mean * scale))
    scale, shift = (of_all if held is None else of_all[:, held]).unbind()
    return (x.to(exact) * per_channel(scale, x) + per_channel(shift, x)).to(x.dtype)


@lru_cache(1024)
def _shares(layout: Layout, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(P, C): what part of the numbers of each channel each rank has."""
    count = prod(layout.shape) // layout.shape[1]
    shares = torch.zeros((layout.world, layout.shape[1]), dtype=dtype, device="cpu")
    for of_rank, box in zip(shares, layout.boxes, strict=True):
        of_rank[box.lo[1] : box.hi[1]] = (
            box.numel // max(box.shape[1], 1) / max(count, 1)
        )
    return shares.to(device)


def _among_all(own: Tensor, held: slice | None, step: Step) -> Tensor:
    """(2, c) of own channels to (2, C) of all, zero of the others."""
    return (
        own
        if held is None
        else F.pad(own, (held.start, step.output.shape[1] - held.stop))
    )


def _sums(g: Tensor, x: Tensor, mean: Tensor, invstd: Tensor) -> Tensor:
    """(2, c): over the own part, the sums of g times normalized x, and of g."""
    if not x.numel():
        return torch.zeros((2, x.shape[1]), dtype=mean.dtype, device=mean.device)
    if x.is_cuda:  # whose native_batch_norm_backward wants running statistics
        total, centred, _, _ = torch.batch_norm_backward_reduce(
            g, x, mean, invstd, None, True, False, False
        )
        return torch.stack([centred * invstd, total])
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
    # The product saves a tensor, as norms of other parts do: by these a checkpoint
    # knows how far to compute again.
    return sum((p.sum() * 0 for p in params if p is not None), x * x.new_ones(()))
