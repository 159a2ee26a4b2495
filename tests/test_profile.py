"""ClusterProfile: curves, the catalogue, and the file at the door."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hetconv
from hetconv.profile import ClusterProfile, Curve, DeviceModel, LinkModel, OperatorModel, TunedRatio

CURVE = Curve((0.25, 0.5, 1.0), (1.0, 1.5, 3.5))


def example() -> ClusterProfile:
    operator = {"conv2d x by pixels": OperatorModel(CURVE, CURVE)}
    devices = tuple(DeviceModel(n, "cpu", 8e9, {"float32": 1e11}, 1e10, operators=operator) for n in ("cpu", "cpu@0.5"))
    tuned = TunedRatio("abc", "train", "height", (2, 1), 0.5, (3, 1), 0.6, 4)
    return ClusterProfile(devices, {"0-1": LinkModel(1e-4, 1e-9)}, (tuned,), {"rank 0": "here"})


def test_curves_go_through_their_points_and_nothing_costs_nothing() -> None:
    assert [CURVE.at(x) for x in (0.0, 0.25, 0.375, 0.5, 0.75, 1.0)] == [0.0, 1.0, 1.25, 1.5, 2.5, 3.5]
    assert CURVE.at(0.125) == 0.75  # the first slope goes on downwards
    assert Curve((0.5,), (2.0,)).at(0.25) == 1.0


@given(st.lists(st.floats(0, 1), min_size=2, max_size=20))
def test_curves_do_not_fall(shares: list[float]) -> None:
    seconds = [CURVE.at(x) for x in sorted(shares)]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("shares", [(), (0.5, 0.5), (1.0, 0.5), (0.0, 1.0)])
def test_curves_need_rising_shares(shares: tuple[float, ...]) -> None:
    with pytest.raises(hetconv.ProfileError):
        Curve(shares, (1.0,) * len(shares))


def test_a_profile_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    example().save(tmp_path / "cluster.json")
    assert ClusterProfile.load(tmp_path / "cluster.json") == example()
    assert [p.name for p in tmp_path.iterdir()] == ["cluster.json"]


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
            document["devices"][0]["operators"]["conv2d x by pixels"]["forward"]["shares"] = [1.0, 0.5, 0.2]
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
        ("a list", "format is 'list'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, change: str, named: str) -> None:
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


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    profile = ClusterProfile.from_devices(["A100-SXM4-80GB", "T4", "cpu@0.5"], link="pcie3-x16")
    assert profile.estimated
    assert profile.world == 3
    assert set(profile.links) == {"0-1", "0-2", "1-2"}
    a100, t4, half = profile.devices
    assert a100.flops_per_s["float16"] > t4.flops_per_s["float16"]
    whole = ClusterProfile.from_devices(["cpu"]).devices[0]
    assert half.emulated
    assert half.flops_per_s["float32"] == whole.flops_per_s["float32"] / 2


@pytest.mark.parametrize("name", ["K80", "cpu@2", "cpu@x", "cpu@0"])
def test_what_is_not_catalogued_is_refused_with_what_is(name: str) -> None:
    with pytest.raises(hetconv.ProfileError, match="A100-SXM4-80GB"):
        ClusterProfile.from_devices([name])
    with pytest.raises(hetconv.ProfileError, match="pcie4-x16"):
        ClusterProfile.from_devices(["T4"], link="string")
