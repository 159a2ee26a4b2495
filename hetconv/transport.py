"""Messages among the ranks of a process group: who they are, and one round of pieces. No geometry here."""

from __future__ import annotations

import atexit
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import HetConvError, LostRankError
from .heap import keep_freed
from .mailbox import Channel, Coming, Shape, channels

T = TypeVar("T")
PARTING_S = 0.02  # in which threads that wait for Python's lock get it
_counters: list[Counter[int]] = []


@dataclass(frozen=True, eq=False)
class Team:
    """The ranks that hold the parts of a tensor. ``control`` carries host messages even where ``group`` is NCCL.

    ``channels`` carry pieces of CPU tensors, where ``group`` is gloo, to those ranks that are on this rank's host.
    ``one_host``: whether any two ranks have one.
    """

    group: dist.ProcessGroup
    control: dist.ProcessGroup
    rank: int
    size: int
    backend: str
    channels: Mapping[int, Channel] = field(default_factory=dict)
    one_host: bool = False

    def __deepcopy__(self, memo: object) -> Team:
        return self  # a process group cannot be copied; copies of a model go on using the same one


_teams: WeakKeyDictionary[dist.ProcessGroup, Team] = WeakKeyDictionary()


def team_of(group: dist.ProcessGroup | None = None) -> Team:
    """The team of a process group (default: all ranks). The first call on a group is collective.

    Ranks that compute on CPUs keep the memory that they free, see `heap`.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise HetConvError(
            "torch.distributed is not initialised; start the program with torchrun (or hetconv's launcher) and call "
            "torch.distributed.init_process_group('gloo' or 'nccl') first"
        )
    group = group if group is not None else dist.group.WORLD
    assert group is not None
    if group not in _teams:
        backend = str(dist.get_backend(group))
        if backend == "gloo":
            keep_freed()
            _part_in_time()
        control = group
        if backend != "gloo":
            ranks = dist.get_process_group_ranks(group)
            control = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
            dist.barrier(group)  # NCCL wants every rank in a group's first call; later ones may be between two
        team = Team(group, control, dist.get_rank(group), dist.get_world_size(group), backend)
        _teams[group] = _with_channels(team) if backend == "gloo" and team.size > 1 else team
    return _teams[group]


@cache
def _part_in_time() -> None:
    """At the end of the program gloo's threads drop the tensors of what they did last while there is still a Python.

    A team keeps its process group, and these threads with it, for as long as there is a model; one that drops a tensor
    later aborts the process (torch 2.13).
    """
    atexit.register(time.sleep, PARTING_S)


def _with_channels(team: Team) -> Team:
    gather = partial(objects_of_all, team)
    timeout = team.group._get_backend(torch.device("cpu")).options._timeout
    found = answered(team, lambda: channels(team.rank, gather, timeout))
    return replace(team, channels=found, one_host=all(gather(len(found) == team.size - 1)))


def disband(team: Team) -> None:
    """Ends a team's connections once nothing uses them any more: whoever waits for this rank on them gets an error."""
    _teams.pop(team.group, None)
    for channel in team.channels.values():
        channel.close()
    for group in {team.group, team.control}:
        dist.destroy_process_group(group)


def near(team: Team, device: torch.device) -> Mapping[int, Channel]:
    """By which pieces on a device go, and to whom; the backend carries the others."""
    return team.channels if device.type == "cpu" and not through_backend.on else {}


@contextmanager
def count_sent() -> Iterator[Counter[int]]:
    """Counts the payload bytes that this rank sends, per receiving rank, while the context lasts."""
    counts: Counter[int] = Counter()
    _counters.append(counts)
    try:
        yield counts
    finally:
        _counters.remove(counts)


class Switch:
    """Off, but while the context that it gives when it is called lasts."""

    on = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        before, self.on = self.on, True
        try:
            yield
        finally:
            self.on = before


in_turn = Switch()
"""Messages are waited for where they start: what overlap gains shows beside this."""
through_backend = Switch()
"""On all ranks alike, no piece goes by a `Channel`: what they gain shows beside this."""


def answered(team: Team, action: Callable[[], T]) -> T:
    """Runs a step of communication; what the backend raises when a rank is gone becomes a `LostRankError`."""
    try:
        return action()
    except HetConvError:
        raise
    except (RuntimeError, OSError) as e:
        raise LostRankError(
            f"rank {team.rank} of {team.size} got no answer from another rank: it died, or it waits elsewhere. Look "
            f"for the first error among the ranks' outputs; this process group cannot be used any more. ({e})"
        ) from e


def objects_of_all(team: Team, word: T) -> list[T]:
    """What each rank gives, in rank order. Collective."""
    words = [word] * team.size
    answered(team, lambda: dist.all_gather_object(words, word, group=team.control))
    return words


def words_of_all(team: Team, word: Tensor) -> Tensor:
    """(P, ...): what each rank gives, in rank order; a few bytes on the CPU. Collective."""
    words = word.new_empty(team.size, *word.shape)
    if not team.one_host or through_backend.on:
        answered(team, lambda: dist.all_gather(list(words.unbind()), word, group=team.control))
        return words

    def exchange() -> None:
        for channel in team.channels.values():
            channel.send(word)
        for wait in [channel.expect(words[peer]) for peer, channel in team.channels.items()]:
            wait()

    answered(team, exchange)
    words[team.rank] = word
    return words


def broadcast(team: Team, tensors: list[Tensor]) -> None:
    """Rank 0's values on every rank, in place; one message per dtype and device."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for t in tensors:
        by_kind.setdefault((t.dtype, t.device), []).append(t)
    for same in by_kind.values():
        flat = torch.cat([t.detach().flatten() for t in same])
        answered(team, partial(dist.broadcast, flat, group=team.group, group_src=0))
        with torch.no_grad():
            for t, new in zip(same, flat.split([t.numel() for t in same]), strict=True):
                t.copy_(new.view(t.shape))


def as_wire(x: Tensor) -> Tensor:
    """Images travel channels-last, whatever the memory format on either side: rows are then one run of memory."""
    return x.movedim(1, -1) if x.dim() in (4, 5) else x


def _wire_shape(shape: Shape) -> Shape:
    """Of what is to be of this shape, as it travels."""
    return (shape[0], *shape[2:], shape[1]) if len(shape) in (4, 5) else shape


def _from_wire(x: Tensor) -> Tensor:
    return x.movedim(-1, 1) if x.dim() in (4, 5) else x


class Round:
    """One round of messages under way. `wait` gives what came, by sender.

    As a context it lends that, to be read while the context lasts: pieces of this host stay where they lie.
    """

    def __init__(
        self, team: Team, like: Tensor, outgoing: Mapping[int, Tensor], incoming: Mapping[int, tuple[int, ...]]
    ):
        self._team, self._from = team, tuple(incoming)
        self._near, self._coming = near(team, like.device), dict[int, Coming]()
        self._far: _Far | None = None
        for counts in _counters:
            counts.update({peer: piece.nbytes for peer, piece in outgoing.items()})
        answered(team, lambda: self._begin(like, outgoing, incoming))
        if in_turn.on:
            self.wait()
            if like.device.type == "cuda":
                torch.cuda.synchronize(like.device)

    def _begin(self, like: Tensor, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Shape]) -> None:
        for peer, channel in self._near.items():
            if peer in outgoing:
                channel.send(as_wire(outgoing[peer]))
            if peer in incoming:
                self._coming[peer] = channel.announce(like.dtype, _wire_shape(incoming[peer]))
        if len(self._near) < self._team.size - 1:
            sent = {peer: piece for peer, piece in outgoing.items() if peer not in self._near}
            self._far = _Far(self._team, like, sent, {p: s for p, s in incoming.items() if p not in self._near})

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
        far = self._far.arrived() if self._far is not None else {}
        return {p: _from_wire(far[p] if p in far else how(self._near[p], self._coming[p])) for p in self._from}

    def _give_back(self) -> None:
        for peer in self._coming:
            self._near[peer].give_back()


class _Far:
    """Those pieces of a round that the backend carries."""

    def __init__(self, team: Team, like: Tensor, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Shape]):
        self._team = team
        self._arriving: list[tuple[Tensor, Tensor]] = []  # where it belongs, where it comes to
        self._sent = {peer: as_wire(t).contiguous() for peer, t in outgoing.items()}  # to be kept until it is sent
        self._buffers = {peer: like.new_empty(_wire_shape(shape)) for peer, shape in incoming.items()}
        staged = team.backend == "gloo" and like.device.type != "cpu"
        self._waits: list[Callable[[], Any]] = self._all_to_all(like) if staged else self._point_to_point()

    def _point_to_point(self) -> list[Callable[[], Any]]:
        group = self._team.group
        ops = [dist.P2POp(dist.isend, t, group=group, group_peer=peer) for peer, t in self._sent.items()]
        ops += [dist.P2POp(dist.irecv, t, group=group, group_peer=peer) for peer, t in self._buffers.items()]
        return [work.wait for work in dist.batch_isend_irecv(ops)] if ops else []

    def _all_to_all(self, like: Tensor) -> list[Callable[[], Any]]:
        """gloo takes CUDA tensors only in collectives, through host memory; every rank takes part."""
        ranks, nothing = range(self._team.size), like.new_empty(0)
        outgoing = torch.cat([self._sent.get(r, nothing).flatten() for r in ranks])
        incoming = [self._buffers.get(r, nothing) for r in ranks]
        sizes = [t.numel() for t in incoming], [self._sent.get(r, nothing).numel() for r in ranks]
        got = like.new_empty(sum(sizes[0]))
        self._arriving = list(zip(incoming, got.split(sizes[0]), strict=True))
        self._sent = {0: outgoing}
        work = dist.all_to_all_single(got, outgoing, *sizes, group=self._team.group, async_op=True)
        return [work.wait] if work is not None else []

    def arrived(self) -> dict[int, Tensor]:
        """As it travelled, by sender."""
        for wait in self._waits:
            wait()
        for buffer, part in self._arriving:
            buffer.copy_(part.view_as(buffer))
        self._waits, self._sent, self._arriving = [], {}, []
        return self._buffers


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
