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
from bench.kills import Kill, Tuning


def survived(folder: Path) -> bool:
    """Whether a job was killed twice, and all was right; or it was over before, as
    where no split comes near alone.
    """
    for victim, file in (("launcher", "measured.jsonl"), ("rank 0", "trials.journal")):
        tuning, latest = Tuning(folder), time.monotonic() + 180
        while tuning.launcher.poll() is None and tuning.grown(file) < 5:
            assert time.monotonic() < latest, tuning.said
            time.sleep(0.02)
        if victim not in (victims := tuning.victims):
            assert tuning.launcher.wait(timeout=60) == 0, tuning.said
            return False
        kill = tuning.kill(victim, victims[victim])
        assert kill is not None, tuning.said
        assert kill.wrong == ()
        assert tuning.grown(file) >= 5
    assert kills.whole(folder) > 0
    return True


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_was_measured_survives_the_death_of_any_process(tmp_path: Path) -> None:
    """While operators are measured, and in the midst of a study's trials: once, for one
    kill may be among the last.
    """
    assert any(survived(tmp_path / str(job)) for job in range(3))


def test_what_is_wrong_is_counted_and_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = Kill("launcher", 3.0, 0.0, 12, ())
    wrong = Kill("rank 1", 9.0, 5.0, 20, ("measured.jsonl lost what it had",))
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
    assert written["cases"][1]["wrong"] == ["measured.jsonl lost what it had"]


def test_a_line_that_was_being_written_does_not_count(tmp_path: Path) -> None:
    file = tmp_path / "measured.jsonl"
    assert kills._whole_lines(file) == b""
    file.write_bytes(b'{"a":1}\n{"b"')
    assert kills._whole_lines(file) == b'{"a":1}\n'
