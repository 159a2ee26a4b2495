"""Exchanges by NCCL that receive into the result itself: gathers and reduce-scatters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import PendingExchange, from_wire, to_wire_format, wire_shape
from .exchange_plan import ExchangePlan
from .rank_group import (
    RankGroup,
    blocking,
    count,
    no_payload,
    translate_backend_errors,
)
from .thread_time import MESSAGE_WAITS

# The second names are those of PyTorch before 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def receives_in_place(group: RankGroup, local: Tensor, plan: ExchangePlan) -> bool:
    """Returns whether an exchange is made by `start_in_place`.

    Args:
        group: The ranks.
        local: What this rank holds.
        plan: The exchange.
    """
    if group.backend != "nccl" or not plan.moves or no_payload.on:
        return False
    if local.dim() == 5:  # volumes are assembled contiguous, not as they are sent
        return False
    return plan.collective is not None or plan.spans is not None


def start_in_place(
    group: RankGroup, local: Tensor, plan: ExchangePlan
) -> Callable[[], Tensor]:
    """Starts an exchange, and returns a function that waits for its result.

    Equal parts of all ranks are one collective; others are messages in one group.

    Args:
        group: The ranks.
        local: What this rank holds.
        plan: An exchange that `receives_in_place`.
    """
    result = local.new_empty(wire_shape(plan.fit.shape))
    if plan.collective is not None:
        wait = _start_collective(group, local, plan, result)
    else:
        wait = _start_messages(group, local, plan, result)

    def arrived() -> Tensor:
        wait()
        return from_wire(result)

    return arrived


def _start_collective(
    group: RankGroup, local: Tensor, plan: ExchangePlan, result: Tensor
) -> Callable[[], Any]:
    call = _all_gather if plan.collective == "all-gather" else _reduce_scatter
    sent = to_wire_format(local).contiguous()
    count({peer: local if at is None else local[at] for peer, at in plan.sends})

    def start() -> Any:
        return call(
            result.view(-1), sent.view(-1), group=group.process_group, async_op=True
        )

    work = translate_backend_errors(group, start)

    def wait() -> None:
        with MESSAGE_WAITS:
            translate_backend_errors(group, work.wait)
        _ = sent  # which has to stay until then

    if blocking.on:
        wait()
        if local.is_cuda:
            torch.cuda.synchronize(local.device)
    return wait


def _start_messages(
    group: RankGroup, local: Tensor, plan: ExchangePlan, result: Tensor
) -> Callable[[], Any]:
    """Starts messages from all other ranks, and copies this rank's own part."""
    assert plan.spans is not None
    flat, buffers = result.view(-1), dict[int, Tensor]()
    for rank, (start, stop) in zip(plan.parts, plan.spans, strict=True):
        if rank == group.rank:
            own = to_wire_format(local if plan.own is None else local[plan.own])
            flat[start:stop].view(own.shape).copy_(own)
        else:
            shape = wire_shape(plan.comes[rank])
            buffers[rank] = flat[start:stop].view(shape)
    outgoing = {peer: local if at is None else local[at] for peer, at in plan.sends}
    return PendingExchange(group, local, outgoing, plan.comes, buffers).wait
