"""ClusterProfile: curves, the catalogue, and the file at the door."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hetconv
from hetconv.schemas.catalog import load_catalog
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.device_model import (
    Curve,
    DeviceModel,
    LinkModel,
    OperatorModel,
    SharedWire,
)
from hetconv.schemas.tuning_results import TunedRatio

CURVE = Curve((0.25, 0.5, 1.0), (1.0, 1.5, 3.5))


def example() -> ClusterProfile:
    operator = {"conv2d x by pixels": OperatorModel(CURVE, CURVE)}
    devices = tuple(
        DeviceModel(n, "cpu", 8e9, {"float32": 1e11}, 1e10, operators=operator)
        for n in ("cpu", "cpu@0.5")
    )
    tuned = TunedRatio("abc", "train", "height", (2, 1), 0.5, (3, 1), 0.6, 4)
    links, wire = {"0-1": LinkModel(1e-4, 1e-9)}, SharedWire("card", ((0, 1),), 1e-9)
    return ClusterProfile(
        devices, links, (tuned,), {"rank 0": "here"}, shared=(wire,), nodes=((0,), (1,))
    )


def test_curves_go_through_their_points_and_nothing_costs_nothing() -> None:
    assert [CURVE.at(x) for x in (0.0, 0.25, 0.375, 0.5, 0.75, 1.0)] == [
        0.0,
        1.0,
        1.25,
        1.5,
        2.5,
        3.5,
    ]
    assert CURVE.at(0.125) == 0.75  # the first slope goes on downwards
    assert Curve((0.5,), (2.0,)).at(0.25) == 1.0


@given(st.lists(st.floats(0, 1), min_size=2, max_size=20))
def test_curves_do_not_fall(shares: list[float]) -> None:
    seconds = [CURVE.at(x) for x in sorted(shares)]
    assert seconds == sorted(seconds)


def test_curves_fall_only_between_points() -> None:
    falling = Curve((0.25, 0.5, 1.0), (2.0, 1.0, 0.5))
    assert [falling.at(x) for x in (0.125, 0.25, 0.375, 0.75, 1.0, 2.0)] == [
        2.0,
        2.0,
        1.5,
        0.75,
        0.5,
        0.5,
    ]


@pytest.mark.parametrize("shares", [(), (0.5, 0.5), (1.0, 0.5), (0.0, 1.0)])
def test_curves_need_rising_shares(shares: tuple[float, ...]) -> None:
    with pytest.raises(hetconv.ProfileError):
        Curve(shares, (1.0,) * len(shares))


def test_a_profile_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    example().save(tmp_path / "cluster.json")
    assert ClusterProfile.load(tmp_path / "cluster.json") == example()
    assert [p.name for p in tmp_path.iterdir()] == ["cluster.json"]


def test_a_file_without_wires_and_nodes_has_one_node_that_shares_nothing(
    tmp_path: Path,
) -> None:
    path = tmp_path / "cluster.json"
    example().save(path)
    document = json.loads(path.read_text())
    del document["shared"], document["nodes"]
    path.write_text(json.dumps(document))
    assert ClusterProfile.load(path) == replace(example(), shared=(), nodes=((0, 1),))


def changed(document: dict[str, Any], change: str) -> Any:
    match change:
        case "an unknown key":
            document["devices"][0]["colour"] = "green"
        case "a missing key":
            del document["devices"][1]["bytes_per_s"]
        case "another type":
            document["links"]["0-1"]["latency_s"] = "soon"
        case "another version":
            document["version"] = 99
        case "another format":
            document["format"] = "hetconv-plan"
        case "a missing link":
            document["links"] = {}
        case "a falling curve":
            document["devices"][0]["operators"]["conv2d x by pixels"]["forward"][
                "shares"
            ] = [1.0, 0.5, 0.2]
        case "a wire to nobody":
            document["shared"][0]["pairs"] = [[0, 2]]
        case "a wire to oneself":
            document["shared"][0]["pairs"] = [[1, 1]]
        case "a rank in no node":
            document["nodes"] = [[0]]
        case "an empty node":
            document["nodes"] = [[0, 1], []]
        case "a list":
            return [document]
    return document


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("an unknown key", r"devices\.0\.colour"),
        ("a missing key", r"devices\.1\.bytes_per_s"),
        ("another type", r"links\.0-1\.latency_s"),
        ("another version", "version is 99"),
        ("another format", "format is 'hetconv-plan'"),
        ("a missing link", r"needs links \['0-1'\]"),
        ("a falling curve", "rising positive shares"),
        ("a wire to nobody", "wire 'card' is shared by"),
        ("a wire to oneself", "wire 'card' is shared by"),
        ("a rank in no node", "each of 2 ranks once"),
        ("an empty node", "each of 2 ranks once"),
        ("a list", "format is 'list'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    tmp_path: Path, change: str, named: str
) -> None:
    path = tmp_path / "cluster.json"
    example().save(path)
    path.write_text(json.dumps(changed(json.loads(path.read_text()), change)))
    with pytest.raises(hetconv.ProfileError, match=named) as caught:
        ClusterProfile.load(path)
    assert "cluster.json" in str(caught.value)


def test_what_is_not_there_or_not_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(hetconv.ProfileError, match="cannot be read"):
        ClusterProfile.load(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("hello")
    with pytest.raises(hetconv.ProfileError, match="is not JSON"):
        ClusterProfile.load(tmp_path / "text.json")


def test_a_failed_save_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cluster.json"
    example().save(path)
    before = path.read_text()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        ClusterProfile.from_devices(["T4"]).save(path)
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["cluster.json"]


def test_the_catalogue_gives_estimates() -> None:
    profile = ClusterProfile.from_devices(
        ["A100-SXM4-80GB", "T4", "cpu@0.5"], link="pcie3-x16"
    )
    assert profile.estimated
    assert profile.world == 3
    assert set(profile.links) == {"0-1", "0-2", "1-2"}
    a100, t4, half = profile.devices
    assert a100.flops_per_s["float16"] > t4.flops_per_s["float16"]
    whole = ClusterProfile.from_devices(["cpu"]).devices[0]
    assert half.emulated
    assert half.flops_per_s["float32"] == whole.flops_per_s["float32"] / 2


def test_devices_are_counted_and_stand_in_nodes() -> None:
    profile = ClusterProfile.from_devices(
        "L4, 2xT4@0.5 / 2xA10", link="pcie4-x16 / pcie5-x16", between="ethernet-25g"
    )
    assert profile.names == ("L4", "T4@0.5", "T4@0.5", "A10", "A10")
    assert profile.nodes == ((0, 1, 2), (3, 4))
    assert profile.fingerprint == {
        "link": "pcie4-x16 / pcie5-x16",
        "between": "ethernet-25g",
    }
    gb_per_s = {pair: 1e-9 / link.s_per_byte for pair, link in profile.links.items()}
    slow = dict.fromkeys(("0-3", "0-4", "1-3", "1-4", "2-3", "2-4"), 3.125)
    assert gb_per_s == pytest.approx(
        slow | {"0-1": 31.5, "0-2": 31.5, "1-2": 31.5, "3-4": 63}
    )
    listed = ClusterProfile.from_devices(["L4", "2xT4"])
    assert (listed.names, listed.nodes) == (("L4", "T4", "T4"), ((0, 1, 2),))


def test_the_network_cards_of_nodes_are_shared_each_way_by_all_that_crosses() -> None:
    profile = ClusterProfile.from_devices(
        "2xT4 / 2xT4 / L4", link="pcie4-x16", between="infiniband-200g"
    )
    crossing = {(a, b) for a in range(5) for b in range(5) if a // 2 != b // 2}
    wires = {wire.name: set(wire.pairs) for wire in profile.shared}
    assert len(wires) == len(profile.shared) == 6
    for node, ranks in enumerate(profile.nodes):
        assert wires[f"card of node {node}, out"] == {
            pair for pair in crossing if pair[0] in ranks
        }
        assert wires[f"card of node {node}, in"] == {
            pair for pair in crossing if pair[1] in ranks
        }
    assert {wire.s_per_byte for wire in profile.shared} == {1 / 25e9}


@pytest.mark.parametrize("name", ["K80", "cpu@2", "cpu@x", "cpu@0", "cpu@nan"])
def test_what_is_not_catalogued_is_refused_with_what_is(name: str) -> None:
    with pytest.raises(hetconv.ProfileError, match="A100-SXM4-80GB"):
        ClusterProfile.from_devices([name])
    with pytest.raises(hetconv.ProfileError, match="pcie4-x16"):
        ClusterProfile.from_devices(["T4"], link="string")
    with pytest.raises(hetconv.ProfileError, match="ethernet-100g"):
        ClusterProfile.from_devices("T4/T4", between="string")


@pytest.mark.parametrize(
    ("devices", "options", "message"),
    [
        ("", {}, "'' names no device"),
        ([], {}, "'' names no device"),
        ("T4,,L4", {}, "'' names no device"),
        ("T4/", {"between": "ethernet-25g"}, "'' names no device"),
        ("0xT4", {}, "'0xT4' names no device"),
        ("2x", {}, "'2x' names no device"),
        ("T4/T4", {}, "2 nodes were named, but nothing between"),
        ("T4,T4", {"between": "ethernet-25g"}, "all devices are in one node"),
        ("T4,T4", {"link": "pcie3-x16/nvlink3"}, "names 2 links for 1 nodes"),
        (
            "T4/T4/T4",
            {"link": "pcie3-x16/nvlink3", "between": "ethernet-25g"},
            "names 2 links for 3 nodes",
        ),
    ],
)
def test_a_cluster_that_is_spelled_wrongly_is_refused(
    devices: Any, options: dict[str, str], message: str
) -> None:
    with pytest.raises(hetconv.ProfileError, match=message):
        ClusterProfile.from_devices(devices, **options)


WANTED = """
V100-SXM2-16GB V100-SXM2-32GB V100-PCIE-16GB V100-PCIE-32GB T4 A10 A100-SXM4-40GB
A100-SXM4-80GB A100-PCIE-40GB A100-PCIE-80GB L4 H100-PCIE-80GB H100-SXM5-80GB
H200-SXM5-141GB RTX-3090 RTX-4090 RTX-5090 cpu
"""
DTYPES = {"float64", "float32", "tf32", "float16", "bfloat16"}


def test_the_catalogue_has_what_is_in_use_under_names_that_can_be_spelled() -> None:
    assert set(WANTED.split()) <= set(load_catalog().devices)
    assert {f"pcie{n}-x{lanes}" for n in (3, 4, 5) for lanes in (8, 16)} <= set(
        load_catalog().links
    )
    assert {f"ethernet-{n}g" for n in (25, 100, 200, 400)} <= set(load_catalog().links)
    for name in (*load_catalog().devices, *load_catalog().links):
        assert re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*", name), (
            name
        )  # no digit first: 2x is a count


@pytest.mark.parametrize("name", load_catalog().devices)
def test_a_device_has_plausible_numbers_and_a_source(name: str) -> None:
    sheet = load_catalog().devices[name]
    rates, gpu = sheet.flops_per_s, sheet.kind == "cuda"
    assert re.search(r"\b20[12]\d\b", sheet.source)
    assert rates.keys() <= DTYPES
    assert 8e9 <= sheet.memory_bytes <= 288e9
    assert (
        (sheet.memory_bytes / 1e9 == int(found[1]))
        if (found := re.search(r"(\d+)GB", name))
        else True
    )
    assert (200e9 if gpu else 20e9) <= sheet.bytes_per_s <= 8e12
    assert (5e12 if gpu else 0.1e12) <= rates["float32"] <= 130e12
    assert 1 / 64.5 <= rates["float64"] / rates["float32"] <= 0.52
    if gpu:
        assert (
            1.9 <= rates["float16"] / rates["float32"] <= 17
        )  # 8 or 16 times on tensor cores of data centers
    if "bfloat16" in rates:  # from Ampere on, where TF32 is half as fast
        assert rates["bfloat16"] == rates["float16"]
        assert rates["tf32"] == pytest.approx(rates["float16"] / 2, rel=0.01)


@pytest.mark.parametrize("name", load_catalog().links)
def test_a_link_has_plausible_numbers_and_a_source(name: str) -> None:
    sheet = load_catalog().links[name]
    assert re.search(r"\b20[12]\d\b", sheet.source)
    assert 1e-6 <= sheet.latency_s <= 1e-4
    if found := re.fullmatch(r"pcie(\d)-x(\d+)(-switch)?", name):
        assert sheet.bytes_per_s == pytest.approx(
            2 ** int(found[1]) * 1e9 * int(found[2]) / 8 * 128 / 130, rel=1e-3
        )
        assert sheet.through_host is not bool(found[3])
    elif found := re.fullmatch(r"\w+-(\d+)g", name):
        assert sheet.bytes_per_s == int(found[1]) * 1e9 / 8
    else:
        assert 1e9 <= sheet.bytes_per_s <= 1e12
