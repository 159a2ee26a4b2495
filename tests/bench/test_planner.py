"""The benchmark of the planner: parts are timed, demands are judged by their limits,
and told whole.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as bench
from bench import planner
from bench.planner import EVEN, SAMPLE, Case, demands, modelled


def test_a_case_is_timed_in_parts_and_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        planner, "CASES", (Case("AlexNet", 2, 8, 1e3), Case("ResNet-50", 4, 8))
    )
    monkeypatch.setattr(planner, "ROUNDS", 1)
    bench.main(["planner", "--models", "AlexNet", "-o", str(tmp_path / "planner.json")])
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("AlexNet on 2: 8 nodes, 7 edges")
    assert [line.split()[0] for line in said[-3:-1]] == ["met", "met"]
    assert json.loads(said[-1]) == json.loads((tmp_path / "planner.json").read_text())
    (row,) = json.loads(said[-1])["cases"]
    assert all(s > 0 for s in row["cpu_s"].values())
    assert row["cpu_s"]["make_plan"] > row["cpu_s"]["tables"]
    assert row["step_s"]["plan"] == min(row["step_s"].values())


def row(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"model": "ResNet-50", "devices": 4, "limit_s": 0.5}
    found["cpu_s"] = {"candidates": 0.5, "tables": 0.9, "search": 0.4, "make_plan": 9.0}
    return found | {"step_s": {"plan": 1.0, SAMPLE: 1.15, EVEN: 1.2}} | changes


@pytest.mark.parametrize(
    ("changes", "met"),
    [
        ({}, [True, True, True, True]),
        (
            {"cpu_s": {"candidates": 0.5, "tables": 1.1, "search": 0.6}},
            [False, False, True, True],
        ),
        (
            {"step_s": {"plan": 1.0, SAMPLE: 1.14, EVEN: 1.19}},
            [True, True, False, False],
        ),
        ({"limit_s": None}, [True, True]),
        ({"limit_s": None, "devices": 8}, []),
    ],
)
def test_demands_go_by_their_limits(changes: dict[str, Any], met: list[bool]) -> None:
    assert [d.met for d in demands([row(**changes)])] == met


def test_devices_of_a_node_share_its_wire_and_its_card() -> None:
    profile = modelled(6)
    assert [d.flops_per_s["float32"] for d in profile.devices] == [
        1e13,
        5e12,
        5e12,
        2e12,
        1e13,
        5e12,
    ]
    assert profile.nodes == ((0, 1, 2, 3), (4, 5))
    wires = {wire.name: set(wire.pairs) for wire in profile.shared}
    assert wires["host of node 1"] == {(4, 5), (5, 4)}
    assert wires["card of node 1, in"] == {(a, b) for a in range(4) for b in (4, 5)}
    assert {wire.name for wire in modelled(4).shared} == {"host of node 0"}
