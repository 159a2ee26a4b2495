"""One round of messages among the ranks of a group, by shared memory or by the backend.

This module knows no geometry: pieces are tensors with a receiver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetconv.torch_internals import materialized

from . import call_tags
from .packets import PendingReceive, Shape
from .rank_group import (
    RankGroup,
    blocking,
    count,
    device_of_messages,
    no_payload,
    shared_memory_channels,
    translate_backend_errors,
)
from .shared_memory import Channel
from .thread_time import MESSAGE_WAITS

ALONE: AbstractContextManager[None] = nullcontext()
PeerWait = tuple[int | None, Callable[[], Any]]
"""Waits for a message from or to this rank, or for a collective."""
Waiting = Callable[[int | None], AbstractContextManager[None]]


def to_wire_format(x: Tensor) -> Tensor:
    """Returns images in channels-last memory format, in which all images are sent.

    Rows are then contiguous, whatever the memory format of sender and receiver.
    """
    x = materialized(x)
    return x.movedim(1, -1) if x.dim() in (4, 5) else x


def wire_shape(shape: Shape) -> Shape:
    """Returns the shape in memory order of a piece with this shape."""
    return (shape[0], *shape[2:], shape[1]) if len(shape) in (4, 5) else shape


def from_wire(x: Tensor) -> Tensor:
    """Returns images that were sent in wire format in their own order of dimensions."""
    return x.movedim(-1, 1) if x.dim() in (4, 5) else x


class PendingExchange:
    """A round of messages that was started. `wait` returns the pieces by sender.

    As a context manager it lends the pieces for the duration of the context: those from
    ranks of this host are read where the sender put them, on a CPU.

    Args:
        group: the ranks.
        like: a tensor with the dtype and device of all pieces.
        outgoing: pieces by receiver.
        incoming: shapes of pieces by sender.
        buffers: where pieces from other hosts go, by sender, in wire format; new memory
            by default.
    """

    def __init__(
        self,
        group: RankGroup,
        like: Tensor,
        outgoing: Mapping[int, Tensor],
        incoming: Mapping[int, tuple[int, ...]],
        buffers: Mapping[int, Tensor] | None = None,
    ):
        self._group, self._from = group, tuple(incoming)
        self._near, self._coming = (
            shared_memory_channels(group),
            dict[int, PendingReceive](),
        )
        self._far: _Far | _Silence | None = None
        several_hosts = len(self._near) < group.size - 1
        self._stalls = (
            group.deadlock_watch
            if several_hosts and group.backend == "gloo" and not no_payload.on
            else None
        )
        if no_payload.on:
            self._far = _Silence(like, incoming)
            return
        count(outgoing)
        translate_backend_errors(
            group, lambda: self._begin(like, outgoing, incoming, buffers or {})
        )
        if blocking.on:
            self.wait()
            if like.device.type == "cuda":
                torch.cuda.synchronize(like.device)

    def _begin(
        self,
        like: Tensor,
        outgoing: Mapping[int, Tensor],
        incoming: Mapping[int, Shape],
        buffers: Mapping[int, Tensor],
    ) -> None:
        step = self._group.agreements.count
        tag, self._tag = call_tags.tag(step), call_tags.short_tag(step)
        for peer, channel in self._near.items():
            if peer in outgoing:
                channel.send(to_wire_format(outgoing[peer]), tag)
            if peer in incoming:
                shape = wire_shape(incoming[peer])
                buffer = None if like.device.type == "cpu" else like.new_empty(shape)
                self._coming[peer] = channel.post_receive(
                    like.dtype, shape, buffer, tag
                )
        if len(self._near) < self._group.size - 1:
            sent = {
                peer: piece
                for peer, piece in outgoing.items()
                if peer not in self._near
            }
            coming = {p: s for p, s in incoming.items() if p not in self._near}
            self._far = _Far(self._group, like, sent, coming, buffers, self._tag)
        if self._stalls is not None:
            self._stalls.opened(self._tag)

    def wait(self) -> dict[int, Tensor]:
        """Waits for all pieces and returns them by sender."""
        return translate_backend_errors(
            self._group, lambda: self._arrived(Channel.take)
        )

    def __enter__(self) -> dict[int, Tensor]:
        try:
            return translate_backend_errors(
                self._group, lambda: self._arrived(Channel.borrow)
            )
        except BaseException:
            self._give_back()
            raise

    def __exit__(self, *_: object) -> None:
        translate_backend_errors(self._group, self._give_back)

    def _arrived(
        self, how: Callable[[Channel, PendingReceive], Tensor]
    ) -> dict[int, Tensor]:
        arrived = self._far.arrived(self._waiting) if self._far is not None else {}
        for p in self._coming:
            with self._waiting(p):
                arrived[p] = how(self._near[p], self._coming[p])
        if self._stalls is not None:
            self._stalls.closed(self._tag)
        return {p: from_wire(arrived[p]) for p in self._from}

    def _waiting(self, peer: int | None) -> AbstractContextManager[None]:
        """Context in which this rank waits for another one, or in a collective."""
        return ALONE if self._stalls is None else self._stalls.waiting(self._tag, peer)

    def _give_back(self) -> None:
        for peer in self._coming:
            self._near[peer].release()


class _Far:
    """The pieces of an exchange that the backend carries; gloo's are in host memory."""

    def __init__(
        self,
        group: RankGroup,
        like: Tensor,
        outgoing: Mapping[int, Tensor],
        incoming: Mapping[int, Shape],
        buffers: Mapping[int, Tensor],
        tag: int,
    ):
        own = (
            group.backend == "gloo"
        )  # NCCL knows no tags, and its works wait for all of them
        self._device, memory = like.device, device_of_messages(group, like.device)
        # To be kept until it is sent.
        self._sent = {
            peer: to_wire_format(t).contiguous().to(memory)
            for peer, t in outgoing.items()
        }
        self._buffers = {
            peer: buffers[peer]
            if peer in buffers
            else like.new_empty(wire_shape(s), device=memory)
            for peer, s in incoming.items()
        }
        op = partial(dist.P2POp, group=group.process_group, tag=tag if own else 0)
        ops = [op(dist.isend, t, group_peer=peer) for peer, t in self._sent.items()]
        ops += [op(dist.irecv, t, group_peer=peer) for peer, t in self._buffers.items()]
        works = dist.batch_isend_irecv(ops) if ops else []
        peers: list[int | None] = (
            [*self._sent, *self._buffers] if own else [None] * len(works)
        )
        self._waits: list[PeerWait] = [
            (peer, work.wait) for peer, work in zip(peers, works, strict=True)
        ]

    def arrived(self, waiting: Waiting) -> dict[int, Tensor]:
        """Returns the pieces by sender, in wire format."""
        for peer, wait in self._waits:
            with waiting(peer), MESSAGE_WAITS:
                wait()
        self._waits, self._sent = [], {}
        return {peer: t.to(self._device) for peer, t in self._buffers.items()}


class _Silence:
    """Replaces the pieces that would arrive while all ranks are in `no_payload`."""

    def __init__(self, like: Tensor, incoming: Mapping[int, Shape]):
        self._lying = {
            p: _zeros(wire_shape(shape), like.dtype, like.device)
            for p, shape in incoming.items()
        }

    def arrived(self, waiting: Waiting) -> dict[int, Tensor]:
        """Returns zeros in the place of each piece."""
        return {
            p: zeros.data for p, zeros in self._lying.items()
        }  # by autograd's count of writes each is another one


@lru_cache(1024)
def _zeros(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


class _NoExchange(PendingExchange):
    """An exchange in which no rank sends anything."""

    def __init__(self) -> None:
        pass

    def wait(self) -> dict[int, Tensor]:
        """Returns no pieces."""
        return {}

    def __enter__(self) -> dict[int, Tensor]:
        return {}

    def __exit__(self, *_: object) -> None:
        pass


NO_EXCHANGE = _NoExchange()
