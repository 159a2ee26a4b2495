"""Figures hold the numbers of profile, plan and tuning job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hetconv.autotune.report import figures
from hetconv.autotune.report.figures import Figure
from hetconv.autotune.search.record import Study, Trial
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.device_model import LinkModel
from hetconv.schemas.plan import Plan

from .made import EVENTS, cluster, curves_of, plan, samples

CONV = "conv2d 1x{c}x56x56 k{c} 3x3 s(1,1) p((1,1),(1,1)) d(1,1) g1 float32 by pixels"
KEYS = [CONV.format(c=8 * c) for c in range(1, 4)]


def measured(*names: str) -> ClusterProfile:
    """Operators that take 1, 2 and 3 ms on the first device, and twice that on others."""
    bare = cluster(*names)
    devices = (
        replace(
            device,
            operators={
                key: curves_of(names, 1e-3 * (k + 1) * (1 + (rank > 0)))
                for k, key in enumerate(KEYS)
            },
            others={"elementwise float32": curves_of(names, 9e-3)},
        )
        for rank, device in enumerate(bare.devices)
    )
    return replace(bare, devices=tuple(devices))


def checked(figure: Figure) -> dict[str, Any]:
    """What the page's script reads, after Plotly has refused what it does not know."""
    graph_objects = pytest.importorskip("plotly.graph_objects")
    found = figure.to_json()
    graph_objects.Figure(found["data"], found["layout"])
    return found


def test_the_operators_that_take_longest_come_first_and_layers_before_others() -> None:
    found = list(figures.curves(measured("a", "b"), {}))
    assert [f.title for f in found] == [
        *map(figures.short, reversed(KEYS)),
        "elementwise float32",
    ]
    heaviest = checked(found[0])
    assert [t["name"] for t in heaviest["data"]] == [
        "0: a, forward",
        "0: a, backward",
        "1: b, forward",
        "1: b, backward",
    ]
    assert heaviest["data"][1]["x"] == [50.0, 100.0]
    assert heaviest["data"][1]["y"] == [3.0, 6.0]
    assert heaviest["data"][2]["y"] == [3.0, 6.0]


def test_devices_with_the_same_curve_share_it() -> None:
    found = checked(next(figures.curves(measured("a", "b", "b", "b"), {})))
    assert [t["name"] for t in found["data"]][2:] == [
        "1: b, …, forward",
        "1: b, …, backward",
    ]


def test_every_sample_is_drawn_and_those_far_above_are_counted() -> None:
    job = {KEYS[2]: [samples(3e-3), samples(6e-3, 9.0)]}
    found = next(figures.curves(measured("a", "b"), job))
    points = [t for t in checked(found)["data"] if t["name"].endswith("measured")]
    assert [len(t["x"]) for t in points] == [6, 6, 6, 6]
    assert sorted(points[0]["y"]) == [1.5] * 3 + [3.0] * 3
    assert "2 slower samples are above the axis" in found.about
    alone = {KEYS[2]: [{}, samples(6e-3)]}  # rank 0 had not the memory
    found = next(figures.curves(measured("a", "b"), alone))
    assert sum(t["name"].endswith("measured") for t in found.data) == 2


def test_links_that_differ_have_a_matrix() -> None:
    bare = cluster("a", "b", "c")
    assert list(figures.links(bare)) == []
    links = dict(bare.links) | {"0-1": LinkModel(120e-6, 1e-9, back_s_per_byte=0.0)}
    latency, speed = (checked(f) for f in figures.links(replace(bare, links=links)))
    assert latency["data"][0]["z"][0] == pytest.approx([None, 120.0, 50.0])
    assert speed["data"][0]["z"][0][1] == pytest.approx(1.0)
    assert speed["data"][0]["z"][1][0] == 0.0  # whose bytes cost nothing


@pytest.mark.parametrize(
    ("moves", "names"),
    [
        ((0.25, 0.125), ["computes", "moves data", "waits"]),
        ((), ["computes", "moves data or waits"]),
    ],
)
def test_bars_of_a_step_add_up_to_it(moves: Any, names: list[str]) -> None:
    assert plan().predicted is not None
    made = replace(plan(), predicted=replace(plan().predicted, communication_s=moves))
    data = checked(next(figures.usage(made)))["data"]
    assert [t["name"] for t in data] == names
    assert [sum(ms) for ms in zip(*(t["x"] for t in data), strict=True)] == [1e3, 1e3]
    by_hand = made.with_splits({})
    assert list(figures.usage(by_hand)) == list(figures.sent(by_hand)) == []


def test_bytes_are_shown_between_more_than_two_devices() -> None:
    assert list(figures.sent(plan())) == []
    p = plan().predicted
    assert p is not None
    sent = ((0, 1_000_000, 0), (0, 0, 2_500_000), (0, 0, 0))
    three = replace(
        p, compute_s=(*p.compute_s, 0.1), communication_s=(), sent_bytes=sent
    )
    three = replace(three, memory_bytes=(*p.memory_bytes, 1))
    made = replace(plan(), devices=("a", "b", "c"), layers={}, predicted=three)
    (found,) = figures.sent(made)
    assert checked(found)["data"][0]["z"] == [
        [None, 1.0, 0.0],
        [0.0, None, 2.5],
        [0.0, 0.0, None],
    ]


def test_trials_are_drawn_with_the_best_so_far() -> None:
    study = Study(
        "height ratio",
        "the computed ratio",
        (Trial("5:3", 1.0), Trial("7:1", None, "full"), Trial("6:2", 0.875)),
    )
    found = figures.trials(study)
    trials, best = checked(found)["data"]
    assert "the computed ratio" in found.about
    assert (trials["y"], best["y"]) == ([1.0, None, 0.875], [1.0, 1.0, 0.875])
    assert trials["text"] == ["5:3", "7:1", "6:2"]
    assert trials["marker"]["color"].index(figures.BEST) == 2
    nothing = checked(figures.trials(Study("", "", (Trial("", None, "full"),))))
    assert nothing["data"][1]["y"] == [None]


def test_the_timeline_is_the_simulated_step() -> None:
    found = figures.timeline(plan())
    assert found is not None
    assert (found["step_ms"], found["forward"]) == (1000.0, 1)
    assert found["operators"] == ["one", "two"]
    assert sum(len(spans[0]) for spans in found["kinds"].values()) == len(EVENTS)
    assert found["kinds"]["moves data"] == [(1,), (0,), (5 * 10**8,), (125 * 10**6,)]
    by_hand: Plan = plan().with_splits({})
    assert figures.timeline(by_hand) is None


def test_a_device_has_one_colour_and_alike_ones_share_it_where_there_are_many() -> None:
    assert len(set(figures.colours(["a", "a", "b", "c"]))) == 4
    many = figures.colours(["a", "b", "b", "a"] * 16)
    assert len(set(many)) == 2
    assert many[0] == many[3] == many[60]


def test_operators_are_named_in_short() -> None:
    assert figures.short(KEYS[0]) == "conv2d 1x8x56x56 k8 3x3 s(1,1), by pixels"
    assert figures.short("elementwise float32") == "elementwise float32"
