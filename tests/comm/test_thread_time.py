"""Whether a thread is told that its core is its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hetconv.comm import thread_time
from hetconv.comm.thread_time import (
    MAX_WAITING_PART,
    QUERY_INTERVAL_S,
    OwnCore,
    waits_s,
)


class Core:
    """What a thread had of one so far, in seconds."""

    now, waited = 0.0, 1.0

    def perf_counter(self) -> float:
        return self.now

    def passes(self, seconds: float, waiting: float) -> None:
        self.now += seconds
        self.waited += waiting


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Core:
    made = Core()
    monkeypatch.setattr(thread_time, "time", made)
    monkeypatch.setattr(thread_time, "waits_s", lambda: made.waited)
    return made


def test_a_core_is_ones_own_as_long_as_one_hardly_waits_for_it(core: Core) -> None:
    own = OwnCore()
    assert not own()  # nothing is known yet
    core.passes(1.0, 0.9 * MAX_WAITING_PART)
    assert own()
    core.passes(1.0, 1.1 * MAX_WAITING_PART)
    assert not own()
    core.passes(1.0, 0.0)
    assert own()


def test_it_is_asked_once_in_some_turns_of_the_system(core: Core) -> None:
    own = OwnCore()
    core.passes(1.0, 0.0)
    assert own()
    core.passes(0.9 * QUERY_INTERVAL_S, QUERY_INTERVAL_S)
    assert own()
    core.passes(0.2 * QUERY_INTERVAL_S, 0.0)
    assert not own()


def test_nobody_has_a_core_of_its_own_where_the_system_does_not_tell(
    core: Core,
) -> None:
    core.waited = 0.0
    own = OwnCore()
    core.passes(1.0, 0.0)
    assert not own()


@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(),
    reason="the system does not tell waits for a core",
)
def test_waits_for_a_core_that_is_shared_are_told() -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    rival = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        before = waits_s()
        while waits_s() < before + 0.02:  # the test's timeout is the limit
            pass
    finally:
        rival.kill()
        rival.wait()
        os.sched_setaffinity(0, cores)
