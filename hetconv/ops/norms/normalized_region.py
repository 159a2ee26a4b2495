"""All rows that a convolution reads, normalized, with one round of messages.

Ranks send their moments and their boundary rows, not yet normalized, as one message;
the gradients of halos and the sums that the gradient of a norm needs travel together as
well.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hetconv.comm import call_tags
from hetconv.comm.exchange_plan import exchange_plan
from hetconv.comm.packed_exchange import Part, exchange_together
from hetconv.comm.redistribute import assemble, redistribute_local, run_rounds
from hetconv.kernels import norms
from hetconv.ops.conv_geometry import Region
from hetconv.ops.halo_exchange import narrow
from hetconv.ops.halo_region import empty_buffer, fill_padding, gradient_of_own
from hetconv.runtime.inputs import differentiable_gradients
from hetconv.sharding.layout import Box
from hetconv.torch_internals import materialized

from .group_norm import (
    GroupStatistics,
    Known,
    differentiable,
    parameter_gradients,
)
from .statistics import bias_like, of_peers

Numbers = tuple[
    Tensor, Tensor, Tensor | None, Tensor | None, float, norms.Activation | None
]


class NormCall:
    """A call of a norm whose result is not computed yet.

    Attributes:
        x: This rank's shard (n, c, ...) of the input.
        weight: (c,), or None.
        bias: (c,), or None.
        statistics: How ranks find the statistics.
        known: Mean and variance (n, c), once ranks have exchanged their moments.
        graded: Whether autograd was on.
    """

    def __init__(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: GroupStatistics,
    ):
        self.x, self.weight, self.bias = x, weight, bias
        self.statistics = statistics
        self.known: Known | None = None
        self.graded = torch.is_grad_enabled()


class NormalizedRegion(torch.autograd.Function):
    """Fetches halos and moments in one round, and normalizes own rows and halos.

    The gradients of halos and the sums that the gradient of a norm needs travel
    together as well. A rank's sums include the halos that it read.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        call: NormCall,
        region: Region,
    ) -> Tensor:
        """Returns the buffer of a region; see `hetconv.ops.conv_geometry.Region`."""
        x = norms.as_images(x)
        y, halos = normalized_rows(x, weight, bias, call, region)
        assert call.known is not None
        ctx.save_for_backward(x, weight, *call.known, *halos.values())
        ctx.statistics, ctx.region, ctx.peers = call.statistics, region, tuple(halos)
        ctx.bias_dtype = bias.dtype if bias is not None else None
        ctx.call = call_tags.forward_call()
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Exchanges sums and gradients of halos in one round, and returns the gradients."""
        x, weight, mean, var, *halos = ctx.saved_tensors
        call_tags.enter_backward(ctx.call)
        statistics, region = ctx.statistics, ctx.region
        if torch.is_grad_enabled():
            compute = partial(_differentiable, statistics, region)
            wanted = ctx.needs_input_grad[2]
            inputs = (x, weight, bias_like(x, x.shape[1], ctx.bias_dtype, wanted))
            return *differentiable_gradients(compute, inputs, g), None, None
        g, invstd = materialized(g), (var + statistics.eps).rsqrt_()
        rows = narrow(g, region.dim, region.rows)
        own_g = norms.in_format_of(x, gradient_of_own(rows, region))
        local = norms.sums(own_g, x, mean, invstd)
        for peer, halo in zip(ctx.peers, halos, strict=True):
            piece = narrow(g, region.dim, region.halo(peer))
            local += norms.sums(piece, halo, mean, invstd)
        gain = None if weight is None else weight.to(mean.dtype)
        own = statistics.own_sums(local, gain)
        total, lent = _summed(own, rows, statistics, region)
        factors = statistics.gradient_factors(total, mean, invstd, gain)
        gx = norms.combination(x, own_g, *factors)
        of_g = factors[1].view(*mean.shape, *(1,) * (x.dim() - 2))
        for peer, piece in lent.items():
            narrow(gx, region.dim, region.lent(peer)).add_(piece * of_g)
        return gx, *parameter_gradients(ctx, local, weight), None, None


def normalized_rows(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    call: NormCall,
    region: Region,
    activation: norms.Activation | None = None,
) -> tuple[Tensor, dict[int, Tensor]]:
    """Returns the buffer of a region, and the halos before they were normalized.

    Args:
        x: This rank's shard, in one of both memory formats.
        weight: (c,), or None.
        bias: (c,), or None.
        call: The norm.
        region: What the buffer has.
        activation: What is applied to the normalized rows, or None.
    """
    halos = _exchanged(x, call, region)
    assert call.known is not None
    numbers = (*call.known, weight, bias, call.statistics.eps, activation)
    return _filled(x, halos, numbers, region), halos


def _exchanged(x: Tensor, call: NormCall, region: Region) -> dict[int, Tensor]:
    """Exchanges boundary rows, and moments unless they are known; returns the halos."""
    statistics, group = call.statistics, call.statistics.group
    rows = Part(x, region.held, region.read.boxes)
    if call.known is not None:
        (halos,) = exchange_together(group, [rows])
        return halos
    own = statistics.own_moments(x)
    (move,) = statistics.sharding.forward_moves
    (round_of_moments,) = move.forward
    received, halos = exchange_together(group, [Part(own, *round_of_moments), rows])
    each = of_peers(own, received, round_of_moments, group.rank)
    call.known = statistics.of_channels(each, x.shape[1])
    return halos


def _summed(
    own: Tensor, g: Tensor, statistics: GroupStatistics, region: Region
) -> tuple[Tensor, dict[int, Tensor]]:
    """Adds up sums among ranks, and returns the gradients of halos to their owners.

    Args:
        own: (2, n G): this rank's sums.
        g: Gradient of all rows of the input that this rank read.
        statistics: How ranks share the norm's statistics.
        region: What this rank read.

    Returns:
        The sums of all ranks, and the gradients of this rank's rows, by reader.
    """
    group, (move,) = statistics.group, statistics.sharding.backward_moves
    first, *rest = move.forward
    halos = Part(g, region.read.boxes, region.held)
    received, lent = exchange_together(group, [Part(own, *first), halos])
    plan = exchange_plan(*first, group.rank)
    mine = own if plan.own is None else own[plan.own]
    parts = [received.get(peer, mine) for peer in plan.parts]
    total = assemble(parts, plan.fit, own)
    whole = Box.whole(tuple(own.shape))
    return (
        run_rounds(group, total, tuple(rest), whole, whole) if rest else total
    ), lent


def _filled(
    x: Tensor, halos: dict[int, Tensor], numbers: Numbers, region: Region
) -> Tensor:
    """Returns the buffer with all rows, normalized, and zeros around them.

    Args:
        x: This rank's shard.
        halos: Rows of other ranks, by holder.
        numbers: Mean, variance, weight, bias, epsilon and activation.
        region: What the buffer is to have.
    """
    dim, (of_own, own) = region.dim, region.own
    y = empty_buffer(x, region)
    pieces = [(own, narrow(x, dim, of_own))]
    pieces += [(region.halo(peer), halo) for peer, halo in halos.items()]
    if not x.is_cpu or (dim == 2 and not x.is_contiguous()):
        for place, piece in pieces:
            norms.normalize_to(narrow(y, dim, place), piece, *numbers)
        return y
    # Slices of rows are not dense: all is normalized in place, and then the zeros set.
    for place, piece in pieces:
        narrow(y, dim, place).copy_(piece)
    norms.normalize_to(y, y, *numbers)
    fill_padding(y, region)
    return y


def _differentiable(
    statistics: GroupStatistics,
    region: Region,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor,
) -> Tensor:
    """Computes `NormalizedRegion` by operators that autograd can differentiate again."""
    y = differentiable(statistics, x, weight, bias)
    rows = redistribute_local(
        statistics.group, y, statistics.sharding.output, region.read
    )
    return F.pad(rows, (*(0, 0) * (x.dim() - 1 - region.dim), *region.padding))
