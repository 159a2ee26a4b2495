"""The benchmark of overlap: every case is timed both ways, on ranks, and told whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as bench
from bench import overlap
from bench.shared.models import Stack
from hetconv.comm.exchange import PendingExchange
from hetconv.runtime.throttle import DeviceName
from tests.spawn import spawn

PAIR = (DeviceName("cpu"), DeviceName("cpu", 0.5))
ROW = {"case": "halo", "how": "infer", "ms": 2.0, "in_turn_ms": 3.0, "gain": 1.5}
BY_BACKEND = {"backend_ms": 5.0, "of_backend": 2.5}


def measured() -> tuple[dict[str, Any], list[dict[str, Any]], set[tuple[bool, bool]]]:
    """And how messages were sent: whether waited for where they start, and whether by
    the backend.
    """
    from hetconv.comm import rank_group

    seen: set[tuple[bool, bool]] = set()
    start = PendingExchange.__init__

    def noted(self: PendingExchange, *args: Any) -> None:
        seen.add((rank_group.blocking.on, rank_group.through_backend.on))
        start(self, *args)

    PendingExchange.__init__ = noted  # type: ignore[method-assign]
    return *overlap.measure(PAIR, True), seen


def test_every_case_is_timed_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "Stack", lambda *_: Stack(1, 8, 16))
    monkeypatch.setattr(overlap, "GATHERED", (overlap.Gathered(4, 8, 8, 64),))
    for setup, rows, seen in spawn(2, measured):
        assert seen == {(False, False), (True, False), (False, True)}
        assert (setup["backend"], setup["devices"]) == ("gloo", ["cpu", "cpu@0.5"])
        assert [r["how"] for r in rows] == [
            "infer",
            "train",
            "train",
            "2 chunks",
            "4 chunks",
        ]
        assert rows[2]["case"].startswith("buckets")
        for r in rows:
            assert min(r["ms"], r["in_turn_ms"], r["gain"]) > 0
        assert all(r["of_one_piece"] > 0 for r in rows if "chunks" in r["case"])
        assert all(
            min(r["of_backend"], r["backend_ms"]) > 0
            for r in rows
            if "chunks" not in r["case"]
        )


def test_results_are_printed_and_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        ROW | BY_BACKEND,
        ROW
        | {
            "case": "chunks",
            "how": "2 chunks",
            "one_piece_ms": 4.0,
            "of_one_piece": 2.0,
        },
    ]
    monkeypatch.setattr(overlap, "run_on", lambda *_: ({"backend": "gloo"}, rows))
    bench.main(["overlap", "-o", str(tmp_path / "new" / "overlap.json")])
    written = json.loads((tmp_path / "new" / "overlap.json").read_text())
    said = capsys.readouterr().out.splitlines()
    assert written["cases"] == rows
    assert json.loads(said[-1]) == written
    assert said[-3].endswith("1.500x, 2.500x of the backend")
    assert said[-2].endswith("1.500x, 2.000x of one piece")


@pytest.mark.parametrize("wrong", ["tpu:0", "cpu,cpu@2"])
def test_what_is_no_device_is_refused(
    wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        bench.main(["overlap", "--devices", wrong])
    assert exit_.value.code == 2
    assert wrong.split(",")[-1] in capsys.readouterr().err
