"""The benchmark of the autotuner: its figures from predicted and measured steps, what it refuses, what it writes."""

from __future__ import annotations

import json
import os
from itertools import combinations
from pathlib import Path

import pytest
import torch

import hetconv
from bench import __main__ as bench
from bench import autotune
from hetconv.autotune.check import Check
from hetconv.plan import ALONE
from hetconv.planner import PLANNED

from .nets import Chain

STEPS = {
    f"{ALONE} (0: cpu)": (3.0, 3.0),
    f"{ALONE} (1: cpu@0.5)": (6.0, 6.0),
    "even split by height": (2.0, 4.0),
    "uneven height split": (2.0, 2.0),
    PLANNED: (2.0, 2.5),
}
CHECK = Check(
    STEPS,
    {name: [0.8 * measured, measured, 1.2 * measured] for name, (_, measured) in STEPS.items()},
    {name: 1.1 * predicted for name, (predicted, _) in STEPS.items()},
)


def test_the_plan_is_compared_with_all_that_ran_beside_it() -> None:
    found = autotune.figures(CHECK, "uneven height split")
    assert found["vs_alone"] == 1.2
    assert found["vs_even"] == 1.6
    assert found["regret"] == 0.25
    assert found["median error"] == 0.0
    assert found["p90 error"] == pytest.approx(0.38)
    assert found["median error at speed"] == pytest.approx(0.1)
    assert found["predicted and measured ms"][PLANNED] == [2000.0, 2500.0, 2200.0]


def test_plans_are_compared_once() -> None:
    graph = hetconv.capture(Chain(), torch.zeros(2, 4, 16, 16))
    profile = hetconv.ClusterProfile.from_devices(["cpu", "cpu@0.5"])
    first = autotune.compared(graph, profile, "infer", {})
    again = autotune.compared(graph, profile, "infer", {PLANNED: first["uneven height split"]})
    assert "uneven height split" in first
    assert "uneven height split" not in again
    split = [splits for name, splits in first.items() if not name.startswith(ALONE)]
    assert all(a != b for a, b in combinations(split, 2))
    assert sum(name.startswith(ALONE) for name in again) == 2
    assert len(first) <= autotune.PLANS


def test_a_device_alone_is_measured_as_the_plain_model() -> None:
    assert autotune.figures(CHECK, f"{ALONE} (0: cpu)")["vs_alone"] == 1.0


def test_results_are_printed_and_written_after_each_case(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"chosen": "uneven height split"} | autotune.figures(CHECK, "uneven height split")
    row |= {autotune.LAYERS: 0.05, autotune.REPEATED: 0.04}
    monkeypatch.setattr(autotune, "run_on", lambda devices, *_: row)
    file = tmp_path / "new" / "autotune.json"
    bench.main(
        ["autotune", "--pairs", "cpu,cpu@0.5;cpu,cpu busy", "--models", "U-Net", "--modes", "infer", "-o", str(file)]
    )
    written = json.loads(file.read_text())
    said = capsys.readouterr().out.splitlines()
    assert [r["pair"] for r in written["cases"]] == ["cpu,cpu@0.5", "cpu,cpu busy"]
    assert json.loads(said[-1]) == written
    assert "1.20x alone, 1.60x even, regret 25.0%" in said[0]
    assert "the same measured again: steps by 20.0%, layers by 4.0%" in said[0]
    assert any("MISSED" in text and "regret" in text for text in said)


@pytest.mark.parametrize("wrong", [["--pairs", "cpu,tpu"], ["--models", "LeNet"], ["--modes", "sleep"]])
def test_what_is_not_known_is_refused_before_anything_runs(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        bench.main(["autotune", *wrong])
    assert exit_.value.code == 2
    assert wrong[1].split(",")[-1] in capsys.readouterr().err


def test_a_busy_process_shares_the_last_core_and_ends() -> None:
    before = os.sched_getaffinity(0)
    with autotune.beside_a_busy_process(True):
        assert os.sched_getaffinity(0) == {max(before)}
    assert os.sched_getaffinity(0) == before
