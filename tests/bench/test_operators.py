"""The benchmark of single operators: every one runs split, and what must hold is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as bench
from bench import operators
from tests.spawn import spawn


def few_rounds(names: list[str]) -> Any:
    operators.ROUNDS = 1
    return operators.measure(names)


def test_every_operator_is_timed_in_both_modes_and_memory_formats() -> None:
    names = ["squeeze and excite", "pixel shuffle"]
    (rows, round_us), _ = spawn(2, few_rounds, names)
    assert [(r["operator"], r["mode"], r["memory"]) for r in rows] == [
        (name, mode, memory)
        for name in names
        for mode in operators.MODES
        for memory in operators.MEMORY
    ]
    assert round_us > 0


@pytest.mark.parametrize(("us", "verdict"), [(240.0, "met"), (260.0, "MISSED")])
def test_an_operator_may_take_half_again_as_long_and_a_round(
    us: float,
    verdict: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = {"operator": "relu", "memory": "contiguous", "half_us": 100.0}
    rows = [
        row | {"mode": "infer", "part_us": us},
        row | {"mode": "train", "part_us": 340.0},
    ]
    monkeypatch.setattr(operators, "run_on", lambda *_: (rows, 100.0))
    bench.main(["operators", "-o", str(tmp_path / "operators.json")])
    said = capsys.readouterr().out.splitlines()
    assert verdict in said[-2]
    assert json.loads((tmp_path / "operators.json").read_text())["cases"] == rows


def test_a_pattern_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["operators", "--only", "("])
    assert "is no regular expression" in capsys.readouterr().err
