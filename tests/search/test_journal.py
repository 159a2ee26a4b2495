"""What a tuning job keeps on disk: for one writer, across its death, and for this very job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from hetconv.autotune.search import journal
from hetconv.autotune.search.journal import Store, claimed, folder_of
from hetconv.errors import HetConvError
from tests import ROOT

JOB = {"model": "a:net {}", "input": [1, 3, 8, 8], "seed": 0}


def records(path: Path) -> list[dict[str, object]]:
    return [
        json.loads(line) for line in (path / "measured.jsonl").read_text().splitlines()
    ]


def test_what_is_kept_is_known_to_who_resumes(tmp_path: Path) -> None:
    first = Store(tmp_path, JOB, resume=False)
    first.keep("operators", "a conv", [{"0.5": [1.0]}])
    first.keep("operators", "a conv", [{"0.5": [2.0]}])
    first.keep("stages", "operators", {"budget": 1.5})
    assert len(records(tmp_path)) == 4
    second = Store(tmp_path, JOB, resume=True)
    assert second.known == {
        ("operators", "a conv"): [{"0.5": [2.0]}],
        ("stages", "operators"): {"budget": 1.5},
    }
    assert second.known == first.known
    assert len(records(tmp_path)) == 4


def test_there_may_be_nothing_to_resume(tmp_path: Path) -> None:
    assert Store(tmp_path, JOB, resume=True).known == {}
    assert Store(tmp_path, JOB, resume=True).study("ratio").trials == []


@pytest.mark.parametrize("file", ["measured.jsonl", "trials.journal"])
def test_a_line_that_was_being_written_is_left_out(file: str, tmp_path: Path) -> None:
    first = Store(tmp_path, JOB, resume=False)
    first.keep("operators", "a conv", 1)
    first.study("ratio").add_trial(optuna.create_trial(value=0.5))
    whole = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(whole + b'{"stage":"operators","ke')
    second = Store(tmp_path, JOB, resume=True)
    assert (tmp_path / file).read_bytes() == whole
    second.keep("operators", "another", 2)
    second.study("ratio").add_trial(optuna.create_trial(value=0.4))
    third = Store(tmp_path, JOB, resume=True)
    assert third.known == {("operators", "a conv"): 1, ("operators", "another"): 2}
    assert [t.value for t in third.study("ratio").trials] == [0.5, 0.4]


def test_a_damaged_line_in_the_middle_is_refused_by_its_number(tmp_path: Path) -> None:
    Store(tmp_path, JOB, resume=False).keep("operators", "a conv", 1)
    with open(tmp_path / "measured.jsonl", "ab") as f:
        f.write(b"\0\0\n{}\n")
    with pytest.raises(
        HetConvError, match=r"measured.jsonl: line 3 is not JSON .*leave out --resume"
    ):
        Store(tmp_path, JOB, resume=True)


def test_another_job_is_refused_by_what_differs_and_begins_anew_without_resume(
    tmp_path: Path,
) -> None:
    first = Store(tmp_path, JOB, resume=False)
    first.keep("operators", "a conv", 1)
    first.study("ratio").add_trial(optuna.create_trial(value=0.5))
    other = JOB | {"input": [2, 3, 8, 8], "seed": 1}
    differs = (
        r"input is \[1, 3, 8, 8\] there, \[2, 3, 8, 8\] here; seed is 0 there, 1 here\. "
        r"Ask for the same"
    )
    with pytest.raises(HetConvError, match=differs):
        Store(tmp_path, other, resume=True)
    before = (tmp_path / "measured.jsonl").read_bytes()
    anew = Store(tmp_path, other, resume=False)
    assert anew.known == {}
    assert anew.study("ratio").trials == []
    assert (tmp_path / "measured.jsonl.before").read_bytes() == before
    assert (tmp_path / "trials.journal.before").exists()


def test_a_store_of_another_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Store(tmp_path, JOB, resume=False)
    monkeypatch.setattr(journal, "VERSION", journal.VERSION + 1)
    with pytest.raises(HetConvError, match="is another version's; leave out --resume"):
        Store(tmp_path, JOB, resume=True)


def test_trials_may_be_in_a_database(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/trials.db"
    Store(tmp_path, JOB, resume=False, url=url).study("ratio").add_trial(
        optuna.create_trial(value=0.5)
    )
    other = tmp_path / "other"
    other.mkdir()
    Store(other, JOB | {"seed": 1}, resume=False, url=url).study("ratio").add_trial(
        optuna.create_trial(value=0.1)
    )
    assert [
        t.value
        for t in Store(tmp_path, JOB, resume=True, url=url).study("ratio").trials
    ] == [0.5]
    assert Store(tmp_path, JOB, resume=False, url=url).study("ratio").trials == []
    assert not (tmp_path / "trials.journal").exists()


@pytest.mark.parametrize(
    "url",
    [
        "nothing",
        "sqlite:////no/such/folder/trials.db",
        "postgresql://nobody@nowhere/none",
    ],
)
def test_a_database_that_is_not_there_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(HetConvError, match=r"^--storage: .*give sqlite:///FILE"):
        Store(tmp_path, JOB, resume=False, url=url)


CLAIMING = """
import sys, time
from pathlib import Path
from hetconv.autotune.search.journal import claimed

with claimed(Path(sys.argv[1])):
    print("claimed", flush=True)
    time.sleep(100)
"""


def test_a_second_writer_is_refused_until_the_first_is_gone_however_it_went(
    tmp_path: Path,
) -> None:
    output = tmp_path / "cluster.json"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CLAIMING, str(output)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "claimed\n"
        words = (
            r"cluster.json is being written by another hetconv autotune \(process "
            rf"{first.pid}\)"
        )
        with pytest.raises(HetConvError, match=words), claimed(output):
            pass
        (tmp_path / ".cluster.json.torn").write_text("{")
        (tmp_path / ".cluster.json5").write_text("another's")
        first.send_signal(signal.SIGKILL)
        start = time.monotonic()
        with claimed(output) as folder:  # also at once
            assert folder == folder_of(output)
            assert (folder / "lock").read_text() == str(os.getpid())
        assert time.monotonic() - start < 2 * journal.PATIENCE
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        ".cluster.json5",
        "cluster.json.study",
    ]


def test_a_study_goes_on_in_the_journal(tmp_path: Path) -> None:
    study = Store(tmp_path, JOB, resume=False).study("ratio")
    study.enqueue_trial({"x": 1.0})
    study.ask().suggest_float("x", 0, 2)
    again = Store(tmp_path, JOB, resume=True).study("ratio")
    assert [(t.state, t.params) for t in again.trials] == [
        (TrialState.RUNNING, {"x": 1.0})
    ]
