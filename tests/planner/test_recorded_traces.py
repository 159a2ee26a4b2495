"""The controller over what was recorded of ranks that became slower."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from bench.rebalance.scenarios import Schedule
from hetconv.planner.rebalance import STEPS_PER_CHECK, RebalancePolicy
from tests.planner.test_rebalance import MOVE_S, Cluster, Trace, run

RECORD = Path(__file__).parents[2] / "bench" / "results" / "cpu" / "rebalance.json"
SCHEDULE = Schedule()


def recorded(scenario: str) -> tuple[Trace, int]:
    """Returns how slow each rank was in each step, relative to the first steps."""
    document: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    busy_s = document["steps"][scenario]["busy_s"]
    first_s = [median(of_rank[: SCHEDULE.slow_from]) for of_rank in busy_s]
    steps = [
        tuple(s / first for s, first in zip(step, first_s, strict=True))
        for step in zip(*busy_s, strict=True)
    ]
    return steps.__getitem__, len(steps)


@pytest.mark.parametrize("scenario", ["throttled", "busy process"])
def test_a_recorded_slow_down_is_followed_and_left(scenario: str) -> None:
    cluster, (trace, steps) = Cluster(2), recorded(scenario)
    fixed, moved = (run(cluster, trace, steps, controlled=on) for on in (False, True))
    late = slice(SCHEDULE.slow_from + 60, SCHEDULE.slow_until)
    assert median(moved.step_s[late]) < 0.85 * median(fixed.step_s[late])
    after = slice((SCHEDULE.slow_until + steps) // 2, steps)
    assert median(moved.step_s[after]) < 1.1 * median(fixed.step_s[after])
    assert moved.total_s < fixed.total_s + MOVE_S


def test_a_quiet_run_loses_no_more_than_until_a_drift_is_noticed() -> None:
    cluster, (trace, steps) = Cluster(2), recorded("quiet")
    fixed, moved = (run(cluster, trace, steps, controlled=on) for on in (False, True))
    late = RebalancePolicy().window_steps + STEPS_PER_CHECK
    drift = max(abs(f - 1) for s in range(steps) for f in trace(s))
    assert moved.total_s < fixed.total_s + MOVE_S + late * drift * fixed.step_s[0]
