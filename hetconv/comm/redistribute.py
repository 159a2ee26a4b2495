"""redistribute: the one data-movement operator, over a process group, with its adjoint.

Two verbs: ``local_slice`` a box of what this rank holds, and ``sum_overlaps``, which sends every
piece to whoever wants it and adds what arrives in rank order, so that all replicas hold
the same bits. Forward and backward are these two, swapped (cf. Hewett & Grady, "A
linear algebraic approach to model parallelism in deep learning", 2020).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hetconv import kernels
from hetconv.errors import LayoutError
from hetconv.sharding.hierarchical import HierarchicalLayout
from hetconv.sharding.layout import (
    Box,
    Boxes,
    Exchange,
    Layout,
    Move,
    ReadRegion,
    Shape,
    all_gather,
    overlaps,
)
from hetconv.signature_cache import Cache
from hetconv.torch_internals import is_view, materialized, storage_id

from . import call_tags
from .consensus import validate_together
from .exchange import NO_EXCHANGE, PendingExchange
from .rank_group import RankGroup, rank_group_of, shared_memory_channels

Slices = tuple[slice, ...]


def local_slice(local: Tensor, held: Box, wanted: Box) -> Tensor:
    """The part of ``wanted`` within what this rank holds; a view."""
    return local if held == wanted else local[wanted.within(held)]


class AssemblyPlan(NamedTuple):
    """How parts over some boxes make up the whole over another, of this ``shape``.

    ``covered``: each element is in one part; ``summands``: each is in all. ``slices``:
    in which order they are slices of an image along its channels, and nothing else.
    ``places``: where each belongs.
    """

    shape: Shape
    covered: bool
    summands: bool
    slices: tuple[int, ...]
    places: tuple[Slices, ...]

    @staticmethod
    def to_fill(boxes: Sequence[Box], whole: Box) -> AssemblyPlan:
        covered = sum(box.numel for box in boxes) == whole.numel and disjoint(boxes)
        image = len(whole.shape) == 4 and all(
            b.along(1, 0, 0) == whole.along(1, 0, 0) for b in boxes
        )
        slices = (
            sorted(range(len(boxes)), key=lambda k: boxes[k].lo)
            if covered and image
            else ()
        )
        summands = bool(boxes) and all(box == whole for box in boxes)
        return AssemblyPlan(
            whole.shape,
            covered,
            summands,
            tuple(slices),
            tuple(box.within(whole) for box in boxes),
        )


class ExchangePlan(NamedTuple):
    """A round as one rank sees it; reading it from the boxes of all takes longer than a
    small message does.

    ``sends``: to whom which part of what it holds; ``comes``: from whom pieces of which
    shape. Of what it wants, ``parts`` says by whom they are held, ``own`` which of what
    it holds itself is one, and ``fit`` how they make it up. ``moves``: whether anything
    moves, between any ranks. There are no slices of what is all.
    """

    exchange: Exchange
    sends: tuple[tuple[int, Slices | None], ...]
    comes: Mapping[int, Shape]
    parts: tuple[int, ...]
    own: Slices | None
    fit: AssemblyPlan
    moves: bool


_moves: Cache[tuple[int, int], Move] = Cache()
_sides: Cache[tuple[int, int, int], ExchangePlan] = Cache()


def move_of(src: Layout, dst: Layout | ReadRegion) -> Move:
    """Looked up by identity, as layouts are long to compare; who is known keeps its
    own, so that ids stay theirs.
    """
    key = (id(src), id(dst))
    return _moves.current.get(key) or _moves.add(key, Move(src, dst))


def exchange_plan(held: Boxes, wanted: Boxes, me: int) -> ExchangePlan:
    """Looked up as `move_of`."""
    key = (id(held), id(wanted), me)
    return _sides.current.get(key) or _sides.add(key, _side(held, wanted, me))


def _side(held: Boxes, wanted: Boxes, me: int) -> ExchangePlan:
    def of_own(box: Box) -> Slices | None:
        return None if box == held[me] else box.within(held[me])

    every = overlaps(held, wanted)
    sends = tuple((r, of_own(box)) for s, r, box in every if s == me != r)
    parts = [(s, box) for s, r, box in every if r == me]
    comes = {s: box.shape for s, box in parts if s != me}
    own = next((of_own(box) for s, box in parts if s == me), None)
    fit, moves = (
        AssemblyPlan.to_fill([box for _, box in parts], wanted[me]),
        any(s != r for s, r, _ in every),
    )
    return ExchangePlan(
        (held, wanted), sends, comes, tuple(s for s, _ in parts), own, fit, moves
    )


def start_exchange(
    group: RankGroup, local: Tensor, held: Boxes, wanted: Boxes
) -> PendingExchange:
    """Sends this rank's pieces of one round on their way; `PendingExchange.wait` gives
    the others' pieces.
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
    """The sum, over all ranks that hold it, of every element that this rank wants."""
    return start_sum(group, local, held, wanted)()


def start_sum(
    group: RankGroup, local: Tensor, held: Boxes, wanted: Boxes
) -> Callable[[], Tensor]:
    """`sum_overlaps` under way: what is returned waits for it."""
    me, side = group.rank, exchange_plan(held, wanted, group.rank)
    local = materialized(local)
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
    """Rounds under way, of which the first starts at once."""

    def __init__(self, group: RankGroup, local: Tensor, rounds: tuple[Exchange, ...]):
        self._group, self._rounds = group, rounds
        self._arrived: Callable[[], Tensor] = lambda: local
        self.advance()

    def advance(self) -> None:
        """Waits for the round under way and starts the next one, if there is one."""
        if self._rounds:
            (held, wanted), *rest = self._rounds
            self._rounds = tuple(rest)
            self._arrived = start_sum(self._group, self._arrived(), held, wanted)

    def result(self) -> Tensor:
        while self._rounds:
            self.advance()
        return self._arrived()


def assemble(parts: Sequence[Tensor], fit: AssemblyPlan, like: Tensor) -> Tensor:
    """Adds the parts, in order, into a tensor that they ``fit``; zero where there is
    none. Images are channels-last.
    """
    if fit.slices:
        return kernels.concat_channels([parts[k] for k in fit.slices])
    memory = torch.channels_last if len(fit.shape) == 4 else torch.contiguous_format
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


def disjoint(boxes: Sequence[Box]) -> bool:
    return not any(a.intersect(b).numel for i, a in enumerate(boxes) for b in boxes[:i])


def run_rounds(
    group: RankGroup,
    local: Tensor,
    rounds: tuple[Exchange, ...],
    held: Box,
    wanted: Box,
) -> Tensor:
    """All rounds in turn; with none, this rank takes its box of what it holds."""
    for sources, targets in rounds:
        local = sum_overlaps(group, local, sources, targets)
    return local if rounds else local_slice(local, held, wanted)


def embed(group: RankGroup, local: Tensor, src: Layout) -> Tensor:
    """This rank's summand of a value: what it holds in zeros, a replicated value on
    rank 0 alone.
    """
    out = local.new_zeros(src.shape)
    if src.kind != "replicated" or group.rank == 0:
        out[src.boxes[group.rank].within(Box.whole(src.shape))] = local
    return out


# A checkpoint computes a region again when backward first asks for a tensor saved
# there, and as far as the last of them. Own parts save what they happen to need; that
# every movement saves one keeps the messages of all ranks in order.
_SAVED = torch.empty(0, device="cpu")


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
        ctx.save_for_backward(_SAVED)
        # A view of it is no way out: torch does not take the strides of such a view of
        # one image for channels-last.
        return function_result(_forward(local, move, group), local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        _ = ctx.saved_tensors
        call_tags.enter_backward(ctx.call)
        back = _MovedBack.apply if torch.is_grad_enabled() else _adjoint
        g = back(grad, ctx.move, ctx.group)
        return g.contiguous() if ctx.contiguous else g, None, None


class _MovedBack(torch.autograd.Function):
    """The adjoint of a move, for a gradient that is differentiated itself. Its own
    adjoint is the move.

    The cotangent of a cotangent lies as the value does: a summand for a partial one, a
    contribution for a read region.
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
    """What the forward of an autograd function returns, so that it may be written to in place.

    PyTorch refuses to write to a view that a function returned. Of new memory, such as
    that of a message, nobody else has a view: an alias will do. A view of the memory of
    ``given`` stays one, for writes to either to be seen.
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
    """`redistribute` without its checks, for callers that agree already. May return a
    view of ``local``.
    """
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
    """(P, ...): what each rank gives, in rank order, on every rank; without autograd,
    collective.
    """
    move = all_gather(tuple(x.shape), group.size)
    return sum_overlaps(group, x.detach()[None], move.src.boxes, move.dst.boxes)


def redistribute(
    local: Tensor,
    src: Layout,
    dst: Layout | ReadRegion,
    *,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Takes a value from one layout to another layout or to a need; collective,
    differentiable, exact adjoint backward.

    ``local`` is this rank's part: its shape is that of ``src.boxes[rank]``. The result
    has that of ``dst.boxes[rank]`` and never shares memory with ``local``. Broadcast,
    scatter, gather, all-gather, all-reduce, reduce-scatter, all-to-all and halo
    exchange are cases of it. Raises `LayoutError` (bad arguments on any rank) or
    `DisagreementError` (different ones) on every rank before anything moves.
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
    """A copy if ``result`` is (a view of) one of ``sources``: what a caller gets may be
    written to.
    """
    memory = result.untyped_storage().data_ptr()
    shares = memory != 0 and any(
        memory == s.untyped_storage().data_ptr() for s in sources
    )
    return result.clone() if shares else result
