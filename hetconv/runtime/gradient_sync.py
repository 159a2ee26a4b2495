"""Sums of the gradients of parameters that several ranks use on their own shards.

Each sum runs among the ranks that hold the same elements; all others take part with
nothing.

During the forward pass, every such use takes an alias of the parameter from the active
`GradientSync`. The aliases of a bucket pass through two autograd nodes. `_StartReduce` is
created where the first of them is used. The backward pass runs the latest ready node
first, so it reaches `_StartReduce` as soon as the last contribution is there, and sends
the bucket. `_FinishReduce` is created before the forward pass, so the backward pass
reaches it last, and waits for the sums. As these are nodes of the graph, accumulation,
hooks and ``torch.autograd.grad`` see only whole gradients.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from hetconv.comm import call_tags
from hetconv.comm.exchange import to_wire_format
from hetconv.comm.exchange_plan import local_slice
from hetconv.comm.rank_group import RankGroup
from hetconv.comm.redistribute import PendingSum, function_result, sum_overlaps
from hetconv.sharding.layout import Box
from hetconv.sharding.moves import buckets
from hetconv.sharding.param_shards import (
    OverlapCell,
    ParamShards,
    Ranks,
    all_reduce_among,
)
from hetconv.torch_internals import graph_task_id

from .running_stats import RunningStats

Grads = tuple[Tensor | None, ...]


GRADIENTS = "the sum of gradients"
"""What messages of buckets say that they are of."""


class _Bucket:
    """Sums of the gradients of some parameters.

    There is one sum for each set of ranks that hold the same slices. Its message has their
    contributions one after the other. The bucket knows of the parameters themselves only
    shapes, strides and shards.

    Args:
        held: who holds what of each parameter; None for one that is whole on every rank.
        as_wired: parameters whose gradients are sent channels-last.
        before: buckets that may be under way when this one starts.
    """

    def __init__(
        self,
        group: RankGroup,
        params: Sequence[Tensor],
        held: Sequence[ParamShards | None],
        as_wired: Sequence[bool],
        before: Sequence[_Bucket] = (),
    ):
        self._group, self._before, self._held, self._as_wired = (
            group,
            tuple(before),
            held,
            as_wired,
        )
        self._formats = [(tuple(p.shape), p.stride()) for p in params]
        self._found: list[Tensor | None] = []
        self._sums: list[tuple[Ranks, list[tuple[int, Box]], PendingSum]] = []

    def start(self, grads: Grads) -> None:
        """Starts the sums of these gradients."""
        call_tags.enter(GRADIENTS)
        # Of all but the last one, which peers may not have sent yet, only sums stay in memory.
        for bucket in self._before[:-1]:
            for _, _, under_way in bucket._sums:
                under_way.result()
        for bucket in self._before[-1:]:
            for _, _, under_way in bucket._sums:
                under_way.advance()
        self._found = [
            g if g is not None and not g.numel() else None for g in grads
        ]  # what is empty is its own sum
        given = {i: g for i, g in enumerate(grads) if g is not None}
        cuts: dict[Ranks, list[tuple[int, Box]]] = {}
        for i in given:
            for box, holders in self._atoms(i):
                cuts.setdefault(holders, []).append((i, box))
        for holders, cut in cuts.items():
            if self._group.rank in holders:
                # A copy also of a single one, which autograd may have given to others too.
                own = torch.cat(
                    [
                        self._flat(local_slice(given[i], self._own(i), box), i)
                        for i, box in cut
                    ]
                )
            else:
                own = given[cut[0][0]].new_empty(0)
            rounds = all_reduce_among(
                holders, sum(box.numel for _, box in cut), self._group.size
            )
            self._sums.append((holders, cut, PendingSum(self._group, own, rounds)))

    def end(self) -> Grads:
        """Waits for the sums and returns them."""
        call_tags.enter(GRADIENTS)
        found = self._found or [None] * len(self._formats)
        for holders, cut, under_way in self._sums:
            total = under_way.result()
            if self._group.rank in holders:
                for (i, box), part in zip(
                    cut, total.split([box.numel for _, box in cut]), strict=True
                ):
                    found[i] = self._filled(
                        found[i], i, box, self._shaped(part, i, box)
                    )
        self._found, self._sums = [], []
        return tuple(found)

    def differentiable_sums(self, grads: Grads) -> Grads:
        """Returns the sum of each gradient; None where no rank has one."""
        call_tags.enter(GRADIENTS)
        everyone = range(self._group.size)
        found: list[Tensor | None] = []
        for i, g in enumerate(grads):
            held = self._held[i]
            boxes = (
                held.boxes
                if held is not None
                else tuple(self._own(i) for _ in everyone)
            )
            found.append(
                _SumAmongHolders.apply(g, boxes, self._group) if g is not None else None
            )
        return tuple(found)

    def _flat(self, gradient: Tensor, i: int) -> Tensor:
        """Returns a gradient as a vector in the order in which it is sent.

        That is the order of its memory, if the filters have the memory format that they had
        when the model was split.
        """
        return (to_wire_format(gradient) if self._as_wired[i] else gradient).flatten()

    def _shaped(self, flat: Tensor, i: int, box: Box) -> Tensor:
        if not self._as_wired[i]:
            return flat.view(box.shape)
        return flat.view(box.shape[0], *box.shape[2:], box.shape[1]).movedim(-1, 1)

    def _filled(self, found: Tensor | None, i: int, box: Box, part: Tensor) -> Tensor:
        """Writes a part into a parameter's gradient, which has the parameter's strides."""
        (shape, stride), own = self._formats[i], self._own(i)
        if box == own and part.stride() == stride:
            return part
        if found is None:
            found = torch.empty_strided(
                shape, stride, dtype=part.dtype, device=part.device
            )
        local_slice(found, own, box).copy_(part)
        return found

    def _own(self, i: int) -> Box:
        held = self._held[i]
        return (
            held.boxes[self._group.rank]
            if held is not None
            else Box.whole(self._formats[i][0])
        )

    def _atoms(self, i: int) -> tuple[OverlapCell, ...]:
        held = self._held[i]
        return (
            held.cells
            if held is not None
            else (OverlapCell(self._own(i), tuple(range(self._group.size))),)
        )


class _Aliases(torch.autograd.Function):
    """Aliases of a bucket's parameters. Subclasses define their backward."""

    @staticmethod
    def forward(ctx: Any, bucket: _Bucket, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.bucket = bucket
        ctx.set_materialize_grads(False)
        return tuple(p.view_as(p) for p in params)


class _StartReduce(_Aliases):
    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Grads:
        if (
            torch.is_grad_enabled()
        ):  # gradients that are differentiated themselves: each its own sum, at once
            return None, *ctx.bucket.differentiable_sums(grads)
        ctx.bucket.start(grads)
        return (None,) * (1 + len(grads))


class _FinishReduce(_Aliases):
    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Grads:
        if torch.is_grad_enabled():
            return None, *grads
        return None, *ctx.bucket.end()


class _SumAmongHolders(torch.autograd.Function):
    """Sum among the ranks that hold the same elements, for gradients of gradients."""

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, boxes: tuple[Box, ...], group: RankGroup
    ) -> Tensor:
        return function_result(sum_overlaps(group, g, boxes, boxes), g)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return g, None, None  # the sum is the same on all that hold it, and counts once


class GradientSync:
    """Aliases of a model's shared parameters during one forward pass.

    Args:
        held: by id, the shards of parameters that are not whole on every rank.
        as_wired: ids of parameters that are channels-last on all ranks.
        channels_last: whether the images that entered the model are channels-last.
        running: the running statistics of the model.
        owner: what opened it.
    """

    def __init__(
        self,
        group: RankGroup,
        params: Iterable[Tensor],
        held: Mapping[int, ParamShards],
        as_wired: Container[int] = (),
        *,
        channels_last: bool = False,
        running: RunningStats | None = None,
        owner: object = None,
    ):
        self.group, self.channels_last, self.running, self.owner = (
            group,
            channels_last,
            running,
            owner,
        )
        self._bucket_of: dict[int, tuple[_Bucket, dict[int, Tensor]]] = {}
        self._aliases: dict[int, Tensor] = {}
        made: list[_Bucket] = []
        trained = (
            [(p, held.get(id(p))) for p in params if p.requires_grad]
            if torch.is_grad_enabled()
            else []
        )
        sizes = [p.numel() if of is None else of.numel for p, of in trained]
        kinds = [
            (p.dtype, of.cell_holders if of is not None else None) for p, of in trained
        ]
        for indices in buckets(sizes, kinds=kinds):
            own = [trained[i][0] for i in indices]
            wired = [id(p) in as_wired for p in own]
            made.append(
                _Bucket(group, own, [trained[i][1] for i in indices], wired, made)
            )
            ended = dict(
                zip(map(id, own), _FinishReduce.apply(made[-1], *own), strict=True)
            )
            self._bucket_of |= dict.fromkeys(ended, (made[-1], ended))

    def holds(self, param: Tensor) -> bool:
        """Returns whether a tensor is a parameter of the model."""
        return id(param) in self._bucket_of

    def alias(self, param: Tensor) -> Tensor:
        """Returns the alias of a parameter in this forward pass."""
        if id(param) not in self._aliases:
            bucket, ended = self._bucket_of[id(param)]
            self._aliases |= zip(
                ended, _StartReduce.apply(bucket, *ended.values()), strict=True
            )
        return self._aliases[id(param)]


ACTIVE_SYNC: ContextVar[GradientSync | None] = ContextVar("hetconv_scope", default=None)


def in_recomputation() -> bool:
    """Returns whether a checkpoint recomputes a forward within a backward pass."""
    return graph_task_id() != -1


def running_stats_of(group: RankGroup | None) -> RunningStats | None:
    """Returns the running statistics that are synchronized at the end of the forward.

    Args:
        group: of the tensor that is normalized, if it is sharded.

    Returns:
        The statistics of the model whose forward runs; None where nothing synchronizes
        them.
    """
    scope = ACTIVE_SYNC.get()
    return (
        scope.running
        if scope is not None and group in (scope.group, None) and not in_recomputation()
        else None
    )


def synced_grad(
    group: RankGroup, param: Tensor, held: ParamShards | None = None
) -> Tensor:
    """Returns a parameter whose gradient here is one rank's contribution.

    Args:
        group: the ranks.
        param: the parameter.
        held: its shards; None if every rank has the whole.
    """
    if not (param.requires_grad and torch.is_grad_enabled()) or (
        held is not None and not held.has_overlap
    ):
        return param
    if group.size == 1:  # its contribution is the sum
        return param
    scope = ACTIVE_SYNC.get()
    if scope is None or scope.group is not group or not scope.holds(param):
        scope = GradientSync(
            group,
            [param],
            {id(param): held} if held is not None and not held.is_replicated else {},
        )
    return scope.alias(param)


def is_replica(x: Tensor) -> bool:
    """Returns whether a tensor is a parameter of the model whose forward runs.

    Within the recomputation of a checkpoint, that model's parameters count too.
    """
    scope = ACTIVE_SYNC.get()
    return scope.holds(x) if scope is not None else isinstance(x, nn.Parameter)
