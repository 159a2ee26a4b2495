"""Figures and picture of `python -m bench rebalance`, from made-up seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from bench.rebalance.picture import draw
from bench.rebalance.scenarios import Schedule
from bench.rebalance.suite import followed, steps_to_follow

SCHEDULE = Schedule(steps=40, slow_from=10, slow_until=30)
COURSE = {
    "fixed_s": [1.0] * 10 + [2.5] * 20 + [1.0] * 10,
    "rebalanced_s": [1.0] * 10 + [2.5] * 6 + [1.5] * 14 + [1.2] * 4 + [1.0] * 6,
    "tuned_s": [1.3] * 10 + [1.4] * 20 + [1.3] * 10,
    "control_s": [0.0] * 40,
    "busy_s": [[1.0] * 40, [1.0] * 40],
    "decisions": [
        {"step": 16, "action": "move", "migration_s": 0.2},
        {"step": 22, "action": "keep", "migration_s": 0.0},
        {"step": 34, "action": "move", "migration_s": 0.1},
    ],
}


def test_figures_follow_from_the_seconds_of_steps() -> None:
    found = followed(COURSE, SCHEDULE)
    assert found["before_ms"] == 1000
    assert found["over_tuned"] == pytest.approx(1.5 / 1.4, abs=1e-3)
    assert found["steps_to_follow"] == 4  # of the five next steps three have followed
    assert found["over_fixed_after"] == 1
    assert found["net_gain"] == pytest.approx(60 / (10 + 15 + 21), abs=1e-3)
    assert (found["moves"], found["migration_s"]) == (2, 0.3)


def test_a_plan_that_never_follows_is_told_as_such() -> None:
    assert steps_to_follow([1.2] * 30) is None


def test_the_picture_has_a_panel_for_each_scenario(tmp_path: Path) -> None:
    path = tmp_path / "steps.png"
    draw({"throttled": COURSE, "busy process": COURSE}, SCHEDULE, path)
    with Image.open(path) as image:
        assert image.size[0] > image.size[1] > 500
