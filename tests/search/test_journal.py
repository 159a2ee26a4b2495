"""What a tuning job keeps on disk: for one writer, across its death, and for this very job."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from hetconv.autotune.measure.paired_rounds import LogRatio
from hetconv.autotune.search import journal
from hetconv.autotune.search.journal import Store, claimed, journal_of
from hetconv.autotune.search.record import (
    COMPARED_WITH,
    FAILURE,
    PLANS,
    WEIGHTS,
    PlanTiming,
    Study,
    Trial,
    studies_of,
)
from hetconv.errors import HetConvError
from hetconv.schemas.json_files import adapter
from tests import ROOT

JOB = {"model": "a:net {}", "input": [1, 3, 8, 8], "seed": 0}
Open = Callable[..., Store]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens a job's journal, after the one that was opened before has been closed."""
    stores: list[Store] = []

    def open_(job: dict[str, Any] = JOB, *, resume: bool = False, **more: Any) -> Store:
        if stores:
            stores[-1].close()
        file = more.pop("file", tmp_path / "it.db")
        stores.append(Store(file, job, resume=resume, **more))
        return stores[-1]

    yield open_
    if stores:
        stores[-1].close()


def test_what_is_kept_is_known_to_who_resumes(opened: Open, tmp_path: Path) -> None:
    first = opened()
    first.keep("operators", "a conv", [{"0.5": [1.0]}])
    first.keep("stages", "operators", {"budget": 1.5})
    first.keep("operators", "a conv", [{"0.5": [2.0]}])
    second = opened(resume=True)
    assert list(second.known.items()) == list(first.known.items())
    assert second.known == {
        ("operators", "a conv"): [{"0.5": [2.0]}],
        ("stages", "operators"): {"budget": 1.5},
    }
    assert second.of_stage("operators") == {"a conv": [{"0.5": [2.0]}]}


def test_there_may_be_nothing_to_resume(opened: Open) -> None:
    assert opened(resume=True).known == {}
    assert opened(resume=True).study("ratio", "it").trials == []


def test_trials_stand_in_the_same_file(opened: Open, tmp_path: Path) -> None:
    opened().study("ratio", "it").add_trial(optuna.create_trial(value=0.5))
    assert [t.value for t in opened(resume=True).study("ratio", "it").trials] == [0.5]
    opened(resume=True).close()
    assert [p.name for p in tmp_path.iterdir()] == ["it.db"]
    with closing(sqlite3.connect(tmp_path / "it.db")) as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)


KEEPING = """
import os, signal, sys
from pathlib import Path
import optuna
from hetconv.autotune.search.journal import Store

store = Store(Path(sys.argv[1]), {}, resume=False)
store.keep("operators", "a conv", 1)
store.study("ratio", "it").add_trial(optuna.create_trial(value=0.5))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_kept_survives_the_death_of_the_process(
    opened: Open, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", KEEPING, str(tmp_path / "it.db")]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    died = subprocess.run(command, env=env)
    assert died.returncode == -signal.SIGKILL
    store = opened({}, resume=True)
    assert store.known == {("operators", "a conv"): 1}
    assert [t.value for t in store.study("ratio", "it").trials] == [0.5]
    # Also where it is set aside.
    assert opened({}).known == {}
    aside = opened({}, resume=True, file=tmp_path / "it.db.before")
    assert aside.known == {("operators", "a conv"): 1}


@pytest.mark.parametrize("content", [b"no database, but of some length" * 99, b"{}\n"])
def test_what_is_no_database_is_refused_and_set_aside_without_resume(
    content: bytes, opened: Open, tmp_path: Path
) -> None:
    (tmp_path / "it.db").write_bytes(content)
    with pytest.raises(
        HetConvError, match=r"it.db cannot be read .*leave out --resume"
    ):
        opened(resume=True)
    assert opened().known == {}
    assert (tmp_path / "it.db.before").read_bytes() == content


def test_another_job_is_refused_by_what_differs_and_begins_anew_without_resume(
    opened: Open, tmp_path: Path
) -> None:
    first = opened()
    first.keep("operators", "a conv", 1)
    first.study("ratio", "it").add_trial(optuna.create_trial(value=0.5))
    other = JOB | {"input": [2, 3, 8, 8], "seed": 1}
    differs = (
        r"input is \[1, 3, 8, 8\] there, \[2, 3, 8, 8\] here; seed is 0 there, 1 here\. "
        r"Ask for the same"
    )
    with pytest.raises(HetConvError, match=differs):
        opened(other, resume=True)
    anew = opened(other)
    assert anew.known == {}
    assert anew.study("ratio", "it").trials == []
    before = opened(resume=True, file=tmp_path / "it.db.before")
    assert before.known == {("operators", "a conv"): 1}
    assert [t.value for t in before.study("ratio", "it").trials] == [0.5]


def test_a_journal_of_another_version_is_refused(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened()
    monkeypatch.setattr(journal, "VERSION", journal.VERSION + 1)
    with pytest.raises(
        HetConvError, match=r"is another version's .* leave out --resume"
    ):
        opened(resume=True)
    assert opened().known == {}


def test_trials_may_be_in_another_database(opened: Open, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/trials.db"
    other = tmp_path / "other.db"
    opened(url=url).study("ratio", "it").add_trial(optuna.create_trial(value=0.5))
    of_other = opened(JOB | {"seed": 1}, file=other, url=url)
    of_other.study("ratio", "it").add_trial(optuna.create_trial(value=0.1))
    resumed = opened(resume=True, url=url).study("ratio", "it")
    assert [t.value for t in resumed.trials] == [0.5]
    assert opened(resume=True).studies() == []
    assert opened(url=url).studies() == []
    of_other = opened(JOB | {"seed": 1}, file=other, resume=True, url=url)
    assert [t.value for t in of_other.study("ratio", "it").trials] == [0.1]


@pytest.mark.parametrize(
    "url",
    [
        "nothing",
        "sqlite:////no/such/folder/trials.db",
        "postgresql://nobody@nowhere/none",
    ],
)
def test_a_database_that_is_not_there_is_refused(url: str, opened: Open) -> None:
    with pytest.raises(HetConvError, match=r"^--storage: .*give sqlite:///FILE"):
        opened(url=url)


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
        with claimed(output) as file:  # also at once
            assert file == journal_of(output)
            assert file.with_suffix(".lock").read_text() == str(os.getpid())
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        ".cluster.json5",
        "cluster.json.study.lock",
    ]


def test_a_study_goes_on_in_the_journal(opened: Open) -> None:
    study = opened().study("ratio", "it")
    study.enqueue_trial({"x": 1.0})
    study.ask().suggest_float("x", 0, 2)
    again = opened(resume=True).study("ratio", "it")
    assert [(t.state, t.params) for t in again.trials] == [
        (TrialState.RUNNING, {"x": 1.0})
    ]


def test_plans_and_studies_are_read_in_the_order_in_which_they_began(
    opened: Open,
) -> None:
    store = opened()
    assert studies_of(store) == ()
    timings = (
        PlanTiming("planned", LogRatio(0.0, 0.1)),
        PlanTiming("rows", None, failure="full"),
    )
    for key, timing in zip("ab", timings, strict=True):
        document = adapter(PlanTiming).dump_python(timing, mode="json")
        store.keep(PLANS, key, document)
    store.keep(COMPARED_WITH, "", "the fastest")
    study = store.study("height ratio", "the computed ratio")
    ended = {TrialState.COMPLETE: (0.5, {}), TrialState.FAIL: (None, {FAILURE: "none"})}
    for state, (value, why) in ended.items():
        known = {WEIGHTS: [3, 1]} | why
        study.add_trial(optuna.create_trial(state=state, value=value, user_attrs=known))
    study.enqueue_trial({})
    assert studies_of(opened(resume=True)) == (
        Study(
            "plans", "the fastest", (Trial("planned", 1.0), Trial("rows", None, "full"))
        ),
        Study(
            "height ratio",
            "the computed ratio",
            (Trial("3:1", 0.5), Trial("3:1", None, "none")),
        ),
    )
