"""Merged profiles: what belongs to all devices, corrections, copies and tiles."""

from __future__ import annotations

from dataclasses import fields, replace

from hetconv.autotune.cli.merge import merge
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.device_model import Copying, DeviceModel, LinkModel, SharedWire
from hetconv.schemas.provenance import Disturbance, MeasurementConditions
from hetconv.schemas.tuning_results import TunedTile
from hetconv.sharding.conv_spec import ConvSpec
from tests.profiles import A0, A1, B0, BEFORE, NEW, OLD, profile, took


def of_all_together(merged: ClusterProfile) -> tuple[float, ...]:
    return (
        merged.overlap,
        merged.sum_s_per_byte,
        merged.latency_at_work,
        merged.bytes_at_work,
    )


def test_what_belongs_to_all_devices_together_is_the_newest_profiles_of_all_or_the_worst() -> (
    None
):
    old = replace(
        profile([A0, A1], OLD),
        overlap=0.5,
        sum_s_per_byte=2e-9,
        latency_at_work=4.0,
        bytes_at_work=3.0,
    )
    new = replace(
        profile([A0, A1], NEW),
        overlap=0.9,
        sum_s_per_byte=1e-9,
        latency_at_work=2.0,
        bytes_at_work=1.5,
    )
    for profiles in ({"old": old, "new": new}, {"new": new, "old": old}):
        assert of_all_together(merge(profiles)[0]) == (0.9, 1e-9, 2.0, 1.5)
    other = replace(
        profile([B0], NEW),
        overlap=0.7,
        sum_s_per_byte=0.0,
        latency_at_work=3.0,
        bytes_at_work=2.0,
    )
    assert of_all_together(merge({"old": old, "other": other}, "ethernet-25g")[0]) == (
        0.5,
        2e-9,
        4.0,
        3.0,
    )


def test_a_link_between_the_same_two_is_turned_to_the_order_of_the_first_profile() -> (
    None
):
    new = profile([A1, A0], NEW)
    new = replace(new, links={"0-1": LinkModel(1e-6, 1e-9, NEW, 3e-9)})
    merged, _ = merge({"old": profile([A0, A1], OLD), "new": new})
    assert merged.links == {"0-1": LinkModel(1e-6, 3e-9, NEW, 1e-9)}


def with_others(at: MeasurementConditions, seconds: float) -> ClusterProfile:
    """Operators beside layers and corrections, one of each with the name of the time."""
    (device,) = profile([A0], at).devices
    device = replace(
        device,
        others={"pool": took(seconds), at.at: took(seconds)},
        corrections={"height": seconds, at.at: seconds},
    )
    return replace(profile([A0], at), devices=(device,))


def test_corrections_are_merged_if_they_are_of_the_newest_versions() -> None:
    old, new, before = (
        with_others(at, seconds)
        for at, seconds in ((OLD, 1.0), (NEW, 2.0), (BEFORE, 3.0))
    )
    for profiles in (
        {"old": old, "new": new},
        {"new": new, "before": before, "old": old},
    ):
        (device,) = merge(profiles)[0].devices
        assert device.others["pool"] == took(2.0)
        assert device.others[OLD.at] == took(1.0, OLD)
        assert device.corrections == {"height": 2.0, NEW.at: 2.0, OLD.at: 1.0}


def test_what_copies_take_is_the_newest_that_was_measured_with_others_on_the_host() -> (
    None
):
    def copying(at: MeasurementConditions, seconds: float | None) -> ClusterProfile:
        made = profile([A0], at)
        known = Copying(seconds, seconds, seconds) if seconds is not None else None
        return replace(made, devices=(replace(made.devices[0], copying=known),))

    old, new, by_itself = (
        copying(OLD, 1.0),
        copying(NEW, 2.0),
        copying(replace(NEW, at="2099-01-01"), None),
    )
    assert merge({"old": old})[0].devices[0].copying == Copying(1.0, 1.0, 1.0)
    assert merge({"by itself": by_itself})[0].devices[0].copying is None
    for profiles in ({"old": old, "new": new}, {"new": new, "old": old}):
        assert merge(profiles)[0].devices[0].copying == Copying(2.0, 2.0, 2.0)
    assert merge({"new": new, "by itself": by_itself})[0].devices[0].copying == Copying(
        2.0, 2.0, 2.0
    )


def test_merging_knows_every_field_of_a_profile() -> None:
    """Who adds one says in merge what becomes of it, and tests that here."""
    known = {
        ClusterProfile: "devices links tuned fingerprint estimated tiles chunks shared nodes "
        "overlap sum_s_per_byte "
        "plans latency_at_work bytes_at_work disturbed",
        DeviceModel: "name kind memory_bytes flops_per_s bytes_per_s overhead_s "
        "backward_ratio emulated operators "
        "identity measured backward_overhead_s others corrections copying",
        SharedWire: "name pairs s_per_byte measured",
    }
    for type_, names in known.items():
        assert {field.name for field in fields(type_)} == {*names.split()}


def test_of_the_same_tile_the_newest_profiles_counts() -> None:
    kernel = ConvSpec(1, 8, (8, 8), 8, (3, 3), (1, 1), ((0, 0), (0, 0)), (1, 1))
    tiles = [
        TunedTile("A100", "2.13.0", "3.7.1", "forward", kernel, "tf32", c, 1.0)
        for c in ("aten", "16x32")
    ]
    old, new = (
        replace(profile([A0], at), tiles=(tile,))
        for at, tile in zip((OLD, NEW), tiles, strict=True)
    )
    for profiles in ({"old": old, "new": new}, {"new": new, "old": old}):
        assert merge(profiles)[0].tiles == (tiles[1],)
    other = replace(old, tiles=(replace(tiles[0], what="input gradient"),))
    assert len(merge({"old": other, "new": new})[0].tiles) == 2


def test_what_was_disturbed_in_any_profile_is_kept() -> None:
    files = {
        name: replace(profile([A0], at), disturbed=(Disturbance(name, 2.0),))
        for name, at in (("links", OLD), ("plans", NEW))
    }
    assert [d.what for d in merge(files)[0].disturbed] == ["links", "plans"]
