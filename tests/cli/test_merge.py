"""Merged profiles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetconv.autotune.cli.merge import merge
from hetconv.autotune.cli.outdated import stale
from hetconv.errors import ProfileError
from hetconv.schemas.catalog import find_link
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.device_model import LinkModel, SharedWire
from hetconv.schemas.provenance import DeviceIdentity, MeasurementConditions
from hetconv.schemas.tuning_results import TunedChunks, TunedPlan
from hetconv.sharding.conv_spec import ConvSpec
from hetconv.sharding.split import Split
from tests.profiles import A0, A1, B0, BEFORE, CPU, NEW, OLD, profile, tuned


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
    (line,) = stale(replace(new, shared=(SharedWire("host a", PAIRS, 1e-9, BEFORE),)))
    assert "shared wires: host a;" in line


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
