"""`bench gpu` runs commands as stages: what counts as passed, and what ends one that hangs."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import COMMANDS, module_of
from bench.gpu import processes, stages, suite
from bench.gpu.processes import performed, streamed
from bench.gpu.stages import PASSED, Done, Stage
from bench.shared.machine import ROOT as CHECKOUT
from bench.shared.machine import results_file, save
from hetconv.errors import KernelError
from tests import ROOT


def stage(code: str, limit: float = 60, **rest: Any) -> Stage:
    return Stage("stage", ("-c", code), limit, **rest)


def test_a_stage_passes_or_fails_by_its_status() -> None:
    good = performed(
        stage(
            "import os; print(os.environ['MARK']); print('{}')",
            env={"MARK": "3 passed"},
        ),
        100,
    )
    assert (good.outcome, good.said) == ("passed", "3 passed")
    bad = performed(stage("raise SystemExit('no such thing')"), 100)
    assert (bad.outcome, bad.said) == ("failed", "no such thing")
    assert "no such thing" in suite.table([good, bad])


def test_a_stage_in_which_nothing_ran_did_not_pass() -> None:
    silent = performed(stage("print('2 skipped')", expects=PASSED), 100)
    assert (silent.outcome, "2 skipped" in silent.said) == ("not run", True)
    missing = performed(stage("print(1)", needs=("json", "no_such_module")), 100)
    assert (missing.outcome, missing.said) == (
        "not run",
        "no_such_module is not installed",
    )
    late = performed(stage("print(1)"), 5)
    assert (late.outcome, late.said) == ("not run", stages.NO_TIME)


def test_a_result_tells_of_no_path_of_the_machine() -> None:
    done = performed(stage(f"print({str(CHECKOUT / 'tests')!r})"), 100)
    assert done.command == "python -c print('./tests')"


def test_a_stage_that_hangs_is_ended_with_what_it_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "GRACE_S", 0.2)
    stubborn = (
        "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        "print('on', flush=True); time.sleep(60)"
    )
    child = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {stubborn!r}])"
    )
    status, in_time, lines = streamed([sys.executable, "-c", child], 1.0, {})
    assert status != 0
    assert not in_time
    assert lines[:1] == ["on"]


def test_every_stage_runs_what_is_there(tmp_path: Path) -> None:
    names = []
    for each in stages.stages(tmp_path):
        names.append(each.name)
        assert each.rehearsal[:1] == ("-m",)
        command = [word.format(seconds=1) for word in each.command]
        paths = [word for word in command if word.startswith("tests/")]
        assert all((ROOT / path).exists() for path in paths)
        if command[1] == "pytest":
            assert paths
            assert each.expects == PASSED
            continue
        parser = argparse.ArgumentParser()
        import_module(module_of(command[2])).add_arguments(parser)
        assert command[2] in COMMANDS
        assert parser.parse_args(command[3:]).output.parent == tmp_path
    assert names[-1] == "tiles beside cuDNN"
    files = {
        word for s in stages.stages(tmp_path) for word in s.command if "json" in word
    }
    assert len(files) + 1 <= 8  # with the file of the stages


def test_a_resumed_run_leaves_out_what_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "need_cuda", lambda name: None)
    machine = {"device": "made up", "torch": "2", "triton": "3", "commit": "abc"}
    monkeypatch.setattr(suite, "facts", lambda: machine)
    codes = {"good": "print(1)", "bad": "raise SystemExit('off')", "slow": "print(2)"}
    found = [Stage(name, ("-c", code), 60) for name, code in codes.items()]
    monkeypatch.setattr(suite, "stages", lambda folder: found)
    ran: list[str] = []

    def recorded(stage: Stage, left: float) -> Done:
        ran.append(stage.name)
        return performed(stage, left)

    monkeypatch.setattr(suite, "performed", recorded)
    arguments = ("--output", str(tmp_path), "--seconds", "100")
    with pytest.raises(SystemExit):
        suite.run(parsed(*arguments))
    assert ran == ["good", "bad", "slow"]
    found[1] = Stage("bad", ("-c", "print(3)"), 60)
    ran.clear()
    suite.run(parsed(*arguments, "--resume"))
    assert ran == ["bad"]
    rows = suite.earlier((tmp_path,))
    assert {name: d.outcome for name, d in rows.items()} == dict.fromkeys(
        codes, "passed"
    )
    assert {d.commit for d in rows.values()} == {"abc"}
    found[0] = Stage("good", ("-c", "raise SystemExit('off')"), 60)
    suite.run(parsed(*arguments, "--resume", "--only", "slow"))
    assert suite.earlier((tmp_path,)) == rows


def test_no_time_loses_nothing_of_an_earlier_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "need_cuda", lambda name: None)
    monkeypatch.setattr(
        suite,
        "facts",
        lambda: {"device": "made up", "torch": "2", "triton": "3", "commit": "new"},
    )
    stage = Stage("slow", ("-c", "print(1)"), 60)
    monkeypatch.setattr(suite, "stages", lambda folder: [stage])
    row = {
        "name": "slow",
        "outcome": "timed out",
        "seconds": 60.0,
        "said": "half of it",
        "command": "python -c print(1)",
        "commit": "old",
    }
    save(results_file(tmp_path, "gpu"), {"suite": "gpu", "stages": [row]})
    with pytest.raises(SystemExit):
        suite.run(parsed("--output", str(tmp_path), "--seconds", "1", "--resume"))
    assert suite.earlier((tmp_path,))["slow"] == Done(**row)


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    suite.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("only", "why"), [("zzz", "no stage matches"), ("(", "no regular")]
)
def test_stages_that_do_not_exist_are_refused(only: str, why: str) -> None:
    with pytest.raises(KernelError, match=why):
        suite.run(parsed("--rehearse", "--only", only))
