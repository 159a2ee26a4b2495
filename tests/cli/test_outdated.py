"""What in a profile was measured under other versions than are in use, by name."""

from __future__ import annotations

from dataclasses import replace

from hetconv.autotune.cli.merge import merge
from hetconv.autotune.cli.outdated import stale
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.provenance import MeasurementConditions
from hetconv.schemas.tuning_results import TunedTile
from hetconv.sharding.conv_spec import ConvSpec
from tests.profiles import A0, A1, B0, BEFORE, CPU, NEW, OLD, profile, tuned


def test_a_profile_of_one_time_and_place_has_nothing_stale() -> None:
    assert stale(profile([A0, A1], OLD, x=1.0)) == []
    assert stale(profile([A0, A1], OLD, x=1.0), ("a", NEW)) == []
    assert stale(ClusterProfile.from_devices("T4,T4"), ("a", NEW)) == []


def test_what_was_measured_under_other_versions_is_named() -> None:
    merged, _ = merge(
        {
            "old": profile([A0, A1], BEFORE, x=1.0, y=2.0),
            "new": profile([A0], NEW, x=3.0),
        }
    )
    expected = (
        "measured with torch 2.11.0 (now 2.13.0), triton 3.6.0 (now 3.7.1): "
        "rank 0, cuda:0: 1 operator; rank 1, cuda:1: rates, 2 operators; links: 0-1; "
        "measure anew with hetconv autotune"
    )
    assert stale(merged) == [expected]
    assert stale(merged, ("elsewhere", NEW)) == [expected]


def test_a_profile_older_than_what_is_in_use_is_named_whole() -> None:
    of = replace(profile([A0], BEFORE, x=1.0), tuned=(tuned(BEFORE, (1,)),))
    (line,) = stale(of, ("login", replace(NEW, torch="2.13.0+cpu")))
    assert line.startswith("measured with torch 2.11.0 (now 2.13.0), ")
    assert (
        "rank 0, cuda:0: rates, 1 operator; tuned ratios: train by height of g;" in line
    )


def test_hosts_have_builds_and_drivers_of_their_own_but_one_version() -> None:
    on_gpu, on_cpu = (
        replace(OLD, torch="2.13.0+cu128", driver="580.65"),
        replace(NEW, torch="2.13.0+cpu", triton=""),
    )
    merged, _ = merge(
        {"a": profile([A0], on_gpu), "b": profile([B0], on_cpu)}, "ethernet-25g"
    )
    assert stale(merged) == []
    assert stale(merged, ("b", on_cpu)) == []
    assert stale(merged, ("b", replace(on_cpu, triton="3.7.1"))) == []
    assert (
        "torch 2.13.0+cu128 (now 2.13.0+cu126)"
        in stale(merged, ("a", replace(on_gpu, torch="2.13.0+cu126")))[0]
    )
    newer = replace(on_gpu, at=NEW.at, driver="590.10")
    merged, _ = merge(
        {
            "old": profile([A0], on_gpu, x=1.0),
            "new": profile([A0], newer),
            "cpu": profile([CPU], NEW),
        }
        | {"both": profile([A0, CPU], OLD)}
    )
    assert [line.partition("; ")[0] for line in stale(merged) if "driver" in line] == [
        "measured with driver 580.65 (now 590.10): rank 0, cuda:0: 1 operator"
    ]


def test_a_file_that_does_not_tell_its_versions_is_named_and_so_are_tiles() -> None:
    kernel = ConvSpec(1, 8, (8, 8), 8, (3, 3), (1, 1), ((0, 0), (0, 0)), (1, 1))
    tile = TunedTile("A100", "2.11.0", "3.7.1", "forward", kernel, "tf32", "aten", 1.0)
    of = replace(profile([A0], MeasurementConditions("", "")), tiles=(tile,))
    assert [line.partition("; ")[0] for line in stale(of, ("a", NEW))] == [
        "measured with versions that the file does not tell: rank 0, cuda:0: rates",
        "measured with torch 2.11.0 (now 2.13.0): tiles of A100: forward of 1x8x8x8",
    ]
