"""`bench gpu` runs commands as stages: what counts as passed, and what ends one that hangs."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from bench import gpu
from bench.__main__ import COMMANDS, module_of
from bench.gpu import Stage
from tests import ROOT


def stage(code: str, limit: float = 60, **rest: Any) -> Stage:
    return Stage("stage", ("-c", code), limit, **rest)


def test_a_stage_passes_or_fails_by_its_status() -> None:
    good = gpu.performed(
        stage(
            "import os; print(os.environ['MARK']); print('{}')",
            env={"MARK": "3 passed"},
        ),
        100,
    )
    assert (good.outcome, good.said) == ("passed", "3 passed")
    bad = gpu.performed(stage("raise SystemExit('no such thing')"), 100)
    assert (bad.outcome, bad.said) == ("failed", "no such thing")
    assert "no such thing" in gpu.table([good, bad])


def test_a_stage_in_which_nothing_ran_did_not_pass() -> None:
    silent = gpu.performed(stage("print('2 skipped')", expects=gpu.PASSED), 100)
    assert (silent.outcome, "2 skipped" in silent.said) == ("not run", True)
    missing = gpu.performed(stage("print(1)", needs=("json", "no_such_module")), 100)
    assert (missing.outcome, missing.said) == (
        "not run",
        "no_such_module is not installed",
    )
    assert gpu.performed(stage("print(1)"), 5).outcome == "not run"


def test_a_result_tells_of_no_path_of_the_machine() -> None:
    done = gpu.performed(stage(f"print({str(gpu.ROOT / 'tests')!r})"), 100)
    assert done.command == "python -c print('./tests')"


def test_a_stage_that_hangs_is_ended_with_what_it_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu, "GRACE_S", 0.2)
    stubborn = (
        "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        "print('on', flush=True); time.sleep(60)"
    )
    child = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {stubborn!r}])"
    )
    status, in_time, lines = gpu.streamed([sys.executable, "-c", child], 1.0, {})
    assert status != 0
    assert not in_time
    assert lines[:1] == ["on"]


def test_every_stage_runs_what_is_there(tmp_path: Path) -> None:
    names = []
    for each in gpu.stages(tmp_path):
        names.append(each.name)
        command = [word.format(seconds=1) for word in each.command]
        paths = [word for word in command if word.startswith("tests/")]
        assert all((ROOT / path).exists() for path in paths)
        if command[1] == "pytest":
            assert paths
            assert each.expects == gpu.PASSED
            continue
        parser = argparse.ArgumentParser()
        import_module(module_of(command[2])).add_arguments(parser)
        assert command[2] in COMMANDS
        assert parser.parse_args(command[3:]).output.parent == tmp_path
    assert names[-1] == "kernels against cuDNN"
