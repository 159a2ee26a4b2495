"""Assignment of cores to ranks."""

from __future__ import annotations

import os

import pytest

from hetconv.autotune.launch.launcher import parse_devices, run_on
from hetconv.runtime.core_affinity import assign_cores


@pytest.mark.parametrize(
    ("devices", "cores", "own"),
    [
        ("cpu,cpu@0.5", 2, [{0}, {1}]),
        ("cpu@0.25,cpu", 2, [{1}, {0}]),
        ("cpu,cpu@0.5,cpu@0.5", 2, [{0}, {1}, {1}]),
        ("cpu@0.5,cpu@0.5", 2, [{0, 1}, {0, 1}]),
        ("cpu@0.4,cpu@0.3,cpu@0.3,cpu@0.6", 2, [{0}, {1}, {1}, {0}]),
        ("cpu,cpu@0.5", 5, [{0, 1}, {2, 3}]),
        ("cpu,cpu@0.6,cpu@0.5", 2, [None, None, None]),  # too few cores
        ("cpu,cpu", 2, [None, None]),  # any core
        ("cuda:0,cpu@0.5,cuda:1@0.5,cpu:0", 2, [None, {1}, None, {0}]),
        ("cuda:0@0.5,cpu", 2, [None, None]),
        ("cuda:0,cuda:1", 1, [None, None]),
    ],
)
def test_slow_cpus_share_a_core_that_is_as_fast_as_all_of_them(
    devices: str, cores: int, own: list[set[int] | None]
) -> None:
    assert assign_cores(parse_devices(devices), range(cores)) == own


def own_cores() -> set[int]:
    return os.sched_getaffinity(0)


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity"),
    reason="the system does not bind processes to cores",
)
def test_ranks_run_on_their_cores() -> None:
    here = os.sched_getaffinity(0)
    for devices in ("cpu,cpu@0.5", "cpu,cpu"):
        own = assign_cores(parse_devices(devices), here)[0] or here
        assert run_on(parse_devices(devices), own_cores) == own
