"""The benchmark of Python's time: a row for each kind of split and mode, and what must
hold, told whole.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as bench
from bench.overhead import suite as overhead
from tests.spawn import spawn


def test_every_kind_and_mode_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "BLOCKS", 2)
    monkeypatch.setattr(overhead, "ROUNDS", 3)
    (rows,) = spawn(1, overhead.measure)
    of_models = [r for r in rows if "operator" not in r]
    assert [(r["mode"], r["kind"]) for r in of_models] == [
        (m, k) for m in overhead.MODES for k in overhead.KINDS
    ]
    assert [(r["operator"], r["mode"]) for r in rows[len(of_models) :]] == [
        (o, m) for o in overhead.OPERATORS for m in overhead.MODES
    ]
    assert all(r["plain_us"] > 0 for r in rows)


@pytest.mark.parametrize(("us", "verdict"), [(10.0, "met"), (20.0, "MISSED")])
def test_limits_are_those_of_inference_and_of_calls(
    us: float,
    verdict: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows: list[dict[str, Any]] = [
        {"kind": "height", "mode": "infer", "us": us, "plain_us": 5.0},
        {"kind": "filter", "mode": "infer", "us": 1.0, "plain_us": 5.0},
        {"kind": "height", "mode": "train", "us": 99.0, "plain_us": 9.0},
    ]
    calls: list[dict[str, Any]] = [
        {"call": "quick", "us": us, "limit_us": 15.0},
        {"call": "of no limit", "us": 99.0, "limit_us": None},
    ]
    found = {overhead.measure: rows, overhead.host_time.measure: calls}
    monkeypatch.setattr(overhead, "run_on", lambda _, measure: found[measure])
    bench.main(["overhead", "-o", str(tmp_path / "overhead.json")])
    said = capsys.readouterr().out.splitlines()
    for line, limit in ((said[-3], 12), (said[-2], 15)):
        assert verdict in line
        assert f"{limit / us:.3f}" in line
    assert json.loads(said[-1]) == json.loads((tmp_path / "overhead.json").read_text())
    document = json.loads(said[-1])
    assert (document["cases"], document["calls"]) == (rows, calls)


def test_every_call_is_timed_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead.host_time, "CALLS", 2)
    monkeypatch.setattr(overhead.host_time, "ROUNDS", 3)
    (rows,) = spawn(1, overhead.host_time.measure)
    assert [r["limit_us"] for r in rows] == [15, 35, 25, None, None, None]
    assert all(r["us"] > 0 for r in rows)
