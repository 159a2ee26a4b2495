"""What is measured while something else uses the devices."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetconv.autotune.measure import pace, timer
from hetconv.autotune.measure.pace import PaceChecks
from hetconv.autotune.measure.paired_rounds import LogRatio
from hetconv.autotune.report.profile_text import disturbance
from hetconv.autotune.search.operator_samples import OperatorSamples
from hetconv.autotune.search.record import PlanTiming, with_drift
from hetconv.comm.rank_group import rank_group_of
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.provenance import Disturbance
from tests.spawn import on_ranks

CPU = torch.device("cpu")


def paces(seconds: list[list[float]]) -> list[float]:
    """Slowdowns, if each rank's products take these seconds."""
    own = iter(seconds[dist.get_rank()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pace, "PRODUCTS", 2)
        found = PaceChecks(rank_group_of(), CPU)
        for taken in own:
            patch.setattr(pace, "timed", lambda *_, s=taken: s)
            found.check()
    return found.slowdowns()


def test_a_check_counts_by_the_slowest_rank_and_what_is_usual_for_it() -> None:
    first, second = [1.0, 1.0, 2.0, 1.0, 1.0], [3.0, 3.0, 3.0, 3.0, 12.0]
    expected = [1.0, 1.0, 2.0, 1.0, 4.0]
    assert on_ranks(2, paces, [first, second]) == [expected] * 2


def measured(
    slow_checks: set[int], enough_after: int
) -> tuple[list[str], list[float], Any]:
    """Measures three operators; some checks are slow."""
    timings: list[str] = []
    run: Any = SimpleNamespace(
        job=SimpleNamespace(mode="train"),
        group=rank_group_of(),
        device=CPU,
        on_gpu=False,
        known=lambda *_: None,
        keep=lambda *_: None,
        passed=lambda _: lambda: len(timings) >= enough_after,
        say=SimpleNamespace(stage=lambda *_: None, advance=lambda *_: None),
    )
    workloads: Any = [SimpleNamespace(key=key, label=key) for key in "abc"]

    def time_workloads(these: Any, *_: Any) -> Any:
        for workload in these:
            timings.append(workload.key)
            yield workload.key, {1.0: len(timings)}

    with pytest.MonkeyPatch.context() as patch:
        checks = PaceChecks(run.group, CPU)
        patch.setattr(timer, "time_workloads", time_workloads)
        patch.setattr(
            pace, "timed", lambda *_: 1.0 + 0.5 * (len(checks) in slow_checks)
        )
        found = OperatorSamples(run, workloads, checks)
        found.measure()
        found.measure_disturbed()
    samples: Any = found.samples
    return timings, [samples[key][1.0] for key in "abc"], found.disturbances()


def test_what_was_disturbed_is_measured_anew_while_time_is_left() -> None:
    # Checks 0 to 3 are around a, b and c; 4 and 5, and 6 and 7, around b and c anew.
    [(timings, samples, left)] = on_ranks(1, measured, {2}, 99)
    assert timings == ["a", "b", "c", "b", "c"]
    assert samples == [1, 4, 5]
    assert left == ()
    [(timings, _, left)] = on_ranks(1, measured, {2}, 3)
    assert timings == ["a", "b", "c"]
    assert left == (Disturbance("operators", 1.5),)
    [(timings, _, left)] = on_ranks(1, measured, {2, 5}, 99)
    assert timings == ["a", "b", "c", "b", "c"]
    assert left == (Disturbance("operators", 1.5),)


def test_a_device_alone_that_changes_its_speed_is_told() -> None:
    profile = ClusterProfile.from_devices("2xT4")
    steady = [PlanTiming("one", LogRatio(0.0, 0.1), s) for s in (1.0, 1.1, 0.95)]
    assert with_drift(profile, steady) == profile
    drifting = [*steady, PlanTiming("two", LogRatio(0.0, 0.1), 2.1)]
    found = with_drift(profile, drifting)
    assert found.disturbed == (Disturbance("plans", 2.0),)
    said = disturbance(found)
    assert said is not None
    assert "plans (2.0x)" in said
    assert "run hetconv autotune again" in said
    assert disturbance(profile) is None


def test_a_profile_keeps_what_was_disturbed(tmp_path: Any) -> None:
    marked: ClusterProfile = replace(
        ClusterProfile.from_devices("2xT4"), disturbed=(Disturbance("links", 2.5),)
    )
    marked.save(tmp_path / "cluster.json")
    assert ClusterProfile.load(tmp_path / "cluster.json").disturbed == marked.disturbed
