"""Ranks of a host find each other, and nobody else comes in. Ranks are threads here."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from hetconv.comm.rendezvous import GREETING, connect


def said(by: socket.socket, to: socket.socket, word: bytes) -> bytes:
    by.send(word)
    return to.recv(100)


class Hosts:
    """Ranks as threads, each of which finds those that it can reach."""

    def __init__(self, world: int):
        self.world, self.found, self._words = (
            world,
            [dict[int, socket.socket]()] * world,
            list[Any](),
        )
        self._all = threading.Barrier(world)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        for found in self.found:
            for to_peer in found.values():
                to_peer.close()

    def gather(self, rank: int, word: Any) -> list[Any]:
        self._all.wait()
        if rank == 0:
            self._words = [None] * self.world
        self._all.wait()
        self._words[rank] = word
        self._all.wait()
        return list(self._words)

    def meet(
        self, gather: Callable[[int, Any], list[Any]]
    ) -> list[dict[int, socket.socket]]:
        def rank(r: int) -> None:
            self.found[r] = connect(r, lambda word: gather(r, word))

        threads = [threading.Thread(target=rank, args=(r,)) for r in range(self.world)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        return self.found


def test_ranks_of_a_host_reach_each_other() -> None:
    with Hosts(4) as hosts:
        found = hosts.meet(hosts.gather)
        assert [sorted(f) for f in found] == [
            [1, 2, 3],
            [0, 2, 3],
            [0, 1, 3],
            [0, 1, 2],
        ]
        for r, s in ((0, 1), (2, 3), (3, 0)):
            assert said(
                found[r][s], found[s][r], b"%d to %d" % (r, s)
            ) == b"%d to %d" % (r, s)


def test_who_is_out_of_reach_is_left_to_the_backend() -> None:
    """Rank 2 is on another host."""
    with Hosts(4) as hosts:

        def gather(rank: int, word: Any) -> list[Any]:
            words = hosts.gather(rank, word)
            if all(words) and isinstance(words[0][0], str):
                return [
                    (f"{w[0]} elsewhere" if (rank == 2) != (r == 2) else w[0], w[1])
                    for r, w in enumerate(words)
                ]
            return words

        found = hosts.meet(gather)
        assert [sorted(f) for f in found] == [[1, 3], [0, 3], [], [0, 1]]


def test_a_system_without_such_memory_leaves_all_to_the_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with Hosts(2) as hosts:
        assert hosts.meet(hosts.gather) == [{}, {}]


def test_a_stranger_is_not_let_in() -> None:
    strangers: list[socket.socket] = []
    with Hosts(2) as hosts:

        def gather(rank: int, word: Any) -> list[Any]:
            words = hosts.gather(rank, word)
            if rank == 1 and all(words):  # before rank 1 knocks
                for knock in (b"x", b"x" * GREETING.size, b""):
                    strangers.append(
                        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    )
                    strangers[-1].connect(words[0][0])
                    if knock:
                        strangers[-1].send(knock)
                    else:
                        strangers[-1].close()
            return words

        here, there = hosts.meet(gather)
        assert said(here[1], there[0], b"welcome") == b"welcome"
        for s in strangers:
            s.close()
