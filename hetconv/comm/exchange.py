"""One round of messages among the ranks of a team: through memory on one host, and by
the backend. No geometry here.
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
from .rank_group import Team, answered, count, device_of_messages, in_turn, near, silent
from .shared_memory import Channel, Coming, Shape

ALONE: AbstractContextManager[None] = nullcontext()
PeerWait = tuple[int | None, Callable[[], Any]]
"""Waits for a message from or to this rank, or for a collective."""
Waiting = Callable[[int | None], AbstractContextManager[None]]


def as_wire(x: Tensor) -> Tensor:
    """Images travel channels-last, whatever the memory format on either side: rows are
    then one run of memory.
    """
    x = materialized(x)
    return x.movedim(1, -1) if x.dim() in (4, 5) else x


def _wire_shape(shape: Shape) -> Shape:
    """Of what is to be of this shape, as it travels."""
    return (shape[0], *shape[2:], shape[1]) if len(shape) in (4, 5) else shape


def _from_wire(x: Tensor) -> Tensor:
    return x.movedim(-1, 1) if x.dim() in (4, 5) else x


class Round:
    """One round of messages under way. `wait` gives what came, by sender.

    As a context it lends that, to be read while the context lasts: pieces of this host
    stay where they lie, if they are for a CPU.
    """

    def __init__(
        self,
        team: Team,
        like: Tensor,
        outgoing: Mapping[int, Tensor],
        incoming: Mapping[int, tuple[int, ...]],
    ):
        self._team, self._from = team, tuple(incoming)
        self._near, self._coming = near(team), dict[int, Coming]()
        self._far: _Far | _Silence | None = None
        several_hosts = len(self._near) < team.size - 1
        self._stalls = (
            team.stalls
            if several_hosts and team.backend == "gloo" and not silent.on
            else None
        )
        if silent.on:
            self._far = _Silence(like, incoming)
            return
        count(outgoing)
        answered(team, lambda: self._begin(like, outgoing, incoming))
        if in_turn.on:
            self.wait()
            if like.device.type == "cuda":
                torch.cuda.synchronize(like.device)

    def _begin(
        self,
        like: Tensor,
        outgoing: Mapping[int, Tensor],
        incoming: Mapping[int, Shape],
    ) -> None:
        step = self._team.agreements.count
        tag, self._tag = call_tags.tag(step), call_tags.short_tag(step)
        for peer, channel in self._near.items():
            if peer in outgoing:
                channel.send(as_wire(outgoing[peer]), tag)
            if peer in incoming:
                shape = _wire_shape(incoming[peer])
                buffer = None if like.device.type == "cpu" else like.new_empty(shape)
                self._coming[peer] = channel.announce(like.dtype, shape, buffer, tag)
        if len(self._near) < self._team.size - 1:
            sent = {
                peer: piece
                for peer, piece in outgoing.items()
                if peer not in self._near
            }
            coming = {p: s for p, s in incoming.items() if p not in self._near}
            self._far = _Far(self._team, like, sent, coming, self._tag)
        if self._stalls is not None:
            self._stalls.opened(self._tag)

    def wait(self) -> dict[int, Tensor]:
        return answered(self._team, lambda: self._arrived(Channel.take))

    def __enter__(self) -> dict[int, Tensor]:
        try:
            return answered(self._team, lambda: self._arrived(Channel.lend))
        except BaseException:
            self._give_back()
            raise

    def __exit__(self, *_: object) -> None:
        answered(self._team, self._give_back)

    def _arrived(self, how: Callable[[Channel, Coming], Tensor]) -> dict[int, Tensor]:
        arrived = self._far.arrived(self._waiting) if self._far is not None else {}
        for p in self._coming:
            with self._waiting(p):
                arrived[p] = how(self._near[p], self._coming[p])
        if self._stalls is not None:
            self._stalls.closed(self._tag)
        return {p: _from_wire(arrived[p]) for p in self._from}

    def _waiting(self, peer: int | None) -> AbstractContextManager[None]:
        """While this rank waits for another one, or in a collective."""
        return ALONE if self._stalls is None else self._stalls.waiting(self._tag, peer)

    def _give_back(self) -> None:
        for peer in self._coming:
            self._near[peer].give_back()


class _Far:
    """Those pieces of a round that the backend carries; gloo from and into the memory
    of the host.
    """

    def __init__(
        self,
        team: Team,
        like: Tensor,
        outgoing: Mapping[int, Tensor],
        incoming: Mapping[int, Shape],
        tag: int,
    ):
        own = (
            team.backend == "gloo"
        )  # NCCL knows no tags, and its works wait for all of them
        self._device, memory = like.device, device_of_messages(team, like.device)
        # To be kept until it is sent.
        self._sent = {
            peer: as_wire(t).contiguous().to(memory) for peer, t in outgoing.items()
        }
        self._buffers = {
            peer: like.new_empty(_wire_shape(s), device=memory)
            for peer, s in incoming.items()
        }
        op = partial(dist.P2POp, group=team.group, tag=tag if own else 0)
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
        """As it travelled, by sender."""
        for peer, wait in self._waits:
            with waiting(peer):
                wait()
        self._waits, self._sent = [], {}
        return {peer: t.to(self._device) for peer, t in self._buffers.items()}


class _Silence:
    """In the place of pieces that would come while all are `silent`."""

    def __init__(self, like: Tensor, incoming: Mapping[int, Shape]):
        self._lying = {
            p: _zeros(_wire_shape(shape), like.dtype, like.device)
            for p, shape in incoming.items()
        }

    def arrived(self, waiting: Waiting) -> dict[int, Tensor]:
        return {
            p: zeros.data for p, zeros in self._lying.items()
        }  # by autograd's count of writes each is another one


@lru_cache(1024)
def _zeros(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


class _Still(Round):
    """A round in which no rank sends anything."""

    def __init__(self) -> None:
        pass

    def wait(self) -> dict[int, Tensor]:
        return {}

    def __enter__(self) -> dict[int, Tensor]:
        return {}

    def __exit__(self, *_: object) -> None:
        pass


STILL = _Still()
