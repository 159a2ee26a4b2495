"""Merged profiles."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from hetconv.autotune.cli.merge import merge
from hetconv.autotune.cli.outdated import stale
from hetconv.errors import ProfileError
from hetconv.schemas.catalog import find_link
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.device_model import Copying, DeviceModel, LinkModel, SharedWire
from hetconv.schemas.provenance import DeviceIdentity, MeasurementConditions
from hetconv.schemas.tuning_results import TunedChunks, TunedPlan, TunedTile
from hetconv.sharding.conv_spec import ConvSpec
from hetconv.sharding.split import Split
from tests.profiles import A0, A1, B0, BEFORE, CPU, NEW, OLD, profile, took, tuned


def seconds(of: ClusterProfile, rank: int) -> dict[str, float]:
    return {
        key: model.forward.at(1.0) for key, model in of.devices[rank].operators.items()
    }


def test_of_the_same_devices_the_newest_measurement_counts_whatever_the_order() -> None:
    old, new = (
        profile([A0, A1], OLD, 1e12, x=1.0, y=2.0),
        profile([A1, A0], NEW, 2e12, x=3.0, z=4.0),
    )
    for profiles in ({"old": old, "new": new}, {"new": new, "old": old}):
        merged, left_out = merge(profiles)
        assert left_out == []
        assert [d.identity for d in merged.devices] == [
            d.identity for d in next(iter(profiles.values())).devices
        ]
        for rank in range(2):
            assert seconds(merged, rank) == {"x": 3.0, "y": 2.0, "z": 4.0}
            operators = merged.devices[rank].operators
            assert {key: model.measured for key, model in operators.items()} == {
                "x": None,
                "y": OLD,
                "z": None,
            }
        assert {d.measured for d in merged.devices} == {NEW}
        assert {d.flops_per_s["float32"] for d in merged.devices} == {2e12}
        assert merged.links["0-1"] == LinkModel(2e-8, 1e-9, NEW)


def test_merging_again_changes_nothing_and_knows_the_age_of_each_entry(
    tmp_path: Path,
) -> None:
    old, new = profile([A0], OLD, x=1.0, y=2.0), profile([A0], NEW, x=3.0)
    merged, _ = merge({"old": old, "new": new})
    merged.save(tmp_path / "merged.json")
    merged = ClusterProfile.load(tmp_path / "merged.json")
    assert merge({"merged": merged, "old": old})[0] == merged
    assert merge({"old": old, "merged": merged, "new": new})[0] == merged
    newer = profile([A0], replace(NEW, at="2026-11-22T00:00:00Z"), z=5.0)
    again, _ = merge({"newer": newer, "merged": merged})
    ages = {key: model.measured for key, model in again.devices[0].operators.items()}
    assert ages == {"x": NEW, "y": OLD, "z": None}


def test_what_was_measured_counts_before_what_was_estimated() -> None:
    measured = profile([A0, B0], OLD, 1e12, x=1.0)
    guess = profile([A0, B0], NEW, 9e12, x=9.0, y=9.0)
    devices = tuple(replace(d, measured=None) for d in guess.devices)
    guess = replace(
        guess, devices=devices, links={"0-1": LinkModel(9.0, 9.0)}, estimated=True
    )
    for profiles in (
        {"guess": guess, "measured": measured},
        {"measured": measured, "guess": guess},
    ):
        assert merge(profiles)[0] == measured


def test_hosts_are_joined_by_a_link_of_the_catalogue_and_each_has_a_card() -> None:
    merged, _ = merge(
        {"1": profile([A0, A1], OLD), "2": profile([B0], OLD)}, "ethernet-25g"
    )
    assert merged.nodes == ((0, 1), (2,))
    sheet = find_link("ethernet-25g")
    wire = LinkModel(sheet.latency_s, 1 / sheet.bytes_per_s)
    assert merged.links == {"0-1": LinkModel(1e-8, 1e-9, OLD), "0-2": wire, "1-2": wire}
    assert {w.name: set(w.pairs) for w in merged.shared} == {
        "card of a, out": {(0, 2), (1, 2)},
        "card of a, in": {(2, 0), (2, 1)},
        "card of b, out": {(2, 0), (2, 1)},
        "card of b, in": {(0, 2), (1, 2)},
    }
    assert merged.fingerprint == {"between": "ethernet-25g"}
    assert not merged.estimated


def test_a_measured_link_takes_the_place_of_the_catalogues_and_cards_stay_with_their_hosts() -> (
    None
):
    joined, _ = merge(
        {"1": profile([A0], OLD), "2": profile([B0], OLD)}, "ethernet-25g"
    )
    merged, _ = merge({"3": profile([B0, A0], OLD), "joined": joined})
    assert merged.links == {"0-1": LinkModel(1e-8, 1e-9, OLD)}
    assert {w.name: w.pairs for w in merged.shared if "out" in w.name} == {
        "card of a, out": ((1, 0),),
        "card of b, out": ((0, 1),),
    }


def test_a_hosts_card_is_one_wire_whatever_profile_speaks_of_it_and_carries_no_measured_link() -> (
    None
):
    a, b, c = (
        profile([i], OLD) for i in (A0, B0, replace(B0, host="c", unit="GPU-c0"))
    )
    slow, fast = (
        merge({"a": a, "b": b}, "ethernet-25g")[0],
        merge({"a": a, "c": c}, "ethernet-100g")[0],
    )
    merged, _ = merge({"slow": slow, "fast": fast}, "ethernet-400g")
    cards = {
        w.name.removeprefix("card of "): (set(w.pairs), 1e-9 / w.s_per_byte)
        for w in merged.shared
    }
    assert cards["a, out"] == (
        {(0, 1), (0, 2)},
        pytest.approx(12.5),
    )  # what is said last
    assert cards["b, in"] == ({(0, 1), (2, 1)}, pytest.approx(50))
    assert cards["c, out"] == ({(2, 0), (2, 1)}, pytest.approx(50))
    measured, _ = merge({"ab": profile([A0, B0], OLD), "c": c}, "ethernet-25g")
    assert {w.name: w.pairs for w in measured.shared}["card of a, out"] == ((0, 2),)


def test_of_a_wire_the_newest_measurement_counts() -> None:
    def sharing(
        at: MeasurementConditions, s_per_byte: float, measured: bool = True
    ) -> ClusterProfile:
        return replace(
            profile([A0, A1], at),
            shared=(SharedWire("host a", PAIRS, s_per_byte, at if measured else None),),
        )

    PAIRS = ((0, 1), (1, 0))
    old, new, sheet = (
        sharing(OLD, 1e-9),
        sharing(NEW, 2e-9),
        sharing(NEW, 3e-9, measured=False),
    )
    for profiles in (
        {"new": new, "old": old, "sheet": sheet},
        {"sheet": sheet, "old": old, "new": new},
    ):
        assert merge(profiles)[0].shared == new.shared
    assert stale(replace(new, shared=(SharedWire("nobody's", (), 1e-9, BEFORE),))) == []
    assert stale(replace(new, shared=(SharedWire("host a", PAIRS, 1e-9, BEFORE),)))[
        0
    ].startswith("shared wires: host a: ")


def test_devices_of_one_host_stand_together() -> None:
    one, two, both = profile([A0, B0], OLD), profile([A1], OLD), profile([A0, A1], OLD)
    merged, _ = merge({"1": one, "2": two, "3": both}, "ethernet-25g")
    assert [d.identity for d in merged.devices] == [A0, A1, B0]
    assert merged.nodes == ((0, 1), (2,))
    assert [merged.links[pair].measured for pair in ("0-1", "0-2", "1-2")] == [
        OLD,
        OLD,
        None,
    ]


def test_ranks_that_share_a_device_stay_two() -> None:
    merged, _ = merge(
        {"1": profile([CPU, CPU], OLD, x=1.0), "2": profile([CPU, CPU], NEW, y=2.0)}
    )
    assert merged.world == 2
    assert merged.links["0-1"].measured == NEW
    assert [seconds(merged, rank) for rank in range(2)] == [{"x": 1.0, "y": 2.0}] * 2


def test_what_was_tuned_holds_for_all_devices_in_their_order_or_is_left_out_by_name() -> (
    None
):
    spec = ConvSpec(2, 3, (8,), 4, (3,), (1,), ((1, 1),), (1,))

    def with_tuned(
        identities: list[DeviceIdentity], at: MeasurementConditions, n: int
    ) -> ClusterProfile:
        plan = TunedPlan(
            "g",
            "train",
            "alone",
            {"conv": Split("height", (n, 1))},
            1.0,
            1.0,
            n,
            measured=at,
        )
        chunks = TunedChunks(spec, (3, 1), n, 1.0, 1.0, at)
        return replace(
            profile(identities, at),
            tuned=(tuned(at, (n, 1)),),
            chunks=(chunks,),
            plans=(plan,),
        )

    old, new = with_tuned([A0, A1], OLD, 2), with_tuned([A0, A1], NEW, 4)
    for profiles in ({"old": old, "new": new}, {"new": new, "old": old}):
        merged, left_out = merge(profiles)
        assert (merged.tuned, merged.chunks, merged.plans) == (
            new.tuned,
            new.chunks,
            new.plans,
        )
        assert left_out == []
    others = replace(
        new, tuned=(replace(new.tuned[0], kind="width"),), chunks=(), plans=()
    )
    assert merge({"old": old, "others": others})[0].tuned == (*old.tuned, *others.tuned)
    merged, left_out = merge({"old": old, "turned": with_tuned([A1, A0], NEW, 4)})
    assert (merged.tuned, merged.chunks, merged.plans) == (
        old.tuned,
        old.chunks,
        old.plans,
    )
    assert left_out == [
        "turned: 3 entries that were tuned on other devices, or in another order, left out"
    ]
    merged, left_out = merge(
        {"others": others, "b": profile([B0], OLD)}, "ethernet-25g"
    )
    assert merged.tuned == ()
    assert left_out == [
        "others: 1 entry that was tuned on other devices, or in another order, left out"
    ]


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
        "plans latency_at_work bytes_at_work",
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


@pytest.mark.parametrize(
    ("first", "second", "between", "said"),
    [
        (
            [A0],
            [replace(A0, host="b")],
            None,
            r"GPU-a0 is A100 on a in one, but A100 on b in two",
        ),
        (
            [A0],
            [replace(A0, hardware="L4")],
            None,
            r"GPU-a0 is A100 on a in one, but L4 on a in two",
        ),
        (
            [CPU],
            [replace(CPU, hardware="Xeon")],
            None,
            r"the CPU of a is EPYC in one, but Xeon in two",
        ),
        (
            [A0],
            [A1],
            "ethernet-25g",
            r"nothing was measured between A100 \(GPU-a0\) on a and A100 \(GPU-a1\) on a",
        ),
        ([A0], [B0], None, "nothing was measured between a and b; give --between"),
        ([A0], [B0], "string", "link 'string' is not catalogued"),
        (
            [A0, B0],
            [A0],
            "ethernet-25g",
            "--between is ethernet-25g, but all links are in the profiles",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    first: list[DeviceIdentity],
    second: list[DeviceIdentity],
    between: str | None,
    said: str,
) -> None:
    def cpu_or_gpu(identities: list[DeviceIdentity]) -> ClusterProfile:
        p = profile(identities, OLD)
        devices = (
            replace(d, kind="cpu") if "threads" in str(d.identity) else d
            for d in p.devices
        )
        return replace(p, devices=tuple(devices))

    with pytest.raises(ProfileError, match=said):
        merge({"one": cpu_or_gpu(first), "two": cpu_or_gpu(second)}, between)


def test_a_device_that_does_not_say_which_it_is_cannot_be_merged() -> None:
    with pytest.raises(
        ProfileError, match="sheets: rank 0, 'T4', does not say which device it is"
    ):
        merge({"sheets": ClusterProfile.from_devices("T4,T4")})
