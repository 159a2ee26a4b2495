"""Batch norm on shards, with the statistics of the whole batch.

The moments of shards are combined as in Chan et al., 1979.
"""

from __future__ import annotations

from functools import lru_cache, partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hetconv.comm import call_tags
from hetconv.comm.rank_group import RankGroup
from hetconv.comm.redistribute import redistribute_local, run_rounds
from hetconv.kernels.epilogue import per_channel
from hetconv.operators.base import Call
from hetconv.operators.norms import BatchNormCall
from hetconv.runtime.het_tensor import HetTensor
from hetconv.runtime.inputs import (
    Args,
    Func,
    Kwargs,
    differentiable_gradients,
    to_layout,
)
from hetconv.sharding.layout import Box, Layout, ReadRegion
from hetconv.sharding.rule import OpSharding

from .local_batch_norm import (
    Norm,
    _own_slice,
    _settle,
    _sliced,
    _track,
    exact_of,
    norm_of,
    on_own_channels,
)


def batch_norm(
    call: Call,
    sharding: OpSharding,
    group: RankGroup,
    func: Func,
    args: Args,
    kwargs: Kwargs,
) -> HetTensor:
    """Runs batch norm on an input with two or more dimensions.

    An input that is sharded over channels alone needs no messages; otherwise moments are
    combined.
    """
    assert isinstance(call, BatchNormCall)
    layout, norm = sharding.output, norm_of(call)
    x = to_layout(call.inputs[0], sharding.input_layouts[0], group)
    if not norm.training or layout.dim == 1 or group.size == 1:
        return HetTensor.wrap(on_own_channels(x, norm, layout, group), layout, group)
    _settle(norm, (), group)
    return HetTensor.wrap(
        _SplitBatchNorm.apply(x, norm.weight, norm.bias, norm, sharding, group),
        layout,
        group,
    )


def _moments(x: Tensor, exact: torch.dtype) -> Tensor:
    """Returns variance and mean of a shard, (2, c); zero for an empty one."""
    if not x.numel():
        return x.new_zeros((2, x.shape[1]), dtype=exact)
    mean, var = torch.batch_norm_update_stats(
        x.to(exact), None, None, 0.0
    )  # on a CPU many times var_mean's speed
    return torch.stack((var, mean))


class _SplitBatchNorm(torch.autograd.Function):
    """Batch norm in training where shards have other samples or positions.

    The gradients of weight and bias are those of the whole batch. C channels, of which this
    rank has c.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        norm: Norm,
        sharding: OpSharding,
        group: RankGroup,
    ) -> Tensor:
        count = prod(sharding.output.shape) // sharding.output.shape[1]
        exact = exact_of(x)
        held = _own_slice(sharding.output, group)
        own = _among_all(_moments(x, exact), held, sharding)
        (move,) = sharding.forward_moves
        each = run_rounds(
            group,
            own[None],
            move.forward,
            move.src.boxes[group.rank],
            move.dst.boxes[group.rank],
        )
        variances, means = each.unbind(1)
        share = _shares(sharding.output, exact, x.device)
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
        ctx.sharding, ctx.group, ctx.count, ctx.held, ctx.eps = (
            sharding,
            group,
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
                ctx.sharding.output.shape[1], dtype=ctx.bias_dtype or x.dtype
            )
            bias.requires_grad_(ctx.needs_input_grad[2])
            again = partial(_differentiable, ctx.eps, ctx.sharding, ctx.group)
            return (
                *differentiable_gradients(again, (x, weight, bias), g),
                None,
                None,
                None,
            )
        held, (move,) = ctx.held, ctx.sharding.backward_moves
        own = _among_all(_sums(g, x, mean, invstd), held, ctx.sharding)
        whole = Box.whole(tuple(own.shape))
        sums = run_rounds(ctx.group, own, move.forward, whole, whole)
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
    eps: float,
    sharding: OpSharding,
    group: RankGroup,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor,
) -> Tensor:
    """Computes `_SplitBatchNorm` by operators that autograd knows."""
    held, exact, (move,) = (
        _own_slice(sharding.output, group),
        exact_of(x),
        sharding.forward_moves,
    )
    if x.numel():
        var, mean = torch.var_mean(
            x.to(exact), [d for d in range(x.dim()) if d != 1], correction=0
        )
        own = torch.stack((var, mean))
    else:
        own = x.sum().to(exact).expand(2, x.shape[1]) * 0
    # Each rank uses all statistics, and the whole weight, for its own part: their
    # gradients are contributions.
    each = redistribute_local(
        group,
        _among_all(own, held, sharding)[None],
        move.src,
        ReadRegion(move.dst.shape, move.dst.boxes),
    )
    variances, means = each.unbind(1)
    share = _shares(sharding.output, exact, x.device)
    mean = (share * means).sum(0)
    invstd = ((share * (variances + (means - mean) ** 2)).sum(0) + eps).rsqrt()
    shape, world = (sharding.output.shape[1],), group.size
    gain, shift = (
        redistribute_local(
            group,
            p,
            Layout.replicated(shape, world),
            ReadRegion.everything(shape, world),
        )
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
    """Returns which part of the elements of each channel each rank has, (P, C)."""
    count = prod(layout.shape) // layout.shape[1]
    shares = torch.zeros((layout.world, layout.shape[1]), dtype=dtype, device="cpu")
    for of_rank, box in zip(shares, layout.boxes, strict=True):
        of_rank[box.lo[1] : box.hi[1]] = (
            box.numel // max(box.shape[1], 1) / max(count, 1)
        )
    return shares.to(device)


def _among_all(own: Tensor, held: slice | None, sharding: OpSharding) -> Tensor:
    """Returns (2, C) with this rank's (2, c) in its channels, and zero in the others."""
    return (
        own
        if held is None
        else F.pad(own, (held.start, sharding.output.shape[1] - held.stop))
    )


def _sums(g: Tensor, x: Tensor, mean: Tensor, invstd: Tensor) -> Tensor:
    """Returns the sums of g times normalized x, and of g, over a shard: (2, c)."""
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
    """Returns a parameter in the dtype of the statistics, for half inputs."""
    return p.to(exact) if p is not None and x.dtype != exact else p
