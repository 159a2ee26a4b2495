"""The benchmark of Python's time: a row for each kind of split and mode, and what must
hold, told whole.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as bench
from bench import overhead
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
def test_the_limit_is_that_of_inference(
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
    monkeypatch.setattr(overhead, "run_on", lambda *_: rows)
    bench.main(["overhead", "-o", str(tmp_path / "overhead.json")])
    said = capsys.readouterr().out.splitlines()
    assert verdict in said[-2]
    assert f"{15 / us:.3f}" in said[-2]
    assert json.loads(said[-1]) == json.loads((tmp_path / "overhead.json").read_text())
    assert json.loads(said[-1])["cases"] == rows
