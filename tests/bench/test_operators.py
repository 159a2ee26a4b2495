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


def printed(
    operator: str, us: float, monkeypatch: pytest.MonkeyPatch, path: Path, capsys: Any
) -> tuple[list[str], list[dict[str, Any]]]:
    """The lines of the benchmark, and the cases that it saved."""
    row = {"operator": operator, "memory": "contiguous", "half_us": 100.0}
    rows = [
        row | {"mode": "infer", "part_us": us},
        row | {"mode": "train", "part_us": 340.0},
    ]
    monkeypatch.setattr(operators, "run_on", lambda *_: (rows, 100.0))
    bench.main(["operators", "-o", str(path / "operators.json")])
    cases = json.loads((path / "operators.json").read_text())["cases"]
    return capsys.readouterr().out.splitlines(), cases


@pytest.mark.parametrize(("us", "verdict"), [(240.0, "met"), (260.0, "MISSED")])
def test_an_operator_may_take_half_again_as_long_and_a_round(
    us: float,
    verdict: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines, cases = printed("relu", us, monkeypatch, tmp_path, capsys)
    assert verdict in lines[-2]
    assert [case["part_us"] for case in cases] == [us, 340.0]
    assert not any("reason" in case for case in cases)


def test_a_reason_stands_beside_a_row_that_takes_longer_only(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    reason = operators.REASONS["group norm"]
    lines, cases = printed("group norm", 260.0, monkeypatch, tmp_path, capsys)
    assert [reason in line for line in lines[:2]] == [True, False]
    assert [case.get("reason") for case in cases] == [reason, None]
    assert "met" in lines[-2]


def test_reasons_are_those_of_operators() -> None:
    assert operators.REASONS.keys() <= operators.OPERATORS.keys()


def test_a_pattern_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["operators", "--only", "("])
    assert "is no regular expression" in capsys.readouterr().err
