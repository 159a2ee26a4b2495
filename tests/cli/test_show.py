"""What a person sees of plans: a layer explained, two plans compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hetconv.autotune.cli.diff import show_diff
from hetconv.autotune.cli.show import show_layer, show_plan, show_profile
from hetconv.errors import PlanError
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.device_model import Copying
from hetconv.schemas.plan import Alternative, LayerPlan, Plan, Prediction
from hetconv.schemas.timeline import Spans, Timeline
from hetconv.sharding.split import REPLICATE, Split
from tests.nets import Chain, plan_of, splits_of

ROWS, CHANNELS = Split("height", (3, 1)), Split("filter", (4, 2))


def plan() -> Plan:
    bare = plan_of(Chain(), splits_of(Chain(), ("filter", "height"), (3, 1)), 2)
    considered = (
        Alternative(ROWS, 1e-3, 2e-3, 0.0),
        Alternative(Split("width", (3, 1)), 1e-3, 2e-3, 0.0),
        Alternative(REPLICATE, 4e-3, 0.5e-3, 1.5e-3),
        Alternative(CHANNELS, 2e-3, 7e-3, 6e-3),
        Alternative(Split("height", (1, 1)), 9e-3, 2e-3, 8e-3),
    )
    layers = {
        n: LayerPlan(x.op, x.split, (0.1, 0.2), (0.3, 0.4), 5_000_000)
        for n, x in bare.layers.items()
    }
    layers["two"] = replace(layers["two"], split=ROWS, alternatives=considered)
    prediction = Prediction(
        1.0,
        0.25,
        (0.5, 0.75),
        ((0, 8_000_000), (0, 0)),
        (10**8, 5 * 10**7),
        1.5,
        (0.25, 0.125),
    )
    alternatives = {"planned": 1.0, "even split": 2.0}
    return Plan(
        ("a", "b"),
        "train",
        "Chain",
        ((2, 4, 16, 16),),
        layers,
        "planned",
        prediction,
        alternatives,
    )


def said(show: Callable[[Console], Any]) -> str:
    console = Console(record=True, width=160)
    show(console)
    return console.export_text()


def test_a_layer_is_explained_by_what_speaks_against_each_other_split() -> None:
    lines = said(lambda console: show_layer(plan(), "two", console)).splitlines()
    assert "two" in lines[0]
    assert "height 3:1" in lines[0]
    whys = [line.rstrip().split("  ")[-1] for line in lines[2:7]]
    assert whys == [
        "is chosen",
        "takes as long",
        "computes longer, but moves less",
        "computes longer and moves longer",
        "computes longer",
    ]
    assert [line.split()[0] for line in lines[2:7]] == [
        "height",
        "width",
        "replicate",
        "filter",
        "height",
    ]
    assert lines[5].split()[1:5] == ["4:2", "2.000", "7.000", "6.000"]


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("nine", "no layer 'nine'; it has one, two"),
        ("one", "does not say what else was considered for 'one'"),
    ],
)
def test_what_cannot_be_explained_is_refused(name: str, match: str) -> None:
    with pytest.raises(PlanError, match=match):
        show_layer(plan(), name, Console())
    with pytest.raises(PlanError, match="does not say"):
        show_layer(plan().with_splits({"two": REPLICATE}), "two", Console())


def test_a_measured_step_is_told_beside_the_predicted_one() -> None:
    computes = Spans(devices=(0,), operators=(0,), start_ns=(0,), duration_ns=(10**9,))
    predicted = replace(plan(), timeline=Timeline(forward=("one",), computes=computes))
    text = said(lambda console: show_plan(predicted, console))
    assert "measured step" not in text
    assert "predicted step 1000.00 ms, of which busy" in text
    assert plan().predicted is not None
    timed = replace(
        predicted,
        predicted=replace(plan().predicted, step_s=3.0),
        alternatives={"even split": 2.0},
    )
    text = said(lambda console: show_plan(timed, console))
    assert "measured step 3000.00 ms\npredicted step 1000.00 ms" in text
    assert "of those this one was the fastest; the lower times are predictions" in text
    for others in ({"even split": 4.0}, None):
        slower = replace(timed, alternatives=others)
        text = said(lambda console, plan=slower: show_plan(plan, console))
        assert "fastest" not in text


def test_a_plan_file_keeps_what_was_considered(tmp_path: Path) -> None:
    plan().save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan()


def changed(**layer: Any) -> Plan:
    return replace(
        plan(), layers={**plan().layers, "two": replace(plan().layers["two"], **layer)}
    )


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            plan().with_splits({"two": CHANNELS}),
            ["two", "height 3:1", "filter 4:2", "1 of 5 layers", "1000.00", "-"],
        ),
        (
            changed(chunks=3),
            ["height 3:1 in 3 chunks", "600.00", "5.00", "1 of 5 layers"],
        ),
        (changed(op=plan().layers["one"].op), ["1 layers are other operators", "two"]),
        (replace(plan(), devices=("a", "c")), ["devices", "a, b", "a, c"]),
        (replace(plan(), mode="infer"), ["mode", "train", "infer"]),
        (replace(plan(), model="Other"), ["model", "Chain", "Other"]),
        (
            replace(plan(), inputs=((1, 4, 16, 16),)),
            ["inputs", "2x4x16x16", "1x4x16x16"],
        ),
        (
            replace(plan(), layers={"one": plan().layers["one"]}),
            ["4 of 5 layers", "no such layer", "height 3:1"],
        ),
        (
            replace(plan(), predicted=None),
            ["MB sent", "8.00", "busy, ms", "500.00, 750.00", "memory, MB", "100.00"],
        ),
    ],
)
def test_plans_differ(other: Plan, words: list[str]) -> None:
    for a, b in ((plan(), other), (other, plan())):
        text = said(lambda console, a=a, b=b: show_diff(a, b, console))
        assert all(word in text for word in words), text
        assert "one " not in text or len(other.layers) == 1, text
        assert "no difference" not in text
        assert show_diff(a, b, Console(quiet=True))


def test_plans_that_do_not_differ() -> None:
    assert "no difference" in said(lambda console: show_diff(plan(), plan(), console))
    assert not show_diff(plan(), changed(alternatives=()), Console(quiet=True))


def test_a_profile_shows_what_steps_have_taught() -> None:
    made = ClusterProfile.from_devices(["cpu", "cpu@0.5"])
    copies = replace(made.devices[0], copying=Copying(1e-10, 2e-10, 4e-10))
    taught = replace(made, devices=(copies, made.devices[1]), latency_at_work=4.0)
    before, after = (
        said(lambda console, p=p: show_profile(p, console)) for p in (made, taught)
    )
    assert "at work" not in before
    assert "4 times these latencies and 1 times the bytes' time" in after
    assert "rank 0 sends 10.0, joins 5.0 and adds 2.5 GB/s through memory" in after
    assert "rank 1 sends" not in after
