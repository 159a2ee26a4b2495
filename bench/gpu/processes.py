"""A stage's process: run within its limit, ended with all that it started."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from bench.shared.machine import ROOT

from .stages import NO_TIME, Done, Outcome, Stage

GRACE_S = 5.0  # that a stage gets to end by itself once it is interrupted
START_AND_END_S = 20.0  # of a benchmark, which its own budget leaves for them
MIN_LIMIT_S = 10.0


def performed(stage: Stage, left: float) -> Done:
    """Runs a stage; prints its output as it comes.

    Args:
        stage: The stage.
        left: Seconds that are left for it, beside its own limit.
    """
    # As in any checkout.
    said = f"python {' '.join(stage.command)}".replace(str(ROOT), ".")
    missing = [m for m in stage.needs if importlib.util.find_spec(m) is None]
    if missing:
        why = f"{', '.join(missing)} is not installed"
        return Done(stage.name, "not run", 0.0, why, said)
    limit = min(stage.limit, left - GRACE_S)
    if limit < min(MIN_LIMIT_S, stage.limit):
        return Done(stage.name, "not run", 0.0, NO_TIME, said)
    # What starts up or winds down takes time too: the stage's own budget ends before it
    # would be interrupted.
    budget = f"{max(limit - START_AND_END_S, 5):.0f}"
    command = [
        sys.executable,
        *(c.replace("{seconds}", budget) for c in stage.command),
    ]
    print(f"\n--- {stage.name}, at most {limit:.0f} s: {' '.join(command)}", flush=True)
    start = time.monotonic()
    status, in_time, lines = streamed(command, limit, os.environ | stage.env)
    last = next(
        (text for text in reversed(lines) if text and not text.startswith("{")), ""
    )
    outcome: Outcome = "passed" if status == 0 else "failed"
    if not in_time:
        outcome = "timed out"
    elif outcome == "passed" and not re.search(stage.expects, "\n".join(lines)):
        outcome, last = "not run", f"status 0, but nothing passed: {last}"
    return Done(
        stage.name, outcome, round(time.monotonic() - start, 1), last[:200], said
    )


def streamed(
    command: Sequence[str], limit: float, env: dict[str, str]
) -> tuple[int, bool, list[str]]:
    """(status, whether it ended in time, lines of output). What it started ends with it."""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=env,
        cwd=ROOT,
        start_new_session=True,
    ) as p:
        late = threading.Event()

        def interrupt() -> None:
            late.set()
            _signalled(
                p.pid, signal.SIGINT
            )  # so that pytest still says what it has found
            killer.start()

        killer = threading.Timer(GRACE_S, lambda: _signalled(p.pid, signal.SIGKILL))
        timer = threading.Timer(limit, interrupt)
        timer.start()
        lines = []
        try:
            assert p.stdout is not None
            for text in p.stdout:
                print(text, end="", flush=True)
                lines.append(text.rstrip())
            status = p.wait()
        finally:
            timer.cancel()
            killer.cancel()
            _signalled(p.pid, signal.SIGKILL)
    return status, not late.is_set(), lines


def _signalled(group: int, what: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, what)
