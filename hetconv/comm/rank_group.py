"""The ranks of a process group: who they are, by which ways they reach each other, and
words that all hear.
"""

from __future__ import annotations

import atexit
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from hetconv.errors import DisagreementError, HetConvError, LostRankError
from hetconv.torch_internals import install_patches, timeout_of, transform_in_use

from . import call_tags
from .deadlock import DeadlockWatch
from .shared_memory import Channel, RanksApartError, open_channels

T = TypeVar("T")
ALL_RANKS_TAG = 1
"""The tag of words that all ranks say and hear: what each of them does is in the words."""
ANSWER_S = 5.0
"""In which another rank says what it does, if it waits for something."""
PARTING_S = 0.02  # in which threads that wait for Python's lock get it
_counters: list[Counter[int]] = []


class Agreements:
    """What all ranks of a group know alike.

    ``count``: how often they said to each other what they do. ``draws_alike``: whether
    from one seed they draw the same random numbers, which a CPU and a GPU do not.
    """

    count = 0
    draws_alike = True


@dataclass(frozen=True, eq=False)
class RankGroup:
    """The ranks that hold the parts of a tensor. ``control`` carries host messages even
    where ``group`` is NCCL.

    ``open_channels`` carry pieces, where ``group`` is gloo, to those ranks that are on this
    rank's host. ``one_host``: whether any two ranks have one. ``stalls`` watches how
    long this rank waits for ranks of other hosts. ``agreements``: what the ranks have
    agreed on.
    """

    process_group: dist.ProcessGroup
    control: dist.ProcessGroup
    rank: int
    size: int
    backend: str
    deadlock_watch: DeadlockWatch
    channels: Mapping[int, Channel] = field(default_factory=dict)
    one_host: bool = False
    agreements: Agreements = field(default_factory=Agreements)

    def __deepcopy__(self, memo: object) -> RankGroup:
        return self  # a process group cannot be copied; copies of a model go on using the same one

    def __reduce__(self) -> Any:
        raise HetConvError(
            "a parallelized model or a tensor in parts cannot be pickled: its process group "
            "exists in this process "
            "only; pickle hetconv.full_state_dict(model), or use hetconv.save_checkpoint"
        )


_teams: WeakKeyDictionary[dist.ProcessGroup, RankGroup] = WeakKeyDictionary()


def rank_group_of(group: dist.ProcessGroup | None = None) -> RankGroup:
    """The group of a process group (default: all ranks). The first call on a group is collective.

    From then on this thread runs its backward passes itself, see `run_backward_here`,
    and the changes to PyTorch that hetconv needs are in force, see `install_patches`.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise HetConvError(
            "torch.distributed is not initialised; start the program with torchrun (or "
            "hetconv's launcher) and call "
            "torch.distributed.init_process_group('gloo' or 'nccl') first"
        )
    group = group if group is not None else dist.group.WORLD
    assert group is not None
    run_backward_here()
    install_patches()
    if group not in _teams:
        backend = str(dist.get_backend(group))
        if backend == "gloo":
            _part_in_time()
        control = group
        if backend != "gloo":
            ranks = dist.get_process_group_ranks(group)
            control = dist.new_group(
                ranks, backend="gloo", use_local_synchronization=True
            )
            dist.barrier(
                group
            )  # NCCL wants every rank in a group's first call; later ones may be between two
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        rank_group = RankGroup(
            group, control, rank, size, backend, DeadlockWatch(control, rank, size)
        )
        _teams[group] = (
            _with_channels(rank_group)
            if backend == "gloo" and rank_group.size > 1
            else rank_group
        )
    return _teams[group]


def run_backward_here() -> None:
    """From now on the backward passes that this thread starts run in it, also those of
    a GPU's operators.

    PyTorch has a thread for each GPU, and numbers the nodes of graphs in each thread by
    themselves. It runs what was made last first. Where nodes of both threads are in one
    graph, as where a gradient is differentiated, what that is depends on how much each
    thread has made before, and ranks would wait for each other in different nodes.
    """
    torch.autograd.set_multithreading_enabled(False)


@cache
def _part_in_time() -> None:
    """At the end of the program gloo's threads drop the tensors of what they did last
    while there is still a Python.

    A team keeps its process group, and these threads with it, for as long as there is a
    model; one that drops a tensor later aborts the process (torch 2.13).
    """
    atexit.register(time.sleep, PARTING_S)


def _with_channels(group: RankGroup) -> RankGroup:
    gather = partial(all_gather_object, group)
    timeout = timeout_of(group.process_group)
    found = translate_backend_errors(
        group, lambda: open_channels(group.rank, gather, timeout)
    )
    return replace(
        group, channels=found, one_host=all(gather(len(found) == group.size - 1))
    )


def destroy(rank_group: RankGroup) -> None:
    """Ends a group's connections once nothing uses them any more: whoever waits for this
    rank on them gets an error.
    """
    _teams.pop(rank_group.process_group, None)
    rank_group.deadlock_watch.stop()
    for channel in rank_group.channels.values():
        channel.close()
    for group in {rank_group.process_group, rank_group.control}:
        dist.destroy_process_group(group)


def shared_memory_channels(group: RankGroup) -> Mapping[int, Channel]:
    """By which pieces go, and to whom; the backend carries the others."""
    return {} if through_backend.on else group.channels


def device_of_messages(group: RankGroup, device: torch.device) -> torch.device:
    """Where messages lie that the backend carries between tensors on ``device``: those
    of gloo in host memory.
    """
    return torch.device("cpu") if group.backend == "gloo" else device


@contextmanager
def count_sent() -> Iterator[Counter[int]]:
    """Counts the payload bytes that this rank sends, per receiving rank, while the
    context lasts.
    """
    counts: Counter[int] = Counter()
    _counters.append(counts)
    try:
        yield counts
    finally:
        _counters.remove(counts)


def count(outgoing: Mapping[int, Tensor]) -> None:
    """Notes for who counts that this rank sends these."""
    for counts in _counters:
        counts.update({peer: piece.nbytes for peer, piece in outgoing.items()})


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


blocking = Switch()
"""Messages are waited for where they start: what overlap gains shows beside this."""
through_backend = Switch()
"""On all ranks alike, no piece goes by a `Channel`: what they gain shows beside this."""
no_payload = Switch()
"""On all ranks alike, no piece is sent, and zeros lie where one would come: what
messages cost shows beside this.
"""


def refuse_transforms() -> None:
    """Raises `HetConvError` where PyTorch transforms a function and cannot see its
    messages to other ranks.
    """
    if transform_in_use():
        raise HetConvError(
            "a parallelized model runs under a transform of torch.func (grad, jvp, vmap, "
            "...), with "
            "is_grads_batched or vectorize, or in autograd's forward mode; none of them can "
            "follow messages between "
            "ranks. Use torch.autograd.grad, or torch.autograd.functional without vectorize"
        )


def translate_backend_errors(group: RankGroup, action: Callable[[], T]) -> T:
    """Runs a step of communication; what the backend raises when a rank is gone becomes
    a `LostRankError`.
    """
    refuse_transforms()
    try:
        return action()
    except RanksApartError as e:
        raise _apart(group) from e
    except HetConvError:
        raise
    except (RuntimeError, OSError) as e:
        if doings := group.deadlock_watch.calls_of_ranks():
            for channel in group.channels.values():
                channel.close()
            group.deadlock_watch.end(doings)
            raise _different_calls(doings) from e
        raise LostRankError(
            f"rank {group.rank} of {group.size} got no answer from another rank: it died, or it "
            "waits elsewhere. Look "
            "for the first error among the ranks' outputs; this process group cannot be used "
            f"any more. ({e})"
        ) from e


def _apart(group: RankGroup) -> DisagreementError:
    """Tells the ranks of this host what this one does, and gives an error that says
    what each of them does.

    Messages of several calls are under way then: the channels are closed.
    """
    doing = {group.rank: call_tags.described()}
    for channel in group.channels.values():
        with suppress(OSError):
            channel.tell(doing[group.rank])
    until = time.monotonic() + ANSWER_S
    for peer, channel in group.channels.items():
        doing[peer] = channel.told(until) or f"it did not say within {ANSWER_S:g} s"
        channel.close()
    if not group.one_host:
        group.deadlock_watch.end(doing)
    return _different_calls(doing)


def _different_calls(doings: Mapping[int, str]) -> DisagreementError:
    lines = "\n".join(f"  rank {rank}: {doings[rank]}" for rank in sorted(doings))
    return DisagreementError(
        "the ranks are in different calls, and this process group cannot be used any more; "
        "call the model alike on "
        f"every rank, in the same order:\n{lines}"
    )


def all_gather_object(group: RankGroup, word: T) -> list[T]:
    """What each rank gives, in rank order. Collective."""
    words = [word] * group.size
    translate_backend_errors(
        group, lambda: dist.all_gather_object(words, word, group=group.control)
    )
    return words


def all_gather_small(group: RankGroup, word: Tensor) -> Tensor:
    """(P, ...): what each rank gives, in rank order; a few bytes on the CPU. Collective."""
    words = word.new_empty(group.size, *word.shape)
    if not group.one_host or through_backend.on:
        with group.deadlock_watch.waiting(ALL_RANKS_TAG, None):
            translate_backend_errors(
                group,
                lambda: dist.all_gather(
                    list(words.unbind()), word, group=group.control
                ),
            )
        return words

    def exchange() -> None:
        for channel in group.channels.values():
            channel.send(word, ALL_RANKS_TAG)
        for wait in [
            channel.receive_into(words[peer], ALL_RANKS_TAG)
            for peer, channel in group.channels.items()
        ]:
            wait()

    translate_backend_errors(group, exchange)
    words[group.rank] = word
    return words


def broadcast(group: RankGroup, tensors: list[Tensor]) -> None:
    """Rank 0's values on every rank, in place; one message per dtype and, over NCCL, device.

    Over gloo ranks may have them on different devices: messages go through host memory.
    """
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for t in tensors:
        by_kind.setdefault((t.dtype, device_of_messages(group, t.device)), []).append(t)
    for (_, device), same in by_kind.items():
        flat = torch.cat([t.detach().to(device).flatten() for t in same])
        translate_backend_errors(
            group, partial(dist.broadcast, flat, group=group.process_group, group_src=0)
        )
        with torch.no_grad():
            for t, new in zip(same, flat.split([t.numel() for t in same]), strict=True):
                t.copy_(new.view(t.shape))
