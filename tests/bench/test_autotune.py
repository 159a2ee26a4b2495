"""The benchmark of the autotuner: its figures from predicted and measured steps, what
it refuses, what it writes.
"""

from __future__ import annotations

import json
import os
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import hetconv
from bench import __main__ as bench
from bench import autotune
from bench.shared import plan_gains
from bench.shared.models import stack
from bench.shared.plan_sample import PLANS, compared
from bench.shared.prediction_errors import Check
from hetconv.autotune.measure.paired_rounds import Round
from hetconv.cost.estimator import StepEstimator
from hetconv.planner.candidates import Candidates
from hetconv.planner.make_plan import PLANNED
from hetconv.schemas.plan import SINGLE_DEVICE
from tests.nets import Chain

STEPS = {
    f"{SINGLE_DEVICE} (0: cpu)": (3.0, 3.0),
    f"{SINGLE_DEVICE} (1: cpu@0.5)": (6.0, 6.0),
    "even split by height": (2.0, 4.0),
    "uneven height split": (2.0, 2.0),
    PLANNED: (2.0, 2.5),
}
CHECK = Check(
    STEPS,
    {
        name: [0.8 * measured, measured, 1.2 * measured]
        for name, (_, measured) in STEPS.items()
    },
)


AGAIN = {name: measured for name, (_, measured) in STEPS.items()}


def test_the_plan_is_compared_with_what_ran_again_beside_it() -> None:
    found = plan_gains.gains([AGAIN] * 4, PLANNED)
    assert (found["vs_alone"], found["vs_even"], found["regret"]) == (1.2, 1.6, 0.25)
    assert found["measured again ms"] == {
        name: 1e3 * seconds for name, seconds in AGAIN.items()
    }
    assert plan_gains.gains([AGAIN] * 4, f"{SINGLE_DEVICE} (0: cpu)")["vs_alone"] == 1.0


def test_a_split_is_no_slower_than_its_own_step_without_messages() -> None:
    """That is told apart: no plan can be so fast."""
    rounds = [AGAIN | {plan_gains.SILENT: silent} for silent in (2.0, 1.0, 2.5)]
    found = plan_gains.gains(rounds, PLANNED)
    assert found[plan_gains.OF_SILENT] == 1.25
    assert {name: found[name] for name in ("vs_alone", "vs_even", "regret")} == {
        "vs_alone": 1.2,
        "vs_even": 1.6,
        "regret": 0.25,
    }
    assert (
        plan_gains.doubt([AGAIN | {plan_gains.SILENT: 0.1}] * 3, "uneven height split")
        == 0.0
    )
    assert plan_gains.OF_SILENT not in plan_gains.gains([AGAIN] * 2, PLANNED)


def test_who_is_the_fastest_is_not_told_by_the_rounds_that_tell_by_how_much() -> None:
    """Two plans that are alike but for noise, which makes each the faster one in every
    other round.
    """
    rounds = [{"a": 1.0, "b": 1.25}, {"a": 1.25, "b": 1.0}] * 4
    assert plan_gains.regret(rounds, "a") == plan_gains.regret(rounds, "b") == 0.0
    rounds = [{"a": 1.0, "b": 1.25}] * 8
    assert (plan_gains.regret(rounds, "a"), plan_gains.regret(rounds, "b")) == (
        0.0,
        0.25,
    )


def test_a_plan_is_in_doubt_where_rounds_differ_about_it() -> None:
    """The fastest is in none: it loses nothing, however its steps vary."""
    steady = [{"a": 1.0, "b": 1.25}] * 8
    assert plan_gains.doubt(steady, "b") < autotune.MAX_DOUBT
    varying = [{"a": 1.0, "b": b} for b in (1.1, 1.5)] * 4
    assert plan_gains.doubt(varying, "a") == 0.0
    assert plan_gains.doubt(varying, "b") > 5 * autotune.MAX_DOUBT


class Halves:
    """A check in which the two halves of so many rounds agree by this tau."""

    def __init__(self, tau: float, ran: int):
        self.figures, self.ran = {"tau of rounds": tau}, ran


@pytest.mark.parametrize(
    ("taus", "more"), [([0.95], 0), ([0.9, 0.94, 0.96], 2), ([0.5] * 9, 4)]
)
def test_rounds_go_on_until_their_halves_agree(
    taus: list[float], more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two plans that take 2 and 3 seconds, seven rounds at a time: 200 seconds are 40 rounds."""
    asked: list[float] = []

    def rounds(
        steps: object, count: int, device: object, longest: float = 0.0, most: int = 0
    ) -> list[Round]:
        asked.append(longest)
        return [{"a": 2.0, "b": 3.0}] * max(count, int(longest / 5))

    def check(ran: list[Round]) -> Any:
        return Halves(taus[len(asked) - 1], len(ran))

    monkeypatch.setattr(autotune, "paired_rounds", rounds)
    found: Any = autotune.checked({}, torch.device("cpu"), check)
    assert found.ran == 12 + 7 * more
    assert asked == [autotune.MIN_TOTAL_S, *[0.0] * more]


def test_what_can_be_gained_hangs_on_how_fast_devices_are() -> None:
    assert plan_gains.possible((1.0, 0.25)) == {
        "possible vs_alone": 1.25,
        "possible vs_even": 2.5,
    }


def test_the_fastest_run_again_with_what_they_are_compared_with() -> None:
    alone, slow_alone, even, best, planned = AGAIN
    assert plan_gains.last(AGAIN, planned) == [planned, best, alone, even]
    assert plan_gains.last(AGAIN, alone) == [alone, best, even]
    close = {f"{k}": 2.0 + k / 100 for k in range(1, 9)}
    assert plan_gains.last(AGAIN | close, planned) == [
        planned,
        best,
        "1",
        "2",
        "3",
        alone,
        even,
    ]
    assert slow_alone not in plan_gains.last(AGAIN | close, planned)


def test_predictions_are_compared_with_what_was_measured() -> None:
    found = autotune.figures(CHECK)
    assert found["median error"] == 0.0
    assert found["p90 error"] == pytest.approx(0.38)
    assert found["predicted and measured ms"][PLANNED] == [2000.0, 2500.0]


def test_plans_are_compared_once() -> None:
    graph = hetconv.capture(Chain(), torch.zeros(2, 4, 16, 16))
    profile = hetconv.ClusterProfile.from_devices(["cpu", "cpu@0.5"])
    first = compared(graph, profile, "infer", {})
    again = compared(graph, profile, "infer", {PLANNED: first["uneven height split"]})
    assert "uneven height split" in first
    assert "uneven height split" not in again
    split = [
        splits for name, splits in first.items() if not name.startswith(SINGLE_DEVICE)
    ]
    assert all(a != b for a, b in combinations(split, 2))
    assert sum(name.startswith(SINGLE_DEVICE) for name in again) == 2
    assert len(first) == PLANS


def test_plans_are_spread_from_the_fastest_to_the_slowest() -> None:
    graph = hetconv.capture(stack(2, 48), torch.zeros(1, 3, 256, 256))
    profile = hetconv.ClusterProfile.from_devices(["cpu", "cpu@0.5"], link="host")
    pricer, found = (
        StepEstimator(graph, profile, "infer"),
        compared(graph, profile, "infer", {}),
    )
    ways = Candidates(graph, profile, "infer").whole_models()
    step_s = sorted(
        pricer.of(name).estimate(splits)[0].step_s for name, splits in found.items()
    )
    known = [
        pricer.of(name).estimate(splits)[0].step_s
        for name, splits in ways.items()
        if "replicated" not in name
    ]
    assert step_s[0] <= min(known) < step_s[-1]
    assert len(found) == PLANS
    assert sum(name.startswith("even") for name in found) == 4
    assert sum(b / a > 1.02 for a, b in pairwise(step_s)) >= PLANS / 2


def test_results_are_printed_and_written_after_each_case(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = (
        {"chosen": "uneven height split"}
        | autotune.figures(CHECK)
        | plan_gains.gains([AGAIN] * 4, PLANNED)
    )
    row |= {
        "possible vs_alone": 1.5,
        "possible vs_even": 2.0,
    }
    row |= {
        autotune.LAYERS: 0.05,
        autotune.REPEATED: 0.04,
        autotune.OF_COMPUTING: 1.25,
        plan_gains.OF_SILENT: 1.2,
    }
    monkeypatch.setattr(autotune, "run_on", lambda devices, *_: row)
    file = tmp_path / "new" / "autotune.json"
    bench.main(
        [
            "autotune",
            "--pairs",
            "cpu,cpu@0.5;cpu,cpu busy",
            "--models",
            "U-Net",
            "--modes",
            "infer",
            "-o",
            str(file),
        ]
    )
    written = json.loads(file.read_text())
    said = capsys.readouterr().out.splitlines()
    assert [r["pair"] for r in written["cases"]] == ["cpu,cpu@0.5", "cpu,cpu busy"]
    assert json.loads(said[-1]) == written
    assert "1.20 of 1.50x alone, 1.60 of 2.00x even, 1.25x" in said[0]
    assert (
        "1.25x what it computes, 1.20x its step without messages, regret 25.0%"
        in said[0]
    )
    assert "the same measured again: steps by 20.0%, layers by 4.0%" in said[0]
    assert any("MISSED" in text and "regret" in text for text in said)
    assert any("MISSED" in text and "without messages" in text for text in said)


@pytest.mark.parametrize(
    "wrong", [["--pairs", "cpu,tpu"], ["--models", "LeNet"], ["--modes", "sleep"]]
)
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


def test_a_case_that_is_measured_anew_replaces_the_older_one(tmp_path: Path) -> None:
    first, second = (
        {"pair": "cpu,cpu@0.5", "model": name, "mode": "infer", "regret": 0.5}
        for name in ("A", "B")
    )
    file = tmp_path / "autotune.json"
    assert autotune.with_others(file, [first]) == [first]
    file.write_text(json.dumps({"cases": [first, second]}))
    anew = first | {"regret": 0.0}
    assert autotune.with_others(file, [anew]) == [anew, second]
