"""A timeline keeps the events of a simulated step, and refuses what is none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hetconv
from hetconv.errors import PlanError
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import Plan
from hetconv.schemas.timeline import Event, Spans, Timeline
from tests.nets import Chain

X = torch.zeros(2, 4, 16, 16)
EVENTS = [
    Event(0, "compute", "one", False, False, 0.0, 1e-6),
    Event(1, "transfer", "two", False, True, 1e-6, 1.5e-6),
    Event(1, "compute", "two", False, True, 1.5e-6, 2e-6),
    Event(1, "compute", "two", True, False, 2e-6, 3e-6),
    Event(0, "transfer", "one", True, False, 3e-6, 4.25e-6),
]


def test_events_come_back_kind_by_kind() -> None:
    found = Timeline.of(EVENTS)
    assert sorted(found.events()) == sorted(EVENTS)
    assert (found.forward, found.backward) == (("one", "two"), ("two", "one"))
    assert (found.step_s, found.world) == (4.25e-6, 2)
    assert (Timeline().step_s, Timeline().world) == (0.0, 0)


def test_a_plan_has_the_step_that_was_predicted_for_it(tmp_path: Path) -> None:
    cluster = ClusterProfile.from_devices("2xT4", link="pcie3-x16")
    made = hetconv.make_plan(hetconv.capture(Chain(), X), cluster)
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made
    assert made.predicted is not None
    assert made.timeline is not None
    assert made.timeline.step_s == pytest.approx(made.predicted.step_s, abs=1e-9)
    for rank, busy in enumerate(made.predicted.compute_s):
        spans = [
            e.end_s - e.start_s
            for e in made.timeline.events()
            if (e.device, e.thread, e.waits) == (rank, "compute", False)
        ]
        assert sum(spans) == pytest.approx(busy, abs=1e-9 * len(spans))
    assert made.with_splits({}).timeline is None


def test_a_layer_holds_its_parameters_and_its_result() -> None:
    """Of a device alone: three tensors of each parameter in training, and the result."""
    cluster = ClusterProfile.from_devices("T4")
    graph = hetconv.capture(Chain(), X)
    for mode, copies in (("train", 3), ("infer", 1)):
        made = hetconv.make_plan(graph, cluster, mode=mode)  # type: ignore[arg-type]
        parameters = sum(p.numel() for p in Chain().one.parameters())
        filters = Chain().one.weight.shape[0]
        result = 2 * filters * 16 * 16
        assert made.layers["one"].memory_bytes == (4 * (copies * parameters + result),)


@pytest.mark.parametrize(
    ("spans", "match"),
    [
        (Spans((0,), (0, 1), (0,), (1,)), "differ in length"),
        (Spans((0,), (7,), (0,), (1,)), "4 operators, and a span of operator 7"),
        (Spans((0,), (0,), (-1,), (1,)), "negative"),
    ],
)
def test_what_is_no_timeline_is_refused(spans: Any, match: str) -> None:
    with pytest.raises(PlanError, match=match):
        replace(Timeline.of(EVENTS), computes=spans)


def test_a_span_of_a_device_that_is_not_there_is_refused() -> None:
    cluster = ClusterProfile.from_devices("T4")
    made = hetconv.make_plan(hetconv.capture(Chain(), X), cluster)
    with pytest.raises(PlanError, match="span of rank 1 for 1 devices"):
        replace(made, timeline=Timeline.of(EVENTS))
