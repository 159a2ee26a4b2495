"""What tells that another rank runs: the state of its process, and its answers."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from hetconv.comm.watch import heartbeat
from hetconv.comm.watch.heartbeat import Heartbeat
from hetconv.comm.watch.liveness import (
    Address,
    Answers,
    Peer,
    c10d,
    is_stopped,
    is_visible,
    open_answers,
)

MAX_WAIT_S = 30.0


def comes_true(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + MAX_WAIT_S
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


@pytest.fixture
def answers() -> Answers:
    return Answers(c10d.HashStore(), 1)


def test_a_process_is_stopped_until_it_is_continued(
    sleeper: subprocess.Popen[bytes],
) -> None:
    assert not is_stopped(sleeper.pid)
    sleeper.send_signal(signal.SIGSTOP)
    assert comes_true(lambda: is_stopped(sleeper.pid))
    sleeper.send_signal(signal.SIGCONT)
    assert comes_true(lambda: not is_stopped(sleeper.pid))


def test_a_process_that_has_ended_is_not_seen(sleeper: subprocess.Popen[bytes]) -> None:
    assert is_visible(sleeper.pid)
    assert is_visible(os.getpid())
    assert not is_visible(0)  # as the system names a process of another namespace
    sleeper.kill()
    sleeper.wait()
    assert not is_visible(sleeper.pid)
    assert not is_stopped(sleeper.pid)


def test_a_rank_that_is_asked_tells_whom_it_has_lost(answers: Answers) -> None:
    peer, another_group = Peer(answers.address), Answers(c10d.HashStore(), 1)
    assert peer.lost() is None
    answers.tell_lost(3, "is stopped")
    assert comes_true(lambda: peer.lost() == (3, "is stopped"))
    assert Peer(another_group.address).lost() is None


def test_another_process_at_the_same_address_is_no_rank(answers: Answers) -> None:
    with pytest.raises(OSError, match="another process answers"):
        Peer(answers.address._replace(token="of another rank"))


def test_ranks_answer_where_the_host_of_the_store_finds_them() -> None:
    store = c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    nested = c10d.PrefixStore("a", c10d.PrefixStore("b", store))
    assert Answers(nested, 1).address.host == "127.0.0.1"


def test_ranks_answer_at_the_interface_that_gloo_uses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(socket, "getaddrinfo", None)
    assert Answers(c10d.HashStore(), 1).address.host == "127.0.0.1"


def test_a_rank_that_cannot_listen_has_no_address(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no port is free")

    monkeypatch.setattr(dist, "TCPStore", refuse)
    other = Address("10.0.0.1", 1, "token", 1)
    assert open_answers(None, 1, lambda own: [own, other]) == (None, {1: other})
    assert "no port is free" in caplog.text


def test_a_rank_out_of_reach_is_told_once_and_never_lost(
    answers: Answers, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "hetconv")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    watched = Heartbeat()
    watched.watch({}, {1: Address("127.0.0.1", port, "", 1), 2: answers.address})
    try:
        assert watched.cause() is None
        assert "rank 1 cannot be asked" in caplog.text
        assert "GLOO_SOCKET_IFNAME" in caplog.text
        answers.tell_lost(0, "is stopped")
        lost = (0, "is stopped")  # as rank 2 says
        assert comes_true(lambda: watched.cause() == lost)
    finally:
        watched.stop()


def test_a_rank_is_asked_once_all_are_connected_to_it() -> None:
    """Before, its store may look up the names of hosts, and not answer meanwhile."""
    of_two = Answers(c10d.HashStore(), 2)
    first = Peer(of_two.address)
    assert not first.is_open()
    Peer(of_two.address)
    assert first.is_open()


class Silent:
    """A rank that answers once it is told to."""

    def __init__(self) -> None:
        self.answer = threading.Event()

    def lost(self) -> None:
        self.answer.wait()


def test_a_rank_that_does_not_answer_is_why_a_wait_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silent = Silent()
    monkeypatch.setattr(heartbeat, "MAX_ANSWER_S", 0.1)
    monkeypatch.setattr(heartbeat, "_connected", lambda *_: {1: silent})
    watched = Heartbeat()
    watched.watch({}, {1: Address("", 0, "", 1)})
    found = watched.cause()
    silent.answer.set()
    watched.stop()
    assert found is not None
    assert found.rank == 1
    assert "has not answered for 0." in found.how
