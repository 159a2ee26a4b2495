"""Local ranks: their result, and what follows when one of them fails."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import hetconv
from hetconv.autotune.launch import supervisor
from hetconv.autotune.launch.launcher import parse_devices, run_on
from hetconv.autotune.launch.supervisor import RankFailedError, log_last_action
from hetconv.comm.rank_group import all_gather_object, rank_group_of
from hetconv.runtime.local_rank import CPU_SETTINGS
from tests import ROOT

PAIR = parse_devices("cpu,cpu@0.5")


def behave(how: str) -> Any:
    """Fails on rank 1 in one of several ways while rank 0 waits for it, or is busy."""
    log_last_action("began")
    if dist.get_rank() == 1:
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exits":
            os._exit(7)
        if how == "refuses":
            raise hetconv.PlanError("no such plan")
        if how != "is right":
            raise ValueError("of\ntwo lines")
    elif how == "raises meanwhile":
        time.sleep(100)
    dist.barrier()
    return {"rank": dist.get_rank()}


def test_the_result_of_rank_0_is_returned() -> None:
    assert run_on(PAIR, behave, "is right") == {"rank": 0}


def many_gathers() -> int:
    """Makes messages of which gloo's threads may still hold some when the process ends."""
    group = rank_group_of()
    return sum(sum(all_gather_object(group, 1)) for _ in range(20))


def test_ranks_end_without_error_right_after_a_message() -> None:
    assert run_on(PAIR, many_gathers) == 40


def settings() -> dict[str, str]:
    return {name: os.environ[name] for name in CPU_SETTINGS}


def test_ranks_have_the_settings_for_cpus_unless_others_are_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in CPU_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    assert run_on(PAIR[:1], settings) == CPU_SETTINGS
    assert not CPU_SETTINGS.keys() & os.environ.keys()
    name = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
    monkeypatch.setenv(name, "7")
    assert run_on(PAIR[:1], settings) == CPU_SETTINGS | {name: "7"}


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("is killed", "was killed by SIGKILL; last action: began"),
        ("exits", "ended with status 7; last action: began"),
        ("refuses", "failed: no such plan"),
        ("raises", "failed: ValueError: of\ntwo lines; last action: began"),
        ("raises meanwhile", "failed: ValueError: of\ntwo lines; last action: began"),
    ],
)
def test_the_first_rank_that_fails_is_named_and_ends_the_others(
    how: str, message: str
) -> None:
    with pytest.raises(RankFailedError) as error:
        run_on(PAIR, behave, how)
    assert str(error.value) == f"rank 1 (cpu@0.5) {message}"
    assert isinstance(error.value, hetconv.HetConvError)
    stacks = getattr(error.value, "__notes__", [])
    assert ["in behave" in stack for stack in stacks] == [True] * ("failed" in message)


def test_a_rank_that_is_killed_as_it_logs_has_the_action_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_action_file", tmp_path / "0.action")
    log_last_action("began")

    def killed(file: Path, text: str, **_: Any) -> None:
        file.write_bytes(b"")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", killed)
        with pytest.raises(KeyboardInterrupt):
            log_last_action("went on")
    assert supervisor._last_action(tmp_path, 0) == "began"


class LateStatus:
    """A process whose sentinel is ready before its exit status is known."""

    exitcode: int | None = None

    def __init__(self) -> None:
        self.sentinel, end_of_process = os.pipe()
        os.close(end_of_process)

    def join(self) -> None:
        self.exitcode = 0


@pytest.mark.timeout(20)
def test_an_exit_status_is_waited_for(tmp_path: Path) -> None:
    supervisor._wait([LateStatus(), LateStatus()], tmp_path, ["cpu", "cpu"], 0.0, None)  # type: ignore[list-item]


SLEEPING = """
import os, sys, time
from contextlib import suppress
import torch.distributed as dist
from hetconv.autotune.launch.launcher import parse_devices, run_on

def sleep(folder, holds_lock):
    rank = os.environ["RANK"]
    open(f"{folder}/{rank}", "w").write(str(os.getpid()))
    if holds_lock and rank == "0":
        dist.FileStore(f"{folder}/missing/store", 2)
    time.sleep(100)

if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        run_on(parse_devices("cpu,cpu"), sleep, sys.argv[1], sys.argv[2:] == ["holds_lock"])
"""


def launched(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """A launcher of two ranks that write who they are and sleep, in a session of its own."""
    script = folder / "sleeping.py"
    script.write_text(SLEEPING)
    env = {k: v for k, v in os.environ.items() if k != "RANK"}
    return subprocess.Popen(
        [sys.executable, str(script), str(folder), *arguments],
        env=env | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A process in the background ignores SIGINT by default.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.parametrize(
    ("how", "arguments"),
    [
        (signal.SIGKILL, ()),
        (signal.SIGTERM, ()),
        (signal.SIGINT, ()),
        (signal.SIGKILL, ("holds_lock",)),
    ],
)
def test_ranks_end_with_the_process_that_started_them(
    how: signal.Signals, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    """Also one that holds Python's lock while it waits within a C++ library."""
    launcher = launched(tmp_path, *arguments)
    files = [tmp_path / "0", tmp_path / "1"]
    _until(lambda: all(f.exists() and f.read_text() for f in files))
    launcher.send_signal(how)
    _until(lambda: not any(Path("/proc", f.read_text()).exists() for f in files))
    launcher.communicate()
    _until(lambda: not list(tmp_path.glob("hetconv-ranks-*")))


def test_an_interrupt_from_a_terminal_shows_no_traceback_of_a_rank(
    tmp_path: Path,
) -> None:
    """Ranks get it too, while they import torch; and nothing waits for them."""
    launcher = launched(tmp_path)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    while len(children.read_text().split()) < 3:  # one tracks resources
        pass  # at once, so that the last rank is just being started
    os.killpg(launcher.pid, signal.SIGINT)
    _, said = launcher.communicate()
    assert "Traceback" not in said


def _until(done: Any) -> None:
    while not done():  # the test's timeout is the limit
        time.sleep(0.05)


def pages_of_a_step() -> int:
    """Returns the fewest pages that the system gives to one of 20 steps of 120 MiB."""
    import torch

    from hetconv.autotune.measure.timer import pages_taken

    found = []
    for _ in range(20):
        before = pages_taken()
        x = torch.zeros(6 << 20)
        kept = [x + 1 for _ in range(4)]
        del x, kept
        found.append(pages_taken() - before)
    return min(found)


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc",
    reason="other C libraries keep freed memory in other ways",
)
def test_ranks_keep_the_memory_that_a_step_frees() -> None:
    assert run_on(PAIR[:1], pages_of_a_step) < 1000  # of 30720 pages of 4 KiB
