"""Notices ranks that do not run any more: that were stopped, or are out of reach.

Killed ones close their connections, which every wait notices by itself. Nobody is looked
at, and nothing is sent, before a rank has waited for a second. Then a thread looks at all
other ranks: who waits for one that waits for a lost one names the lost one too. `liveness`
tells the state of processes of this host, and asks other hosts directly: the store of the
process group may lie on the very host that is lost, or with a launcher that is stopped.
To ask may block, so that another thread does it. A process that was stopped itself counts
anew.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import NamedTuple
from weakref import WeakSet

from .liveness import (
    MAX_FAILED_JOIN_S,
    OPEN_TIMEOUT_S,
    Address,
    Answers,
    Peer,
    hang_up,
    is_stopped,
)

log = logging.getLogger("hetconv")
MIN_WAIT_S = 1.0
"""A rank that has waited so long looks whether the others run."""
LOST_AFTER_S = 6.0
"""For which a rank must be stopped, or leave a question without an answer, to be lost."""
POLL_S = 0.5
MAX_POLL_GAP_S = 2.0
"""A thread that polls after a longer time than this did not run itself."""
MAX_ANSWER_S = 1.0
"""Once a wait has failed: a rank that does not answer within this time is the cause."""

MAX_OPEN_S = 20.0  # then the program goes on while ranks are connected
MAX_JOIN_S = 0.5  # a thread that asks a lost rank would wait for ever


class LostRank(NamedTuple):
    """A rank that does not run any more.

    Attributes:
        rank: its number.
        how: what was noticed of it.
    """

    rank: int
    how: str


class _Question(NamedTuple):
    """A question to a rank of another host that is not answered yet."""

    rank: int
    since: float


class Heartbeat:
    """Looks whether the other ranks of a group run, while this one waits for them.

    As a context manager it tells that this rank waits.

    Args:
        end_waits: ends all waits of the group through its backend.

    Attributes:
        lost: the rank that was lost. The group cannot be used any more.
    """

    def __init__(self, end_waits: Callable[[], None] = lambda: None):
        self.lost: LostRank | None = None
        self._end_waits, self._lock = end_waits, threading.Lock()
        self._near: Mapping[int, int] = {}
        self._addresses: Mapping[int, Address] = {}
        self._answers: Answers | None = None
        self._depth, self._since = 0, 0.0
        self._silent: dict[_Question | int, float] = {}
        self._asker: threading.Thread | None = None
        self._wanted, self._ended = threading.Event(), threading.Event()
        self._question: _Question | None = None
        self._told: LostRank | None = None
        self._open, self._rounds = threading.Event(), 0

    def watch(
        self,
        near: Mapping[int, int],
        far: Mapping[int, Address],
        answers: Answers | None = None,
    ) -> None:
        """Begins to watch, once this rank is connected to the others.

        Args:
            near: the process of each rank of this host.
            far: where each of the other ranks answers.
            answers: what this rank answers to them.
        """
        self._near, self._addresses, self._answers = near, far, answers
        if far:
            self._asker = threading.Thread(
                target=self._ask, name="hetconv-heartbeat-asks", daemon=True
            )
            self._asker.start()
            self._open.wait(MAX_OPEN_S)
        if near or far:
            _watched().add(self)

    def __enter__(self) -> None:
        if not self._depth:
            self._since = time.monotonic()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1

    def stop(self) -> None:
        """Ends the watch."""
        _watched().discard(self)
        self._ended.set()
        self._wanted.set()
        if self._asker is None:
            return
        self._asker.join(MAX_JOIN_S)
        if self._asker.is_alive():
            # Python would abort if the lost rank ended, too, while this process does.
            for address in self._addresses.values():
                hang_up(address.host, address.port)
            self._asker.join(MAX_FAILED_JOIN_S)

    def check(self) -> None:
        """Raises `ConnectionError` if a rank was lost."""
        if self.lost is not None:
            raise ConnectionError(f"rank {self.lost.rank} {self.lost.how}")

    def poll(self, now: float, resumed: bool) -> None:
        """Looks at the other ranks, if this one has waited long.

        Args:
            now: time by `time.monotonic`.
            resumed: whether this process was stopped since the last poll.
        """
        waits = self._depth and now >= self._since + MIN_WAIT_S
        if not waits or self.lost is not None:
            self._silent = {}
            return
        if self._told is not None:
            self._lose(self._told)
            return
        silent: dict[_Question | int, float] = dict.fromkeys(self._stopped(), now)
        if (question := self._question) is not None:
            silent[question] = question.since
        before = dict.fromkeys(silent, now) if resumed else self._silent
        self._silent = {who: before.get(who, since) for who, since in silent.items()}
        for who, since in self._silent.items():
            if now - since >= LOST_AFTER_S:
                self._lose(_described(who, now - since))
                return
        self._wanted.set()

    def cause(self) -> LostRank | None:
        """Returns the lost rank after a wait has failed, if that is why.

        It may have failed because a third rank has noticed the loss first.
        """
        if self.lost is None:
            stopped = next((_described(rank, 0.0) for rank in self._stopped()), None)
            if (found := self._told or stopped or self._silent_now()) is not None:
                self._lose(found)
        return self.lost

    def _lose(self, lost: LostRank) -> None:
        with self._lock:
            if self.lost is not None:
                return
            self.lost = lost
        if self._answers is not None:
            self._answers.tell_lost(*lost)
        self._end_waits()

    def _stopped(self) -> Iterator[int]:
        return (rank for rank, pid in self._near.items() if is_stopped(pid))

    def _silent_now(self) -> LostRank | None:
        """Asks all ranks of other hosts, and returns the first that does not answer."""
        if not self._open.is_set():
            return None
        last = self._rounds + (1 if self._question is None else 2)
        self._wanted.set()
        until = time.monotonic() + 2 * MAX_ANSWER_S
        while self._told is None and self._rounds < last and time.monotonic() < until:
            question, now = self._question, time.monotonic()
            if question is not None and now >= question.since + MAX_ANSWER_S:
                return _described(question, now - question.since)
            time.sleep(0.005)
        return self._told

    def _ask(self) -> None:
        """Asks ranks of other hosts, each time that it is wanted; of a thread of its own."""
        peers = _connected(self._addresses, self._ended)
        self._open.set()
        while self._wanted.wait() and not self._ended.is_set():
            self._wanted.clear()
            self._ask_once(peers)
            self._rounds += 1

    def _ask_once(self, peers: dict[int, Peer]) -> None:
        for rank, peer in list(peers.items()):
            self._question = _Question(rank, time.monotonic())
            try:
                told = peer.lost()
            except RuntimeError:  # it has ended, which the waits notice by themselves
                del peers[rank]
                continue
            if told is not None:
                self._told = LostRank(*told)
        self._question = None


def _connected(
    addresses: Mapping[int, Address], ended: threading.Event
) -> dict[int, Peer]:
    """Returns the ranks that can be asked, once all ranks are connected to them."""
    peers = dict[int, Peer]()
    for rank, address in addresses.items():
        try:
            peers[rank] = Peer(address)
        except (OSError, RuntimeError) as e:
            log.warning(
                "rank %d cannot be asked at %s port %d whether it runs (%s); if its process "
                "stops or its link is cut, that is noticed after the process group's time-out. "
                "Set GLOO_SOCKET_IFNAME on every rank to the network interface between the hosts",
                *(rank, address.host, address.port, e),
            )
    until = time.monotonic() + OPEN_TIMEOUT_S
    for rank, peer in list(peers.items()):
        try:
            while not (ended.is_set() or peer.is_open() or time.monotonic() > until):
                ended.wait(0.01)
        except RuntimeError:  # it has ended
            del peers[rank]
    return peers


def _described(who: _Question | int, silent_s: float) -> LostRank:
    if isinstance(who, _Question):
        return LostRank(who.rank, f"has not answered for {silent_s:.1f} s")
    since = f", for {silent_s:.1f} s or more" if silent_s else ""
    return LostRank(who, f"is stopped (by SIGSTOP or Ctrl-Z){since}")


@cache
def _watched() -> WeakSet[Heartbeat]:
    """Returns the groups that the one thread of this process watches, and starts it."""
    watched, ended = WeakSet[Heartbeat](), threading.Event()

    def watch() -> None:
        last = time.monotonic()
        while not ended.wait(POLL_S):
            now = time.monotonic()
            for heartbeat in list(watched):
                heartbeat.poll(now, resumed=now - last > MAX_POLL_GAP_S)
            last = now

    thread = threading.Thread(target=watch, name="hetconv-heartbeat", daemon=True)
    thread.start()

    @atexit.register
    def end() -> None:  # before Python ends, which stops threads anywhere
        for heartbeat in list(watched):
            heartbeat.stop()
        ended.set()
        thread.join(MAX_JOIN_S)

    return watched
