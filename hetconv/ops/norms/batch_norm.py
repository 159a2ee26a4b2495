"""Batch norm on shards with the statistics of the whole batch."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hetconv.comm import call_tags
from hetconv.comm.rank_group import RankGroup
from hetconv.comm.redistribute import redistribute_local, run_rounds
from hetconv.kernels.epilogue import per_channel
from hetconv.kernels.norms import (
    combination,
    moments_of_channels,
    normalized,
    sums_of_channels,
)
from hetconv.operators.norms import BatchNorm, BatchNormCall
from hetconv.ops.as_called import ShardedCall
from hetconv.runtime.gradient_sync import running_stats_of, synced_grad
from hetconv.runtime.het_tensor import HetTensor
from hetconv.runtime.inputs import differentiable_gradients
from hetconv.runtime.running_stats import RunningStats
from hetconv.sharding.layout import Box, Layout, ReadRegion
from hetconv.sharding.rule import OpSharding
from hetconv.signature_cache import Cache

from .statistics import (
    Shares,
    as_tensor,
    bias_like,
    combined,
    empty_result,
    exact_of,
    gathered,
)


class Norm(NamedTuple):
    """Batch norm of C channels.

    Attributes:
        weight: (C,), or None.
        bias: (C,), or None.
        mean: Running mean (C,), which it reads in evaluation and updates in training.
        var: Running variance (C,), likewise.
        training: Whether it uses the statistics of the batch.
        momentum: Weight of the batch in the running statistics.
        eps: Added to the variance.
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
        """Returns whether it is in training and updates running statistics."""
        return self.training and self.mean is not None


def norm_of(call: BatchNormCall) -> Norm:
    """Returns the batch norm that a call computes."""
    assert isinstance(call.op, BatchNorm)
    params = (call.weight, call.bias, call.mean, call.var)
    return Norm(*params, call.op.training, call.momentum, call.eps)


def batch_norm(c: ShardedCall) -> HetTensor:
    """Normalizes the local shard of x (N, C, ...) with the statistics of the whole.

    If channels are sharded, the statistics are local; else the ranks combine theirs.
    """
    call, group, layout = c.call, c.group, c.output
    assert isinstance(call, BatchNormCall)
    norm, x = norm_of(call), c.local_input()
    if not norm.training or layout.dim == 1 or group.size == 1:
        return c.wrap(on_own_channels(x, norm, layout, group))
    return c.wrap(on_shared_channels(x, norm, c.sharding, group))


def on_shared_channels(
    x: Tensor, norm: Norm, sharding: OpSharding, group: RankGroup
) -> Tensor:
    """Normalizes a shard by the statistics of the whole batch.

    Args:
        x: This rank's shard.
        norm: In training.
        sharding: How it runs.
        group: The ranks.
    """
    _sync_running_stats(norm, (), group)
    result: Tensor = _SplitBatchNorm.apply(
        x, norm.weight, norm.bias, norm, sharding, group
    )
    return result


def on_own_channels(x: Tensor, norm: Norm, layout: Layout, group: RankGroup) -> Tensor:
    """Normalizes a shard without communication.

    Args:
        x: This rank's shard.
        norm: In evaluation, or in training with sharded channels.
        layout: Layout of x.
        group: The ranks.
    """
    sizes = _local_sizes(layout)
    running = _sync_running_stats(norm, sizes, group)
    own = _local_slice(layout, group)
    weight, bias, mean, var, training, momentum, eps = norm
    if weight is not None:
        weight = _sliced(synced_grad(group, weight), own)
    if bias is not None:
        bias = _sliced(synced_grad(group, bias), own)
    if norm.tracks and group.size > 1:
        mean, var, momentum = _tracked(x, norm, sizes, own, running, group)
    else:
        mean, var = _sliced(mean, own), _sliced(var, own)
    if not x.numel() and group.size > 1:
        return empty_result(x, weight, bias)
    cudnn = torch.backends.cudnn.enabled
    return torch.batch_norm(x, weight, bias, mean, var, training, momentum, eps, cudnn)


def scale_and_shift(
    norm: Norm, dtype: torch.dtype, layout: Layout, group: RankGroup
) -> tuple[Tensor, Tensor]:
    """Returns the scale and shift (c,) of this rank's channels in evaluation.

    Args:
        norm: A batch norm in evaluation.
        dtype: That of the shard; the result is in float32 at least.
        layout: Layout of the normalized tensor.
        group: The ranks.
    """
    _sync_running_stats(norm, _local_sizes(layout), group)
    own, exact = _local_slice(layout, group), torch.promote_types(dtype, torch.float32)
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


def _local_sizes(layout: Layout) -> tuple[int, ...]:
    """Returns how many channels' statistics each rank updates; () if all update all."""
    return layout.sizes if layout.dim == 1 else ()


def _sync_running_stats(
    norm: Norm, sizes: tuple[int, ...], group: RankGroup
) -> RunningStats | None:
    """Makes sure that each rank knows the running statistics that it is about to use.

    Args:
        norm: A batch norm.
        sizes: How many channels each rank uses; () if all ranks use all.
        group: The ranks.

    Returns:
        Where statistics are noted that ranks exchange later, within a model's forward.
    """
    running = running_stats_of(group)
    if running is not None and norm.mean is not None:
        running.ensure_synced(norm.mean, sizes)
    return running


def _local_slice(layout: Layout, group: RankGroup) -> slice | None:
    """Returns the slice of this rank's channels, or None if it has all."""
    box = layout.boxes[group.rank]
    lo, hi = box.lo[1], box.hi[1]
    return slice(lo, hi) if hi - lo < layout.shape[1] else None


def _sliced(t: Tensor | None, own: slice | None) -> Tensor | None:
    return t[own] if t is not None and own is not None else t


def _tracked(
    x: Tensor,
    norm: Norm,
    sizes: tuple[int, ...],
    own: slice | None,
    later: RunningStats | None,
    group: RankGroup,
) -> tuple[Tensor | None, Tensor | None, float]:
    """Notes that running statistics change, and returns what torch is to update.

    Returns:
        This rank's running mean and variance, and the momentum of torch's update: zero
        if they were updated here already.
    """
    assert norm.mean is not None
    assert norm.var is not None
    # Autograd saves what torch is given; with .data the statistics can still be written
    # to before the backward pass.
    mean, var = _sliced(norm.mean.data, own), _sliced(norm.var.data, own)
    running = later if later is not None else RunningStats(group)
    running.note((norm.mean, norm.var), sizes, exact_of(x))
    if later is not None:
        return mean, var, norm.momentum
    if (
        x.numel()
    ):  # a recomputation may stop at the first saved tensor, so update before
        with torch.no_grad():
            torch.batch_norm_update_stats(x, mean, var, norm.momentum)
    running.sync()
    return mean, var, 0.0


def _track(norm: Norm, mean: Tensor, var: Tensor, count: int) -> None:
    """Updates the running statistics with those of a batch of ``count`` per channel."""
    assert norm.mean is not None
    assert norm.var is not None
    with torch.no_grad():
        norm.mean.lerp_(mean.to(norm.mean.dtype), norm.momentum)
        norm.var.lerp_(
            var.to(norm.var.dtype) * (count / max(count - 1, 1)), norm.momentum
        )


def _moments(x: Tensor, exact: torch.dtype) -> Tensor:
    """Returns (2, c): variance and mean of a shard; zeros if it is empty."""
    if not x.numel():
        return x.new_zeros((2, x.shape[1]), dtype=exact)
    return moments_of_channels(x, exact)


class _SplitBatchNorm(torch.autograd.Function):
    """Trains on shards of the batch or of space.

    The gradients of weight and bias are whole, because they come from global sums.
    Letters: C channels, of which this rank has c.
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
        held = _local_slice(sharding.output, group)
        own = _pad_to_all(_moments(x, exact), held, sharding)
        (move,) = sharding.forward_moves
        each = gathered(own[None], move, group)
        var, mean = combined(each, _shares(sharding.output))
        of_own = (mean, var) if held is None else (mean[held], var[held])
        own_mean, own_var = (t[None] for t in of_own)
        gain, shift = (_sliced(p, held) for p in (weight, bias))
        y = normalized(x, own_mean, own_var, gain, shift, norm.eps)
        # A recomputation may stop at the first saved tensor, so update before.
        if norm.mean is not None:
            _track(norm, mean, var, count)
        ctx.save_for_backward(
            x, weight, _sliced(mean, held), _sliced((var + norm.eps).rsqrt(), held)
        )
        ctx.sharding, ctx.group = sharding, group
        ctx.count, ctx.held, ctx.eps = count, held, norm.eps
        ctx.bias_dtype = bias.dtype if bias is not None else None
        ctx.call = call_tags.forward_call()
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd = ctx.saved_tensors
        call_tags.enter_backward(ctx.call)
        if torch.is_grad_enabled():
            channels, wanted = ctx.sharding.output.shape[1], ctx.needs_input_grad[2]
            bias = bias_like(x, channels, ctx.bias_dtype, wanted)
            compute = partial(_differentiable, ctx.eps, ctx.sharding, ctx.group)
            gradients = differentiable_gradients(compute, (x, weight, bias), g)
            return *gradients, None, None, None
        held, (move,) = ctx.held, ctx.sharding.backward_moves
        own = _pad_to_all(_sums(g, x, mean, invstd), held, ctx.sharding)
        whole = Box.whole(tuple(own.shape))
        sums = run_rounds(ctx.group, own, move.forward, whole, whole)
        gx = None
        if ctx.needs_input_grad[0]:
            scale = invstd if weight is None else invstd * _sliced(weight, held)
            local_sums = sums if held is None else sums[:, held]
            along, shift = local_sums * (-scale / ctx.count)
            along = along * invstd
            numbers = (along, scale, shift - along * mean)
            gx = combination(x, g, *(t[None] for t in numbers))
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
    """Computes `_SplitBatchNorm` by operators that autograd can differentiate again."""
    held, exact = _local_slice(sharding.output, group), exact_of(x)
    (move,) = sharding.forward_moves
    if x.numel():
        dims = [d for d in range(x.dim()) if d != 1]
        var, mean = torch.var_mean(x.to(exact), dims, correction=0)
        own = torch.stack((var, mean))
    else:
        own = x.sum().to(exact).expand(2, x.shape[1]) * 0
    # Each rank uses all statistics, and the whole weight, for its own shard: the
    # gradients of the ranks are summed.
    read = ReadRegion(move.dst.shape, move.dst.boxes)
    every = _pad_to_all(own, held, sharding)[None]
    each = redistribute_local(group, every, move.src, read)
    variances, means = each.unbind(1)
    share = as_tensor(_shares(sharding.output), each)
    mean = (share * means).sum(0)
    invstd = ((share * (variances + (means - mean) ** 2)).sum(0) + eps).rsqrt()
    shape, world = (sharding.output.shape[1],), group.size
    whole, everything = (
        Layout.replicated(shape, world),
        ReadRegion.everything(shape, world),
    )
    gain, shift = (
        redistribute_local(group, p, whole, everything) if p is not None else None
        for p in (weight, bias)
    )
    scale = invstd if gain is None else invstd * gain.to(exact)
    assert shift is not None
    of_all = torch.stack((scale, shift.to(exact) - mean * scale))
    scale, shift = (of_all if held is None else of_all[:, held]).unbind()
    return (x.to(exact) * per_channel(scale, x) + per_channel(shift, x)).to(x.dtype)


_shares_of: Cache[int, tuple[Layout, Shares]] = Cache()


def _shares(layout: Layout) -> Shares:
    """Returns the fraction of each channel's elements that each rank holds."""
    found = _shares_of.current.get(id(layout))
    if found is None:  # kept with the layout, so that its id stays its own
        found = _shares_of.add(id(layout), (layout, _shares_by_channel(layout)))
    return found[1]


def _shares_by_channel(layout: Layout) -> Shares:
    channels = layout.shape[1]
    count = max(prod(layout.shape) // channels, 1)
    of_ranks = [box.numel // max(box.shape[1], 1) / count for box in layout.boxes]
    if all(box.shape[1] in (0, channels) or not box.numel for box in layout.boxes):
        return tuple(of_ranks)
    shares = torch.zeros((layout.world, channels), dtype=torch.float64, device="cpu")
    for of_rank, box, share in zip(shares, layout.boxes, of_ranks, strict=True):
        of_rank[box.lo[1] : box.hi[1]] = share
    return shares


def _pad_to_all(own: Tensor, held: slice | None, sharding: OpSharding) -> Tensor:
    """Pads (2, c) of the local channels with zeros to (2, C) of all."""
    if held is None:
        return own
    return F.pad(own, (held.start, sharding.output.shape[1] - held.stop))


def _sums(g: Tensor, x: Tensor, mean: Tensor, invstd: Tensor) -> Tensor:
    """Returns (2, c): the shard's sums of g times the normalized x, and of g."""
    if not x.numel():
        return torch.zeros((2, x.shape[1]), dtype=mean.dtype, device=mean.device)
    return sums_of_channels(g, x, mean, invstd)
