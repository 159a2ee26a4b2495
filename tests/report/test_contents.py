"""What the page says of a plan and a profile, in words and numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetconv.autotune.report.contents import read
from hetconv.autotune.report.plan_contents import LayerRow, PlanContents
from hetconv.autotune.report.tables import Table
from hetconv.autotune.report.text import ESTIMATED
from hetconv.errors import PlanError
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.device_model import LinkModel
from hetconv.schemas.plan import SINGLE_DEVICE, Plan
from hetconv.schemas.provenance import Disturbance
from hetconv.schemas.tuning_results import TunedPlan
from hetconv.sharding.split import REPLICATE, Split

from .made import cluster, plan


def told(made: Plan, profile: ClusterProfile | None = None) -> PlanContents:
    found = read(profile or cluster(*made.devices), made).plan
    assert found is not None
    return found


def row(name: str, made: Plan) -> LayerRow:
    return next(layer for layer in told(made).layers if layer.name == name)


def test_a_layer_has_its_shares_its_times_and_what_else_was_considered() -> None:
    two = row("two", plan())
    assert (two.kind, two.shares, two.sizes) == ("height", (0.75, 0.25), "3:1")
    assert told(plan()).heads == ("ms 0", "ms 1", "MB moved", "most MB held")
    assert two.cells == ("400.00", "600.00", "5.00", "6.00")
    assert two.devices.rows == (
        ("0: a", "3", "100.000", "300.000", "6.00"),
        ("1: b", "1", "200.000", "400.000", "2.00"),
    )
    assert two.alternatives is not None
    assert [cells[-1] for cells in two.alternatives.rows] == [
        "is chosen",
        "takes as long",
        "computes longer, but moves less",
        "computes longer and moves longer",
        "computes longer",
    ]
    assert two.alternatives.marked == {0}
    assert row("one", plan()).alternatives is None


def test_the_facts_are_those_of_the_prediction() -> None:
    facts = {label: (value, note) for label, value, note in told(plan()).facts}
    assert facts["Predicted step"] == ("1000.00 ms", "from measurements")
    assert facts["Against even split"] == ("2.00x", "which takes 2000.00 ms")
    assert facts["Busiest device"][0] == "75%"
    assert facts["Sent per step"][0] == "8.00 MB"
    assert facts["Memory"] == ("0.10 GB", "on 0: a, which needs most")


def test_devices_compute_move_data_and_wait() -> None:
    usage = told(plan()).usage
    assert usage is not None
    assert [cells[:5] for cells in usage.rows] == [
        ("0: a", "500.00", "250.00", "250.00", "8.00"),
        ("1: b", "750.00", "125.00", "125.00", "0.00"),
    ]
    assert plan().predicted is not None
    before = replace(plan(), predicted=replace(plan().predicted, communication_s=()))
    usage = told(before).usage
    assert usage is not None
    assert usage.heads[3] == "moves data or waits ms"
    assert [cells[2:4] for cells in usage.rows] == [("-", "500.00"), ("-", "250.00")]


def test_plans_of_the_whole_model_come_fastest_first() -> None:
    others = told(plan()).alternatives
    assert others is not None
    assert others.rows == (
        ("planned", "+0.0%", "1000.00"),
        ("even split", "+100.0%", "2000.00"),
    )
    assert (others.marked, others.bars) == ({0}, (0.5, 1.0))


def test_a_plan_by_hand_predicts_nothing() -> None:
    by_hand = plan().with_splits({"two": REPLICATE})
    found = told(by_hand)
    assert (found.facts, found.usage, found.alternatives) == ((), None, None)
    two = row("two", by_hand)
    assert (two.shares, two.sizes) == ((), "every device computes all")
    assert two.cells == ("-", "-", "0.00", "-")
    empty = told(replace(plan(), layers={}))
    assert empty.layers == ()


def test_many_devices_have_two_columns_for_all() -> None:
    names = tuple("abcdef")
    wide = Split("height", (3, 1, 1, 1, 1, 1))
    layer = plan().layers["two"]
    layer = replace(
        layer,
        split=wide,
        forward_s=(1.0, *(0.5,) * 5),
        backward_s=(),
        alternatives=(),
        memory_bytes=(),
    )
    made = replace(
        plan(), devices=names, layers={"two": layer}, predicted=None, timeline=None
    )
    found = told(made)
    assert found.heads[:2] == ("slowest ms", "mean ms")
    assert found.layers[0].cells[:2] == ("1000.00", "583.33")


def tuned(made: Plan) -> TunedPlan:
    on_a = f"{SINGLE_DEVICE} (0: a)"
    return TunedPlan(
        "digest", "train", "planned", made.splits, 0.8, 1.0, 3, on_a, 1.6, None
    )


def test_a_plan_that_was_measured_says_so() -> None:
    profile = replace(cluster("a", "b"), plans=(tuned(plan()),))
    facts = {label: (value, note) for label, value, note in told(plan(), profile).facts}
    assert facts["Measured step"] == ("800.00 ms", "predicted 1000.00 ms (+25%)")
    (steps,) = read(profile, plan()).steps
    assert steps.title == "model digest, train"
    assert steps.rows[0][:5] == ("tuned", "planned", "800.00", "1000.00", "+25%")
    assert steps.rows[1][2:] == ("1600.00", "-", "-", "2.00x")


def test_a_plan_for_other_devices_is_refused() -> None:
    with pytest.raises(PlanError, match=r"for a, b, but the profile has a, c; give"):
        read(cluster("a", "c"), plan())


def test_a_profile_alone_has_devices_links_and_origins() -> None:
    profile = ClusterProfile.from_devices("2xT4/4xL4", between="ethernet-100g")
    found = read(profile)
    assert (found.plan, found.title) == (None, "Cluster of 6 devices")
    assert found.warnings == (ESTIMATED,)
    marked = replace(profile, estimated=False, disturbed=(Disturbance("links", 2.5),))
    assert "links (2.5x)" in read(marked).warnings[0]
    assert [cells[2] for cells in found.devices.rows] == ["0", "0", "1", "1", "1", "1"]
    assert found.links is not None
    assert [cells[0] for cells in found.links.rows] == [
        "0-1, 2-3, 2-4, 2-5, 3-4, 3-5 and 1 more",
        "0-2, 0-3, 0-4, 0-5, 1-2, 1-3 and 2 more",
    ]
    assert found.links.rows[1][1:] == ("50 us", "12.50 GB/s", "12.50 GB/s")
    assert any("card of node 1, out" in line for line in found.messages)
    assert "between: ethernet-100g" in found.origins


def test_links_and_factors_that_were_measured_are_told() -> None:
    bare = cluster("a", "b")
    a, b = bare.devices
    profile = replace(
        bare,
        devices=(replace(a, corrections={"height": 1.25}), b),
        links={"0-1": LinkModel(120e-6, 1e-9, back_s_per_byte=0.0)},
    )
    found = read(profile)
    assert found.links is not None
    assert found.links.rows == (("0-1", "120 us", "1.00 GB/s", "no limit"),)
    assert found.corrections is not None
    assert found.corrections.rows == (("0: a", "1.250"), ("1: b", "-"))
    assert read(cluster("a")).links is None


def test_columns_of_numbers_are_known() -> None:
    rows = (("a", "1.50x", "-", "3 GB"), ("b", "+2.0%", "7", ""))
    assert Table("", ("", "", "", ""), rows).numeric == (False, True, True, False)
