"""Batch norm where a rank needs the statistics of its own channels only."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hetconv.comm.rank_group import RankGroup
from hetconv.operators.norms import BatchNorm, BatchNormCall
from hetconv.runtime.gradient_sync import running_stats_of, synced_grad
from hetconv.runtime.running_stats import RunningStats
from hetconv.sharding.layout import Layout


class Norm(NamedTuple):
    """A batch norm over C channels. All tensors are (C,).

    Attributes:
        weight: scale, or None.
        bias: shift, or None.
        mean: running mean, or None.
        var: running variance, or None.
        training: whether the statistics of the batch are used.
        momentum: of the running statistics; None for their plain average.
        eps: added to the variance.
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
        """Whether the call updates running statistics."""
        return self.training and self.mean is not None


def norm_of(call: BatchNormCall) -> Norm:
    """Returns the parameters of a call of batch norm."""
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


def on_own_channels(x: Tensor, norm: Norm, layout: Layout, group: RankGroup) -> Tensor:
    """Runs batch norm where this rank needs the statistics of its own channels only.

    That is in evaluation, or where channels are sharded.

    Args:
        x: this rank's shard.
        norm: the batch norm of all channels.
        layout: of the input.
        group: the ranks.
    """
    sizes = _told_sizes(layout)
    running = _settle(norm, sizes, group)
    own = _own_slice(layout, group)
    weight, bias, mean, var, training, momentum, eps = norm
    weight, bias = (
        _sliced(synced_grad(group, p), own) if p is not None else None
        for p in (weight, bias)
    )
    if norm.tracks and group.size > 1:
        mean, var, momentum = _tracked(x, norm, sizes, own, running, group)
    else:
        mean, var = _sliced(mean, own), _sliced(var, own)
    if not x.numel() and group.size > 1:
        return empty_result(x, weight, bias)
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
    norm: Norm, dtype: torch.dtype, layout: Layout, group: RankGroup
) -> tuple[Tensor, Tensor]:
    """Returns factor and summand of this rank's channels in evaluation, without autograd.

    Args:
        norm: the batch norm of all channels.
        dtype: of the shard that they are applied to.
        layout: of the input.
        group: the ranks.
    """
    _settle(norm, _told_sizes(layout), group)
    own, exact = _own_slice(layout, group), torch.promote_types(dtype, torch.float32)
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
    """Returns how many channels' statistics each rank has; empty where all have all."""
    return layout.sizes if layout.dim == 1 else ()


def _settle(
    norm: Norm, sizes: tuple[int, ...], group: RankGroup
) -> RunningStats | None:
    """Synchronizes the running statistics for this use, and returns who sends them later."""
    running = running_stats_of(group)
    if running is not None and norm.mean is not None:
        running.ensure_synced(norm.mean, sizes)
    return running


def _own_slice(layout: Layout, group: RankGroup) -> slice | None:
    """Returns this rank's channels; None if it has all."""
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
    """Returns the running statistics of this rank's channels, and the momentum for torch."""
    assert norm.mean is not None
    assert norm.var is not None
    # Autograd keeps what torch is given, and would not let anybody write to the
    # statistics until the backward.
    mean, var = _sliced(norm.mean.data, own), _sliced(norm.var.data, own)
    running = later if later is not None else RunningStats(group)
    running.note((norm.mean, norm.var), sizes, exact_of(x))
    if later is not None:
        return mean, var, norm.momentum
    if (
        x.numel()
    ):  # before anything is saved: by that a checkpoint knows how far to compute again
        with torch.no_grad():
            torch.batch_norm_update_stats(x, mean, var, norm.momentum)
    running.sync()
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
    """Returns the dtype of the statistics of an input."""
    return x.dtype if x.dtype == torch.float64 else torch.float32


def empty_result(x: Tensor, *params: Tensor | None) -> Tensor:
    """Returns an empty result where torch refuses empty inputs.

    Its backward reaches every tensor.
    """
    # The product saves a tensor, as norms of other parts do: by these a checkpoint
    # knows how far to compute again.
    return sum((p.sum() * 0 for p in params if p is not None), x * x.new_ones(()))
