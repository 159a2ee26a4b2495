"""Finds ranks of different hosts that wait for each other in different calls.

On one host, the receiver compares the tag of every message. gloo instead keeps messages
with different tags apart, so that both ranks would wait until the timeout. A thread of
each rank looks at waits that last long, and writes to the store of the process group
what its rank waits for. Two ranks that wait for each other in different calls are found
there, and all waits of the group end.
"""

from __future__ import annotations

import atexit
import json
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from hetconv.errors import DisagreementError
from hetconv.torch_internals import store_of

from .. import call_tags
from .liveness import MAX_FAILED_JOIN_S, hang_up, store_hosts

MIN_REPORTED_WAIT_S = 2.0
"""A wait that lasts longer is reported to the other ranks."""
POLL_S = 0.5
MAX_JOIN_S = 1.0
MISMATCH_KEY = "mismatch"
"""The key in the store under which a rank writes what each rank does, once two are in
different calls.
"""
TAG_TO_END = 2**31 - 1
"""Of the message that ends all waits. Tags of gloo are 31 bits wide."""


class Wait(NamedTuple):
    """One rank that waits for another.

    Attributes:
        number: number of the wait, counted on its rank.
        beat: how often the wait was reported. If it has grown since it was last read, the
            wait still goes on.
        tag: tag of the message that the rank waits for.
        peer: the other rank; None in a collective, where it may be any.
        open: tags of the exchanges that this rank has started and not finished.
        collectives: number of collectives completed before.
        doing: the call, and its line in the user's code.
    """

    number: int
    beat: int
    tag: int
    peer: int | None
    open: Sequence[int]
    collectives: int
    doing: str


def wait_for_ever(a: tuple[int, Wait], b: tuple[int, Wait]) -> bool:
    """Returns whether two ranks wait for each other in different calls.

    A message that was sent already arrives, however slow the network is; such ranks do not
    wait for ever.

    Args:
        a: a rank and its wait.
        b: another rank and its wait.
    """
    (rank_a, x), (rank_b, y) = a, b
    mutual = x.peer in (None, rank_b) and y.peer in (None, rank_a)
    under_way = x.tag in y.open or y.tag in x.open
    left = (x.peer is None and y.collectives > x.collectives) or (
        y.peer is None and x.collectives > y.collectives
    )
    return mutual and x.tag != y.tag and not under_way and not left


def different_calls(doings: Mapping[int, str]) -> DisagreementError:
    """Returns the error of ranks that are in different calls.

    Args:
        doings: what each rank does.
    """
    lines = "\n".join(f"  rank {rank}: {doings[rank]}" for rank in sorted(doings))
    return DisagreementError(
        "the ranks are in different calls, and this process group cannot be used any more; "
        f"call the model alike on every rank, in the same order:\n{lines}"
    )


class _Here(NamedTuple):
    """A wait of this rank."""

    number: int
    since: float
    tag: int
    peer: int | None
    thread: int


class DeadlockWatch:
    """Watches how long one rank of a gloo group waits."""

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int):
        self._group, self._rank, self._size = group, rank, size
        self._store = store_of(group)
        self._now: _Here | None = None
        self._waits = self._collectives = 0
        self._open = Counter[int]()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def waiting(self, tag: int, peer: int | None) -> Iterator[None]:
        """Context in which this rank waits for a message, or in a collective.

        Args:
            tag: tag of the message.
            peer: rank that sends it; None in a collective.
        """
        if self._thread is None and self._store is not None:
            self._start()
        self._waits += 1
        self._now = _Here(
            self._waits, time.monotonic(), tag, peer, threading.get_ident()
        )
        try:
            yield
        finally:
            self._now = None
        self._collectives += peer is None

    def opened(self, tag: int) -> None:
        """Notes that an exchange with this tag was started."""
        self._open[tag] += 1

    def closed(self, tag: int) -> None:
        """Notes that an exchange with this tag was finished."""
        self._open = +(self._open - Counter([tag]))

    def calls_of_ranks(self) -> Mapping[int, str] | None:
        """Returns what each rank does, once two of them are in different calls."""
        with suppress(RuntimeError):  # the store is gone with the rank that has it
            if self._store is not None and self._store.check([MISMATCH_KEY]):
                return {
                    int(rank): doing
                    for rank, doing in json.loads(self._store.get(MISMATCH_KEY)).items()
                }
        return None

    def end(self, doings: Mapping[int, str]) -> None:
        """Ends all waits of the group, as its ranks are in different calls.

        Args:
            doings: what each rank does.
        """
        if self._store is None:
            return
        with suppress(RuntimeError):
            if not self._store.check([MISMATCH_KEY]):
                self._store.set(MISMATCH_KEY, json.dumps(doings))
        self.end_own_waits()
        self.stop()

    def end_own_waits(self) -> None:
        """Ends the waits of this rank for messages that gloo carries.

        gloo closes all connections of a group as soon as one wait exceeds its timeout.
        """
        for peer in range(
            self._size
        ):  # one whose connection is closed already is not waited for
            if peer != self._rank:
                with suppress(RuntimeError):
                    nothing = torch.empty(1, device="cpu")
                    message = dist.irecv(
                        nothing, group=self._group, group_src=peer, tag=TAG_TO_END
                    )
                    if message is not None:
                        message.wait(timedelta(milliseconds=1))

    def stop(self) -> None:
        """Stops the thread that watches."""
        self._ended.set()

    def _start(self) -> None:
        self._thread = threading.Thread(
            target=self._watch, name="hetconv-stalls", daemon=True
        )
        self._thread.start()
        _asked[self._thread] = self._ended, store_hosts(self._store)
        # At exit `_end_questions` does it.
        weakref.finalize(self, _join, self._ended, self._thread).atexit = False

    def _watch(self) -> None:
        number, beat, seen = 0, 0, dict[int, Wait]()
        while not self._ended.wait(POLL_S):
            here = self._now
            if here is None or time.monotonic() < here.since + MIN_REPORTED_WAIT_S:
                continue
            if here.number != number:
                number, seen = here.number, {}
            beat += 1
            if self.calls_of_ranks():  # of two other ranks
                self.end_own_waits()
                return
            with suppress(RuntimeError):
                own = self._told(here, beat)
                others = self._others(here)
                apart = [
                    rank
                    for rank, other in others.items()
                    if rank in seen
                    and seen[rank].number == other.number
                    and seen[rank].beat < other.beat
                    and wait_for_ever((self._rank, own), (rank, other))
                ]
                seen = others
                if apart and self._now is here:
                    doings = {self._rank: own.doing} | {
                        rank: other.doing for rank, other in others.items()
                    }
                    self.end(dict(sorted(doings.items())))
                    return

    def _told(self, here: _Here, beat: int) -> Wait:
        """Reports to the other ranks what this one waits for."""
        doing = call_tags.described(sys._current_frames().get(here.thread))
        own = Wait(
            here.number,
            beat,
            here.tag,
            here.peer,
            tuple(self._open),
            self._collectives,
            doing,
        )
        self._store.set(str(self._rank), json.dumps(own._asdict()))
        return own

    def _others(self, here: _Here) -> dict[int, Wait]:
        """Returns the last long wait of each rank that this one waits for; it may be over."""
        found = {}
        for rank in range(self._size) if here.peer is None else [here.peer]:
            if rank != self._rank and self._store.check([str(rank)]):
                found[rank] = Wait(**json.loads(self._store.get(str(rank))))
        return found


_asked = weakref.WeakKeyDictionary[
    threading.Thread, tuple[threading.Event, list[tuple[str, int]]]
]()
"""How each thread is ended, and the store that it asks."""


@atexit.register
def _end_questions() -> None:
    """Ends the threads before Python ends, which stops threads anywhere.

    It would abort if a question to a store that does not answer, as that of a host that
    was lost, ended meanwhile.
    """
    for thread, (ended, hosts) in list(_asked.items()):
        _join(ended, thread)
        if thread.is_alive():
            for host in hosts:
                hang_up(*host)
            thread.join(MAX_FAILED_JOIN_S)


def _join(ended: threading.Event, thread: threading.Thread) -> None:
    ended.set()
    if thread is not threading.current_thread():
        thread.join(MAX_JOIN_S)
