"""The data-movement operator, with its adjoint.

It consists of two operations: `local_slice` takes a box of what this rank holds;
`sum_overlaps` sends every piece to the ranks that want it, and adds what arrives in rank
order (NCCL's reduce-scatter in its own), so that all replicas have the same bits.
Forward and backward are these two, swapped (cf. Hewett & Grady, "A linear algebraic
approach to model parallelism in deep learning", 2020).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetconv import kernels
from hetconv.errors import LayoutError
from hetconv.sharding.hierarchical import HierarchicalLayout
from hetconv.sharding.layout import Box, Boxes, Layout, ReadRegion
from hetconv.sharding.moves import Exchange, Move, all_gather
from hetconv.torch_internals import is_view, materialized, storage_id

from . import call_tags
from .collectives import receives_in_place, start_in_place
from .consensus import validate_together
from .exchange import NO_EXCHANGE, PendingExchange
from .exchange_plan import (
    AssemblyPlan,
    ExchangePlan,
    exchange_plan,
    local_slice,
    move_of,
)
from .rank_group import RankGroup, rank_group_of, shared_memory_channels


def start_exchange(
    group: RankGroup, local: Tensor, held: Boxes, wanted: Boxes
) -> PendingExchange:
    """Sends this rank's pieces; `PendingExchange.wait` returns those of the others.

    Args:
        group: the ranks.
        local: what this rank holds.
        held: box that each rank holds.
        wanted: box that each rank wants.
    """
    return _started(group, local, exchange_plan(held, wanted, group.rank))


def _started(group: RankGroup, local: Tensor, side: ExchangePlan) -> PendingExchange:
    if not side.moves:
        return NO_EXCHANGE
    outgoing = {r: local if at is None else local[at] for r, at in side.sends}
    in_place = (
        {} if local.is_cuda else shared_memory_channels(group)
    )  # a channel takes pieces of a CPU from where they lie
    if local.dim() == 4 and (strewn := [r for r in outgoing if r not in in_place]):
        # All in one launch; `PendingExchange` then finds them as they travel.
        packed = kernels.pack([outgoing[r] for r in strewn])
        outgoing |= {r: t.movedim(-1, 1) for r, t in zip(strewn, packed, strict=True)}
    return PendingExchange(group, local, outgoing, side.comes)


def sum_overlaps(group: RankGroup, local: Tensor, held: Boxes, wanted: Boxes) -> Tensor:
    """Returns, for each element that this rank wants, the sum over all ranks that hold it.

    Args:
        group: the ranks.
        local: what this rank holds.
        held: box that each rank holds.
        wanted: box that each rank wants.
    """
    return start_sum(group, local, held, wanted)()


def start_sum(
    group: RankGroup, local: Tensor, held: Boxes, wanted: Boxes
) -> Callable[[], Tensor]:
    """Starts `sum_overlaps`, and returns a function that waits for its result."""
    me, side = group.rank, exchange_plan(held, wanted, group.rank)
    local = materialized(local)
    if receives_in_place(group, local, side):
        return start_in_place(group, local, side)
    under_way, parts, own = _started(group, local, side), side.parts, side.own

    def arrived() -> Tensor:
        mine = local if own is None else local[own]
        if len(parts) == 1 and side.fit.summands:
            got = under_way.wait()  # also until what it sends is sent
            return mine if parts[0] == me else got[parts[0]]
        with under_way as got:
            return assemble(
                [got[s] if s != me else mine for s in parts], side.fit, local
            )

    return arrived


class PendingSum:
    """Exchanges that run one after the other, of which the first has started."""

    def __init__(self, group: RankGroup, local: Tensor, rounds: tuple[Exchange, ...]):
        self._group, self._rounds = group, rounds
        self._arrived: Callable[[], Tensor] = lambda: local
        self.advance()

    def advance(self) -> None:
        """Waits for the current exchange and starts the next one, if there is one."""
        if self._rounds:
            (held, wanted), *rest = self._rounds
            self._rounds = tuple(rest)
            self._arrived = start_sum(self._group, self._arrived(), held, wanted)

    def result(self) -> Tensor:
        """Waits for the remaining exchanges and returns the sum.

        Nothing but the sum stays in memory.
        """
        while self._rounds:
            self.advance()
        total = self._arrived()
        self._arrived = lambda: total
        return total


def assemble(parts: Sequence[Tensor], fit: AssemblyPlan, like: Tensor) -> Tensor:
    """Adds pieces, in order, into a new tensor; elements without a piece are zero.

    Args:
        parts: the pieces. Images are channels-last.
        fit: where they belong.
        like: a tensor with the dtype and device of the result.

    Returns:
        The tensor. Images have the memory format of ``like`` on a CPU, so that all ranks
        compute in that of the program, and are channels-last elsewhere and if channels
        are concatenated.
    """
    if fit.slices:
        return kernels.concat_channels([parts[k] for k in fit.slices])
    memory = torch.contiguous_format
    if like.is_cuda:
        memory = torch.channels_last if len(fit.shape) == 4 else memory
    elif kernels.is_channels_last(like):
        memory = kernels.CHANNELS_LAST.get(len(fit.shape), memory)
    out = torch.empty(
        fit.shape, dtype=like.dtype, device=like.device, memory_format=memory
    )
    if fit.summands and len(parts) > 1:  # as sums of gradients have them
        torch.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            out.add_(part)
        return out
    if not fit.covered:
        out.zero_()
    views = [out[place] for place in fit.places]
    if fit.covered and out.dim() == 4:
        kernels.unpack(parts, views)
        return out
    for view, part in zip(views, parts, strict=True):
        view.copy_(part) if fit.covered else view.add_(part)
    return out


def run_rounds(
    group: RankGroup,
    local: Tensor,
    rounds: tuple[Exchange, ...],
    held: Box,
    wanted: Box,
) -> Tensor:
    """Runs all exchanges of a move.

    Args:
        group: the ranks.
        local: what this rank holds.
        rounds: the exchanges; if there are none, this rank takes its box of ``local``.
        held: box of ``local``.
        wanted: box of the result.
    """
    for sources, targets in rounds:
        local = sum_overlaps(group, local, sources, targets)
    return local if rounds else local_slice(local, held, wanted)


def embed(group: RankGroup, local: Tensor, src: Layout) -> Tensor:
    """Returns this rank's summand of a value: its shard within zeros.

    A replicated value is rank 0's summand; the other ranks' summands are zero.
    """
    out = local.new_zeros(src.shape)
    if src.kind != "replicated" or group.rank == 0:
        out[src.boxes[group.rank].slices_in(Box.whole(src.shape))] = local
    return out


# A checkpoint computes a region again when backward first asks for a tensor saved
# there, and as far as the last of them. Own parts save what they happen to need; that
# every movement saves one keeps the messages of all ranks in order.
SAVED = torch.empty(0, device="cpu")


def _forward(local: Tensor, move: Move, group: RankGroup) -> Tensor:
    if move.embeds:
        return embed(group, local, move.src)
    return run_rounds(
        group,
        local,
        move.forward,
        move.src.boxes[group.rank],
        move.dst.boxes[group.rank],
    )


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, move: Move, group: RankGroup) -> Tensor:
        ctx.move, ctx.group, ctx.call = move, group, call_tags.forward_call()
        # The gradient of a plain tensor goes on to PyTorch's operators, some of which
        # take channels-last gradients of contiguous tensors wrongly (instance norm,
        # PyTorch 2.13).
        ctx.contiguous = move.src.kind == "replicated" and local.is_contiguous()
        ctx.save_for_backward(SAVED)
        # A view of it is no way out: torch does not take the strides of such a view of
        # one image for channels-last.
        return function_result(_forward(local, move, group), local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        _ = ctx.saved_tensors
        call_tags.enter_backward(ctx.call)
        g = moved_back(grad, ctx.move, ctx.group)
        return g.contiguous() if ctx.contiguous else g, None, None


def moved_back(grad: Tensor, move: Move, group: RankGroup) -> Tensor:
    """Returns the adjoint of a move; differentiable.

    Args:
        grad: gradient of what this rank received.
        move: the move.
        group: the ranks.
    """
    if torch.is_grad_enabled():
        return _MovedBack.apply(grad, move, group)  # type: ignore[no-any-return]
    return _adjoint(grad, move, group)


class _MovedBack(torch.autograd.Function):
    """Adjoint of a move, for a gradient that is differentiated itself.

    Its own adjoint is the move. The cotangent of a cotangent has the layout of the value: a
    summand for a partial value, a contribution for a read region.
    """

    @staticmethod
    def forward(ctx: Any, grad: Tensor, move: Move, group: RankGroup) -> Tensor:
        ctx.move, ctx.group, ctx.call = move, group, call_tags.forward_call()
        return function_result(_adjoint(grad, move, group), grad)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        call_tags.enter_backward(ctx.call)
        return _Moved.apply(g, ctx.move, ctx.group), None, None


def function_result(result: Tensor, given: Tensor) -> Tensor:
    """Returns a result of an autograd function that may be written to in place.

    PyTorch refuses writes to a view that a function returned. New memory, such as that of a
    message, has no other view, so that an alias of it is returned. A view of ``given``
    stays one, so that both see writes to either.
    """
    if result is given:
        return result.detach()
    if is_view(result) and storage_id(result) != storage_id(given):
        return result.data
    return result


def _adjoint(grad: Tensor, move: Move, group: RankGroup) -> Tensor:
    return run_rounds(
        group,
        grad,
        move.adjoint,
        move.dst.boxes[group.rank],
        move.src.boxes[group.rank],
    )


def redistribute_local(
    group: RankGroup, local: Tensor, src: Layout, dst: Layout | ReadRegion
) -> Tensor:
    """Redistributes without the checks of `redistribute`. May return a view of ``local``."""
    kind = (
        dst.kind if isinstance(dst, Layout) else "sharded"
    )  # a need of every rank's own box, and of nothing else
    if src.kind == kind and src.boxes == dst.boxes:
        return local
    move = move_of(src, dst)
    return (
        _Moved.apply(local, move, group)
        if torch.is_grad_enabled()
        else _forward(local, move, group)
    )


def all_gather_tensors(group: RankGroup, x: Tensor) -> Tensor:
    """Returns a tensor of each rank, stacked as (P, ...). Collective, without autograd."""
    move = all_gather(tuple(x.shape), group.size)
    return sum_overlaps(group, x.detach()[None], move.src.boxes, move.dst.boxes)


def redistribute(
    local: Tensor,
    src: Layout,
    dst: Layout | ReadRegion,
    *,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Moves a value from one layout to another. Collective and differentiable.

    Broadcast, scatter, gather, all-gather, all-reduce, reduce-scatter, all-to-all and halo
    exchange are special cases. The backward pass is the exact adjoint.

    Args:
        local: this rank's part, with the shape of ``src.boxes[rank]``.
        src: the layout of the value.
        dst: the layout that it is moved to, or the region that each rank reads.
        group: the ranks; None for all.

    Returns:
        This rank's part of the result, with the shape of ``dst.boxes[rank]``. It never
        shares memory with ``local``.

    Raises:
        LayoutError: arguments are wrong on any rank. Raised on every rank before anything
            is sent.
        DisagreementError: arguments differ between ranks. Raised likewise.
    """
    rank_group = rank_group_of(group)

    def check() -> None:
        if src.world != rank_group.size or dst.world != rank_group.size:
            raise LayoutError(
                f"layouts for {src.world} and {dst.world} ranks were given to a group of "
                f"{rank_group.size}"
            )
        if src.shape != dst.shape:
            raise LayoutError(
                f"a value of shape {src.shape} cannot be moved to a layout of shape {dst.shape}"
            )
        if (
            isinstance(dst, HierarchicalLayout)
            and dst.kind == "partial"
            and (src.kind, src.boxes) != (dst.kind, dst.boxes)
        ):
            raise LayoutError(
                f"a value cannot be moved to summands in each of nodes {dst.nodes}; give a "
                "sharded one"
            )
        if tuple(local.shape) != src.boxes[rank_group.rank].shape:
            raise LayoutError(
                f"the local tensor has shape {tuple(local.shape)}, but rank "
                f"{rank_group.rank}'s box "
                "in the source layout has "
                f"{src.boxes[rank_group.rank].shape}; pass the local part"
            )

    validate_together(
        rank_group,
        "redistribute",
        check,
        lambda _: f"{local.dtype} {local.requires_grad} {src} -> {dst}",
    )
    local = materialized(local)
    return clone_if_aliased(redistribute_local(rank_group, local, src, dst), local)


def clone_if_aliased(result: Tensor, *sources: Tensor) -> Tensor:
    """Returns a copy of ``result`` if it is one of ``sources`` or a view of one.

    What a caller gets may then be written to.
    """
    memory = result.untyped_storage().data_ptr()
    shares = memory != 0 and any(
        memory == s.untyped_storage().data_ptr() for s in sources
    )
    return result.clone() if shares else result
