"""`hetconv autotune` under SIGKILL, as `python -m bench kills` tries it at length; and
that benchmark's own words.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from bench import __main__ as bench
from bench import kills
from bench.kills import RECORDS, TRIALS, Kill, Tuning
from hetconv.autotune.search.journal import Store

MIN_ROWS = 2  # of a job's about fifteen, even where its budget leaves operators out


def survived(folder: Path) -> bool:
    """Whether a job was killed twice, and all was right; or it was over before."""
    for victim in ("launcher", "rank 0"):
        tuning = Tuning(folder)
        while tuning.launcher.poll() is None and tuning.grown(RECORDS) < MIN_ROWS:
            time.sleep(0.02)
        if victim not in (victims := tuning.victims):
            assert tuning.launcher.wait(timeout=60) == 0, tuning.said
            return False
        kill = tuning.kill(victim, victims[victim], "SIGKILL")
        assert kill is not None, tuning.said
        assert kill.wrong == ()
        assert tuning.grown(RECORDS) >= MIN_ROWS
    assert kills.whole(folder) > 0
    return True


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_was_measured_survives_the_death_of_any_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of the launcher and of a rank; once, for a job may be over before the second kill.

    Whether a ratio is searched depends on the machine; `python -m bench kills` kills at
    random moments, trials included.
    """
    assert kills.ASKED[-2] == "--budget"
    monkeypatch.setattr(kills, "ASKED", (*kills.ASKED[:-1], "6"))
    assert any(survived(tmp_path / str(job)) for job in range(3))


def test_what_is_wrong_is_counted_and_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = Kill("launcher", "SIGKILL", 3.0, 0.0, 12, ())
    wrong = Kill("rank 1", "SIGSTOP", 9.0, 5.0, 20, ("trials lost what it had",))
    monkeypatch.setattr(kills, "whole", lambda folder: 20.0)
    monkeypatch.setattr(kills, "killed", lambda *_: [right, right])
    bench.main(["kills", "-n", "2"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["wrong"] == 0
    monkeypatch.setattr(kills, "killed", lambda *_: [right, wrong])
    with pytest.raises(SystemExit, match="1"):
        bench.main(["kills", "-n", "2", "-o", str(tmp_path / "kills.json")])
    written = json.loads((tmp_path / "kills.json").read_text())
    assert (written["kills"], written["wrong"], written["over_s"]) == (
        2,
        1,
        {"median": 2.5, "most": 5.0},
    )
    assert written["cases"][1]["wrong"] == ["trials lost what it had"]


def test_rows_are_those_of_a_table_that_may_not_be_there_yet(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json.study.db"
    assert kills._rows(file, RECORDS) == {}
    store = Store(file, {}, resume=False)
    store.keep("operators", "a conv", 1)
    assert kills._rows(file, RECORDS) == {
        ("job", ""): "{}",
        ("operators", "a conv"): "1",
    }
    assert kills._rows(file, TRIALS) == {}
    store.study("ratio", "it").enqueue_trial({})
    assert kills._rows(file, TRIALS) == {(1,): "WAITING"}
    assert kills._rows(file, "nothing") == {}
    store.close()
