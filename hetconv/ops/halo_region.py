"""All rows that an operator reads in one buffer: own rows, halos, and padding around them.

Where filters are large beside the image, a convolution of the buffer is faster than
separate ones of own rows and halos (see `hetconv.ops.halo_exchange`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hetconv.comm import call_tags
from hetconv.comm.exchange_plan import move_of
from hetconv.comm.rank_group import RankGroup
from hetconv.comm.redistribute import SAVED, moved_back, start_exchange
from hetconv.kernels import norms
from hetconv.torch_internals import materialized

from .conv_geometry import PaddedRows
from .halo_exchange import narrow


def halo_region(
    x: Tensor,
    region: PaddedRows,
    group: RankGroup,
    fill: float = 0.0,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    """Returns the buffer of a region; collective and differentiable.

    Args:
        x: This rank's shard of the input.
        region: What the buffer has.
        group: The ranks, which exchange halos.
        fill: Value of the padding.
        memory_format: Of the buffer; None for that of ``x``.
    """
    if not torch.is_grad_enabled():
        return _fetched(x, region, group, fill, memory_format)
    y: Tensor = _HaloRegion.apply(x, region, group, fill, memory_format)
    return y


class _HaloRegion(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        region: PaddedRows,
        group: RankGroup,
        fill: float,
        memory_format: torch.memory_format | None,
    ) -> Tensor:
        ctx.region, ctx.group, ctx.call = region, group, call_tags.forward_call()
        ctx.save_for_backward(SAVED)
        return _fetched(x, region, group, fill, memory_format)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        call_tags.enter_backward(ctx.call)
        region, group = ctx.region, ctx.group
        rows = narrow(materialized(g), region.dim, region.rows)
        if torch.is_grad_enabled():
            gx = moved_back(rows, move_of(region.src, region.read), group)
            return gx, None, None, None, None
        exchange = start_exchange(group, rows, region.read.boxes, region.held)
        gx = gradient_of_own(rows, region)
        if not gx.is_contiguous(memory_format=norms.memory_format(gx)):
            gx = gx.clone()  # torch's operators are slow where a tensor has gaps
        with exchange as lent:
            for peer, piece in lent.items():
                narrow(gx, region.dim, region.lent(peer)).add_(piece)
        return gx, None, None, None, None


def _fetched(
    x: Tensor,
    region: PaddedRows,
    group: RankGroup,
    fill: float,
    memory_format: torch.memory_format | None,
) -> Tensor:
    """Returns the buffer of a region."""
    x = norms.as_images(x)
    exchange = start_exchange(group, x, region.held, region.read.boxes)
    y = empty_buffer(x, region, fill, memory_format)
    of_own, own = region.own
    narrow(y, region.dim, own).copy_(narrow(x, region.dim, of_own))
    with exchange as halos:
        for peer, halo in halos.items():
            narrow(y, region.dim, region.halo(peer)).copy_(halo)
    return y


def empty_buffer(
    x: Tensor,
    region: PaddedRows,
    fill: float = 0.0,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    """Returns the buffer of a region with only its padding.

    Args:
        x: A tensor with the data type and device of the buffer.
        region: What the buffer has.
        fill: Value of the padding.
        memory_format: Of the buffer; None for that of ``x``.
    """
    memory = memory_format or norms.memory_format(x)
    y = torch.empty(region.shape, dtype=x.dtype, device=x.device, memory_format=memory)
    fill_padding(y, region, fill)
    return y


def fill_padding(y: Tensor, region: PaddedRows, fill: float = 0.0) -> None:
    """Sets the rows of a buffer that are padding."""
    before, after = region.rows
    for span in ((0, before), (after, region.shape[region.dim])):
        if span[0] < span[1]:
            narrow(y, region.dim, span).fill_(fill)


def gradient_of_own(g: Tensor, region: PaddedRows) -> Tensor:
    """Returns the gradient of this rank's shard, without what other ranks add.

    Args:
        g: Gradient of the rows that this rank read, which is written to.
        region: What this rank read.
    """
    (lo, hi), first = region.own[1], region.rows[0]
    part, of_own = narrow(g, region.dim, (lo - first, hi - first)), region.own[0]
    shape = region.held[region.rank].shape
    if part.shape != shape:
        memory = norms.memory_format(g)
        whole = torch.empty(
            shape, dtype=g.dtype, device=g.device, memory_format=memory
        ).zero_()
        narrow(whole, region.dim, of_own).copy_(part)
        return whole
    return part
