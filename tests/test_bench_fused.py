"""The benchmark of folding: a row for each kind of split, and what must hold, told whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as bench
from bench import fused
from bench.autotune import Case
from hetconv.emulate import DeviceName

from .spawn import spawn

SMALL = Case("small", "bench.cases:resnet18", "{}", (1, 3, 32, 32))


def test_both_ways_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "ROUNDS", 2)
    monkeypatch.setattr(fused, "ROUNDS_S", 0.0)
    rows, _ = spawn(2, fused.measure, (DeviceName("cpu"),) * 2, SMALL)
    assert [r["kind"] for r in rows] == [*fused.KINDS]
    assert min(min(r["without_ms"], r["folded_ms"], r["ratio"]) for r in rows) > 0
    assert not any(r["folds"] for r in rows)


@pytest.mark.parametrize(("folds", "verdict"), [(True, "MISSED"), (False, "not measured")])
def test_it_must_be_no_slower_where_it_is_done(
    folds: bool, verdict: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row: dict[str, Any] = {"model": "small", "kind": "height", "without_ms": 1.0, "folded_ms": 2.0, "ratio": 0.5}
    monkeypatch.setattr(fused, "run_on", lambda *_: [row | {"folds": folds}])
    bench.main(["fused", "-o", str(tmp_path / "fused.json")])
    said = capsys.readouterr().out.splitlines()
    assert verdict in said[-2]
    assert json.loads(said[-1]) == json.loads((tmp_path / "fused.json").read_text())
    assert len(json.loads(said[-1])["cases"]) == len(fused.CASES)
