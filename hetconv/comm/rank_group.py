"""Rank groups: the ranks of a process group, and all their ways to communicate."""

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
from hetconv.torch_internals import store_of, timeout_of, transform_in_use
from hetconv.torch_patches import install_patches

from . import call_tags
from .packets import CallMismatchError
from .shared_memory import Channel, open_channels
from .thread_time import MESSAGE_WAITS
from .watch.deadlock import DeadlockWatch, different_calls
from .watch.heartbeat import Heartbeat
from .watch.liveness import Address, is_visible, open_answers

T = TypeVar("T")
ALL_RANKS_TAG = 1
"""The tag of messages that every rank sends to every other one."""
MAX_ANSWER_DELAY_S = 5.0
"""Within which a rank that waits for something reports what it does."""
THREAD_EXIT_S = 0.02  # within which threads that wait for Python's lock get it
_counters: list[Counter[int]] = []


class Agreements:
    """What all ranks of a group know alike.

    Attributes:
        count: how often they have agreed on a call.
        draws_alike: whether one seed gives all of them the same random numbers. A CPU and
            a GPU draw different ones.
    """

    count = 0
    draws_alike = True


@dataclass(frozen=True, eq=False)
class RankGroup:
    """The ranks that hold the shards of a tensor.

    Attributes:
        process_group: carries messages between the devices.
        control: process group for messages in host memory, also where ``process_group`` is
            NCCL.
        rank: this rank.
        size: number of ranks.
        backend: of ``process_group``.
        deadlock_watch: watches waits for ranks of other hosts.
        heartbeat: watches whether the other ranks run.
        channels: shared memory with ranks of this host, where the backend is gloo.
        one_host: whether any two ranks have such a channel.
        agreements: what the ranks have agreed on.
    """

    process_group: dist.ProcessGroup
    control: dist.ProcessGroup
    rank: int
    size: int
    backend: str
    deadlock_watch: DeadlockWatch
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
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


_groups: WeakKeyDictionary[dist.ProcessGroup, RankGroup] = WeakKeyDictionary()


def rank_group_of(group: dist.ProcessGroup | None = None) -> RankGroup:
    """Returns the rank group of a process group. The first call for each is collective.

    From then on this thread runs its backward passes itself (see `run_backward_here`), and
    the changes to PyTorch that hetconv needs are in force (see `install_patches`).

    Args:
        group: a process group; None for all ranks.
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
    if group not in _groups:
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
        watch = DeadlockWatch(control, rank, size)
        heartbeat = Heartbeat(watch.end_own_waits)
        alone = RankGroup(group, control, rank, size, backend, watch, heartbeat)
        _groups[group] = _connected(alone) if size > 1 else alone
    return _groups[group]


def run_backward_here() -> None:
    """Makes this thread run its backward passes itself, also those of a GPU's operators.

    PyTorch has a thread for each GPU, numbers the nodes of graphs in each thread separately,
    and runs the latest node first. A graph with nodes of both threads, as when a gradient
    is differentiated, would run in an order that depends on how many nodes each thread has
    made before. Ranks would then wait for each other in different nodes.
    """
    torch.autograd.set_multithreading_enabled(False)


@cache
def _part_in_time() -> None:
    """Drops the last messages of gloo's threads before the interpreter ends.

    A rank group keeps its process group, and these threads, as long as there is a model. A
    thread that frees a tensor after the end of the interpreter aborts the process (torch
    2.13).
    """
    atexit.register(time.sleep, THREAD_EXIT_S)


def _connected(group: RankGroup) -> RankGroup:
    """Opens the channels, and watches whether the other ranks run."""
    gather, others = partial(all_gather_object, group), group.size - 1
    found: dict[int, Channel] = {}
    if group.backend == "gloo":
        timeout, check = timeout_of(group.process_group), group.heartbeat.check
        found = translate_backend_errors(
            group, lambda: open_channels(group.rank, gather, timeout, check)
        )
    near = {p: c.peer_pid for p, c in found.items() if is_visible(c.peer_pid)}
    counts = gather((len(found), len(near)))
    answers, far = None, dict[int, Address]()
    if any(seen < others for _, seen in counts):
        answers, addresses = open_answers(
            store_of(group.control), others - len(near), gather
        )
        unseen = addresses.keys() - near.keys() - {group.rank}
        far = {peer: addresses[peer] for peer in sorted(unseen)}
    group.heartbeat.watch(near, far, answers)
    one_host = all(channels == others for channels, _ in counts)
    return replace(group, channels=found, one_host=one_host)


def destroy(rank_group: RankGroup) -> None:
    """Closes the connections of a group. A rank that waits for this one gets an error."""
    _groups.pop(rank_group.process_group, None)
    rank_group.deadlock_watch.stop()
    rank_group.heartbeat.stop()
    close_channels(rank_group)
    for group in {rank_group.process_group, rank_group.control}:
        dist.destroy_process_group(group)


def close_channels(group: RankGroup) -> None:
    """Closes the shared memory. A rank of this host that waits for this one gets an error."""
    for channel in group.channels.values():
        channel.close()


def shared_memory_channels(group: RankGroup) -> Mapping[int, Channel]:
    """Returns the channels by receiver; the backend carries the other messages."""
    return {} if through_backend.on else group.channels


def device_of_messages(group: RankGroup, device: torch.device) -> torch.device:
    """Returns where the backend expects messages between tensors on a device.

    gloo expects them in host memory.
    """
    return torch.device("cpu") if group.backend == "gloo" else device


@contextmanager
def count_sent() -> Iterator[Counter[int]]:
    """Context that counts the payload bytes that this rank sends, by receiver."""
    counts: Counter[int] = Counter()
    _counters.append(counts)
    try:
        yield counts
    finally:
        _counters.remove(counts)


def count(outgoing: Mapping[int, Tensor]) -> None:
    """Adds the bytes of these messages to all active counters."""
    for counts in _counters:
        counts.update({peer: piece.nbytes for peer, piece in outgoing.items()})


class Switch:
    """A flag that is set for the duration of the context that it returns when called."""

    on = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Sets the flag for the duration of the context."""
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
    """Raises `HetConvError` within transforms of `torch.func`, which see no messages."""
    if transform_in_use():
        raise HetConvError(
            "a parallelized model runs under a transform of torch.func (grad, jvp, vmap, "
            "...), with "
            "is_grads_batched or vectorize, or in autograd's forward mode; none of them can "
            "follow messages between "
            "ranks. Use torch.autograd.grad, or torch.autograd.functional without vectorize"
        )


def translate_backend_errors(group: RankGroup, action: Callable[[], T]) -> T:
    """Runs a step of communication and translates the backend's errors.

    Args:
        group: the ranks.
        action: the step.

    Returns:
        The result of ``action``.

    Raises:
        LostRankError: another rank is gone.
        DisagreementError: ranks are in different calls.
    """
    refuse_transforms()
    try:
        with group.heartbeat:
            return action()
    except CallMismatchError as e:
        raise _apart(group) from e
    except HetConvError:
        raise
    except (RuntimeError, OSError) as e:
        raise _failure(group, e) from e


def _failure(group: RankGroup, error: Exception) -> HetConvError:
    """Returns why a wait has failed."""
    gone = f"this process group cannot be used any more. ({error})"
    if lost := group.heartbeat.cause():  # before the store, which may lie on its host
        close_channels(group)
        return LostRankError(
            f"rank {group.rank} of {group.size} lost rank {lost.rank}, which {lost.how}. End all "
            "ranks, and start them again from the last checkpoint; " + gone
        )
    if doings := group.deadlock_watch.calls_of_ranks():
        close_channels(group)
        group.deadlock_watch.end(doings)
        return different_calls(doings)
    return LostRankError(
        f"rank {group.rank} of {group.size} got no answer from another rank: it died, or it "
        "waits elsewhere. Look for the first error among the ranks' outputs; " + gone
    )


def _apart(group: RankGroup) -> DisagreementError:
    """Tells the ranks of this host what this one does, and returns the error for all.

    Messages of several calls are then under way, so the channels are closed.
    """
    doing = {group.rank: call_tags.described()}
    for channel in group.channels.values():
        with suppress(OSError):
            channel.tell(doing[group.rank])
    until = time.monotonic() + MAX_ANSWER_DELAY_S
    silence = f"it did not say within {MAX_ANSWER_DELAY_S:g} s"
    for peer, channel in group.channels.items():
        doing[peer] = channel.told(until) or silence
        channel.close()
    if not group.one_host:
        group.deadlock_watch.end(doing)
    return different_calls(doing)


def all_gather_object(group: RankGroup, word: T) -> list[T]:
    """Returns a small picklable object of each rank, in rank order. Collective."""
    words = [word] * group.size
    translate_backend_errors(
        group, lambda: dist.all_gather_object(words, word, group=group.control)
    )
    return words


def all_gather_small(group: RankGroup, word: Tensor) -> Tensor:
    """Returns a small CPU tensor of each rank, stacked as (P, ...). Collective."""
    return start_all_gather_small(group, word)()


def start_all_gather_small(group: RankGroup, word: Tensor) -> Callable[[], Tensor]:
    """Starts `all_gather_small`, and returns a function that waits for its result."""
    words = word.new_empty(group.size, *word.shape)
    if not group.one_host or through_backend.on:
        start = partial(
            dist.all_gather,
            list(words.unbind()),
            word,
            group=group.control,
            async_op=True,
        )
        work = translate_backend_errors(group, start)

        def gathered() -> Tensor:
            with group.deadlock_watch.waiting(ALL_RANKS_TAG, None), MESSAGE_WAITS:
                translate_backend_errors(group, work.wait)
            return words

        return gathered

    def send() -> list[Callable[[], Any]]:
        for channel in group.channels.values():
            channel.send(word, ALL_RANKS_TAG)
        return [
            channel.receive_into(words[peer], ALL_RANKS_TAG)
            for peer, channel in group.channels.items()
        ]

    waits = translate_backend_errors(group, send)

    def received() -> Tensor:
        translate_backend_errors(group, lambda: [wait() for wait in waits])
        words[group.rank] = word
        return words

    return received


def broadcast(group: RankGroup, tensors: list[Tensor]) -> None:
    """Copies rank 0's values to every rank, in place. Collective.

    One message is sent per dtype and, over NCCL, device. Over gloo, ranks may have the
    tensors on different devices.

    Args:
        group: the ranks.
        tensors: tensors of the same shapes and dtypes on every rank.
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
