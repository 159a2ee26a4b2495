"""Workers end with whatever used them, and leave nothing."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

import hetconv
from bench.shared.machine import children_of
from hetconv.workers import rank_processes
from tests import ROOT
from tests.workers.models import Failing, height_plan

X = torch.ones(1, 2, 9, 8)
IN_TIME_S = 60.0  # a guard against hanging
SCRIPT = """\
import os, torch, hetconv
from tests.workers.models import Failing, height_plan
model, x = Failing().eval(), torch.ones(1, 2, 9, 8)
workers = hetconv.Workers(height_plan(model, x), devices="cpu,cpu")
split = workers.parallelize(model)
split(x)
"""


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def comes_true(what: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + IN_TIME_S
    while not (true := what()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return true


def left() -> tuple[list[str], set[int], int]:
    """Temporary files, children, and open descriptors."""
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    return os.listdir(tempfile.gettempdir()), set(children_of(os.getpid())), descriptors


def named_memory(pid: int) -> set[str]:
    """Files in memory that a process has mapped or opened, and that stay when it is killed."""
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found.add(str(descriptor.readlink()))
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        found.update(line.split()[5:6])
    return {name for name in found if name.startswith("/dev/shm")}


# Where these tests are started in the background, programs are born deaf to it.
HEARS_CTRL_C = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
)


@contextmanager
def program(text: str) -> Iterator[subprocess.Popen[str]]:
    """A program in a session of its own, which is killed in the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-c", HEARS_CTRL_C + text],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_nothing_is_left_after_close_or_when_nothing_refers_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = Failing().eval()
    plan = height_plan(model, X)
    # What the first one imports and opens for good is not counted.
    with hetconv.Workers(plan, ["cpu", "cpu"]) as workers:
        split = workers.parallelize(model)
        split(X)
    workers.close()
    with pytest.raises(hetconv.HetConvError, match="closed: close was called"):
        split(X)
    before = left()
    workers = hetconv.Workers(plan, ["cpu", "cpu"])
    split = workers.parallelize(model)
    split(X)
    pids = set(children_of(os.getpid())) - before[1]
    assert len(pids) == 2
    assert not any(map(named_memory, pids))
    del workers
    split(X)
    del split  # which is all that there is
    assert left() == before
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize("how", ["kill", "raise"])
def test_what_befalls_one_worker_alone_ends_all(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_processes, "MAX_APART_S", 0.5)
    model = Failing().eval()
    before = left()[1]
    workers = hetconv.Workers(height_plan(model, X), ["cpu", "cpu"])
    split = workers.parallelize(model)
    error, text = {
        "kill": (hetconv.LostRankError, r"rank 1 \(cpu\) was killed by SIGKILL"),
        "raise": (KeyError, r"(?s)worker of rank 1 \(cpu\).*raise KeyError"),
    }[how]
    with pytest.raises(error, match=text) as raised:
        split(X, how, 1)
    assert "the workers are closed, make new ones" in str(raised.value)
    assert set(children_of(os.getpid())) == before
    with pytest.raises(hetconv.HetConvError, match=r"the workers are closed: .*rank 1"):
        split(X)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_a_program_that_is_ended_within_a_call(
    number: signal.Signals,
) -> None:
    with program(SCRIPT + "split(x, 'sleep', 1)") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "called\n"
        pids = children_of(process.pid)
        assert len(pids) == 2
        if (
            number == signal.SIGINT
        ):  # all ranks get it, as from a user who sends it to all
            for pid in (*pids, process.pid):
                os.kill(pid, number)
        else:
            process.kill()
        assert comes_true(lambda: not any(map(is_alive, (*pids, process.pid))))
        _, errors = process.communicate(timeout=IN_TIME_S)
    assert errors.count("KeyboardInterrupt\n") == (number == signal.SIGINT)
    assert process.returncode == -number


def test_a_forked_process_neither_calls_nor_ends_them_but_the_end_of_the_program_does() -> (
    None
):
    fork = """\
if os.fork() == 0:
    try:
        split(x)
    except hetconv.HetConvError as e:
        print(e, flush=True)
    workers.close()
    raise SystemExit
os.wait()
print(split(x).shape)
"""
    with program(SCRIPT + fork) as process:
        out, errors = process.communicate(timeout=IN_TIME_S)  # of workers, too
    assert "from which this one was forked" in out
    assert out.endswith("torch.Size([1, 4, 9, 8])\n")
    assert process.returncode == 0
    assert not errors
