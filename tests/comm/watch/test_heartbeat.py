"""A rank that does not run any more is named by those that wait for it, and only such a rank."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hetconv
from hetconv.comm import rank_group
from hetconv.comm.shared_memory import Channel
from hetconv.comm.watch import heartbeat
from hetconv.comm.watch.heartbeat import LOST_AFTER_S, MIN_WAIT_S, Heartbeat
from hetconv.sharding.split import Split
from tests.nets import plan_of
from tests.spawn import on_ranks, outcomes

STEPS, FAULT_STEP = 6, 3
MAX_STOP_S = 40  # a test that fails leaves nothing that is stopped


@contextmanager
def other_hosts() -> Iterator[None]:
    """No rank finds another one on its host."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_group, "open_channels", lambda *_: {})
        yield


@contextmanager
def two_hosts() -> Iterator[None]:
    """Ranks 0 and 1 are on one host, rank 2 on another one."""
    real = rank_group.open_channels

    def of_host(rank: int, *args: Any) -> dict[int, Channel]:
        found = real(rank, *args)
        return {p: c for p, c in found.items() if 2 not in (rank, p)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_group, "open_channels", of_host)
        yield


WAYS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "shared memory": nullcontext,
    "gloo on one host": rank_group.through_backend,
    "two hosts": two_hosts,
    "other hosts": other_hosts,
}


@contextmanager
def soon(lost_after_s: float) -> Iterator[None]:
    """Ranks are lost sooner. The one thread of a process keeps the interval of its polls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heartbeat, "MIN_WAIT_S", 0.2)
        patch.setattr(heartbeat, "LOST_AFTER_S", lost_after_s)
        yield


def trained(way: str, fault: Callable[[], None]) -> str:
    """What a training loop says in which the ranks do something else before one step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1))
    splits = {name: Split("height", (3, 3, 2)) for name in ("0", "1")}
    with WAYS[way]():
        try:
            cut = hetconv.parallelize(
                model, plan_of(model, splits, 3), group=dist.new_group()
            )
            for step in range(STEPS):
                if step == FAULT_STEP:
                    fault()
                cut(torch.randn(2, 3, 8, 8)).sum().backward()
        except hetconv.LostRankError as error:
            return str(error)
    return "no error"


def shell(command: str) -> None:
    """Runs a command beside this process."""
    subprocess.Popen(["sh", "-c", command], start_new_session=True)


def stopped(way: str, odd: int, lost_after_s: float, folder: str) -> str:
    """What is said where one rank is stopped until the others have said something."""

    def fault() -> None:
        if dist.get_rank() == odd:
            tenths, pid = MAX_STOP_S * 10, os.getpid()
            shell(
                f"for i in $(seq {tenths}); do [ $(ls {folder} | wc -l) -ge 2 ] && break; "
                f"sleep 0.1; done; kill -CONT {pid}"
            )
            os.kill(pid, signal.SIGSTOP)

    with soon(lost_after_s):
        said = trained(way, fault)
    Path(folder, str(dist.get_rank())).touch()
    return said


@pytest.mark.parametrize(
    ("way", "odd", "how", "lost_after_s"),
    [
        ("shared memory", 0, "is stopped", LOST_AFTER_S),
        ("gloo on one host", 1, "is stopped", 2.0),
        ("two hosts", 1, "", 2.0),
        ("two hosts", 2, "has not answered", 2.0),
        ("other hosts", 0, "has not answered", 2.0),
    ],
)
def test_a_stopped_rank_is_named(
    way: str, odd: int, how: str, lost_after_s: float, tmp_path: Path
) -> None:
    said = on_ranks(3, stopped, way, odd, lost_after_s, str(tmp_path))
    others = [said[rank] for rank in range(3) if rank != odd]
    for text in others:
        assert f"of 3 lost rank {odd}, which {how}" in text
        assert "start them again from the last checkpoint" in text
    # One of them has noticed it long before the time-out, and may have told the other one.
    assert any(f" for {lost_after_s:.0f}." in text for text in others), others
    assert said[odd] != "no error"


def busy(way: str, hold: bool) -> str:
    """What is said where one rank computes for longer than another may be silent."""

    def fault() -> None:
        if dist.get_rank() == 1:
            if hold:  # as an operator that does not give Python's lock to other threads
                ctypes.PyDLL(None).usleep(4_000_000)
            else:
                time.sleep(4.0)

    with soon(1.0):
        return trained(way, fault)


@pytest.mark.parametrize(
    ("way", "hold"), [("shared memory", False), ("other hosts", True)]
)
def test_a_slow_rank_is_not_lost(way: str, hold: bool) -> None:
    assert on_ranks(3, busy, way, hold) == ["no error"] * 3


def all_stopped(way: str) -> str:
    """What is said where all ranks are stopped and continued, at different times."""

    def fault() -> None:
        found: list[int] = [0] * 3
        dist.all_gather_object(found, os.getpid())
        if dist.get_rank() == 0:
            others = f"{found[1]} {found[2]}"
            shell(
                f"kill -STOP {found[0]}; sleep 0.8; kill -STOP {others}; sleep 4; "
                f"kill -CONT {others}; sleep 0.8; kill -CONT {found[0]}"
            )
            time.sleep(1.0)

    with soon(3.0):
        return trained(way, fault)


@pytest.mark.parametrize("way", ["shared memory", "other hosts"])
def test_ranks_that_were_all_stopped_go_on(way: str) -> None:
    assert on_ranks(3, all_stopped, way) == ["no error"] * 3


def killed() -> str:
    def fault() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    return trained("other hosts", fault)


def test_a_killed_rank_is_not_taken_for_another_one_that_is_silent() -> None:
    (ok, first), (alive, _), (also, last) = outcomes(3, killed)
    assert ok
    assert also
    assert not alive
    assert all("got no answer from another rank" in text for text in (first, last))


class Clock(NamedTuple):
    """A heartbeat that waits, with the ranks that are stopped; time is what a test says."""

    heartbeat: Heartbeat
    stopped: set[int]
    ended: list[str]

    def poll(self, seconds: float, *, resumed: bool = False) -> int | None:
        self.heartbeat.poll(self.heartbeat._since + seconds, resumed)
        return None if self.heartbeat.lost is None else self.heartbeat.lost.rank


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Ranks 1 and 2 have the processes 10 and 20."""
    stopped, ended = set[int](), list[str]()
    watched = Heartbeat(lambda: ended.append("waits"))
    watched._near = {1: 10, 2: 20}
    monkeypatch.setattr(heartbeat, "is_stopped", lambda pid: pid // 10 in stopped)
    return Clock(watched, stopped, ended)


def test_a_rank_is_lost_that_is_stopped_while_another_waits(clock: Clock) -> None:
    clock.stopped.add(2)
    assert clock.poll(100.0) is None  # this rank does not wait
    with clock.heartbeat:
        assert clock.poll(MIN_WAIT_S / 2) is None
        assert clock.poll(MIN_WAIT_S) is None
        assert clock.poll(MIN_WAIT_S + LOST_AFTER_S / 2) is None
        assert not clock.ended
        assert clock.poll(MIN_WAIT_S + LOST_AFTER_S) == 2
        assert clock.ended == ["waits"]
        with pytest.raises(ConnectionError, match=r"rank 2 is stopped .* for 6\.0 s"):
            clock.heartbeat.check()
        assert clock.poll(100.0) == 2
        assert clock.ended == ["waits"]


def test_a_rank_that_goes_on_in_time_is_not_lost(clock: Clock) -> None:
    with clock.heartbeat:
        for start in (2.0, 2.0 + LOST_AFTER_S):
            clock.stopped.add(1)
            assert clock.poll(start) is None
            assert clock.poll(start + LOST_AFTER_S - 1) is None
            clock.stopped.clear()
            assert clock.poll(start + LOST_AFTER_S - 0.5) is None
        clock.heartbeat.check()


def test_a_rank_that_was_stopped_itself_counts_anew(clock: Clock) -> None:
    with clock.heartbeat:
        clock.stopped.add(1)
        assert clock.poll(2.0) is None
        assert clock.poll(100.0, resumed=True) is None
        assert clock.poll(100.0 + LOST_AFTER_S - 1) is None
        assert clock.poll(100.0 + LOST_AFTER_S) == 1


def test_a_wait_that_fails_tells_the_rank_that_is_stopped(clock: Clock) -> None:
    assert clock.heartbeat.cause() is None
    clock.stopped.add(2)
    lost = clock.heartbeat.cause()
    assert lost is not None
    assert lost.rank == 2
    assert clock.ended == ["waits"]
