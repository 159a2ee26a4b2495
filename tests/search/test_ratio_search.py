"""The study of a plan's ratio: which plans have one, when trials can tell, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetconv.autotune.measure.paired_rounds import Paced
from hetconv.autotune.search.journal import Store
from hetconv.autotune.search.race import Order, Outcome, Usual
from hetconv.autotune.search.ratio_search import CLEAR, RatioStudy, ratio_of, tells
from hetconv.autotune.search.study import TrialFailedError
from hetconv.cost.estimator import StepEstimator
from hetconv.planner.make_plan import make_plan
from hetconv.schemas.cluster_profile import ClusterProfile, TunedRatio
from hetconv.schemas.plan import Plan
from hetconv.sharding.layer_rules import REPLICATE, Split
from hetconv.tracing.tracer import capture
from tests.nets import Chain

BIG, SMALL = Split("height", (30, 2)), Split("height", (5, 3))


def test_a_ratio_is_that_of_the_largest_layer_of_plans_of_one_kind() -> None:
    assert ratio_of({"a": SMALL, "b": BIG, "c": REPLICATE}) == ("height", (30, 2))
    assert ratio_of({"a": SMALL, "b": Split("width", (1, 1))}) is None
    assert ratio_of({"a": Split("filter", (3, 1))}) is None
    assert ratio_of({"a": Split("height", (2, 2, 1), ((2, 1), (1, 1)))}) is None
    assert ratio_of({"a": Split("height", (8, 0))}) is None
    assert ratio_of({"a": REPLICATE}) is ratio_of({}) is None


def test_trials_must_tell_what_a_ratio_may_gain() -> None:
    assert tells(0.0)
    assert tells(0.7 * CLEAR)
    assert not tells(0.75 * CLEAR)


def study(
    folder: Path, seconds: Callable[[int], float | None]
) -> tuple[TunedRatio | None, list[str]]:
    """From 8:8 rows, where steps take ``seconds`` by the rows of the first device; and
    what is said.
    """
    graph, lines = capture(Chain(), torch.zeros(2, 4, 16, 16)), list[str]()
    profile = ClusterProfile.from_devices(["cpu", "cpu@0.5"], link="host")
    base, usual = (
        make_plan(graph, profile),
        Usual(StepEstimator(graph, profile, "train")),
    )

    def lead(order: Order, enough: Callable[[Any], bool] = lambda _: False) -> Outcome:
        took: dict[str, Paced] = {}
        for name, way in order.ways.items():
            assert isinstance(way, Plan)
            found = seconds(max((s.sizes for s in way.splits.values()), key=sum)[0])
            if found is None:
                raise TrialFailedError("on rank 1: there is no more memory")
            took[name] = Paced(found, (1e-3, 1e-3))
        return Outcome([took] * order.rounds)

    job, store = (
        SimpleNamespace(mode="train", seed=0, trials=8),
        Store(folder, {}, resume=False),
    )
    run: Any = SimpleNamespace(
        graph=graph,
        job=job,
        store=store,
        spent=0.0,
        say=SimpleNamespace(
            stage=lambda *_: None, advance=lambda *_: None, line=lines.append
        ),
        race=SimpleNamespace(lead=lead),
        device=torch.device("cpu"),
        passed=lambda part: lambda: False,
    )
    return RatioStudy(run, base, usual, "height", (8, 8), 1.0).tuned(0.1), lines


def test_the_fastest_weights_are_found(tmp_path: Path) -> None:
    found, (line,) = study(tmp_path, lambda rows: max(rows / 10, (16 - rows) / 6))
    assert found is not None
    assert (found.kind, found.weights, found.computed_weights) == (
        "height",
        (10, 6),
        (8, 8),
    )
    assert (found.step_s, found.computed_step_s) == (1.0, 8 / 6)
    assert found.trials >= 3
    assert line == "height 10:6: 1000.0 ms a step; computed 8:8: 1333.3 ms"


def test_the_computed_weights_stay_where_none_are_faster(tmp_path: Path) -> None:
    found, _ = study(tmp_path, lambda rows: 1.0 + abs(rows - 8))
    assert found is not None
    assert (found.weights, found.step_s) == ((8, 8), found.computed_step_s)


@pytest.mark.parametrize("fails", ["computed", "others"])
def test_weights_that_fail_are_not_chosen(tmp_path: Path, fails: str) -> None:
    found, lines = study(
        tmp_path, lambda rows: None if (rows == 8) is (fails == "computed") else 1.0
    )
    if fails == "computed":
        assert found is None
        assert (
            "no ratio is refined, for the height split that was computed failed on rank 1"
            in lines[0]
        )
    else:
        assert found is not None
        assert found.weights == (8, 8)
