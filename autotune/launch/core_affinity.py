"""On which cores ranks run, if some of their CPUs are slowed on purpose."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from .throttle import DeviceName

Cores = frozenset[int]
SLACK = 1e-6  # for sums of speeds


def cores_of(
    devices: Sequence[DeviceName], cores: Collection[int]
) -> list[Cores | None]:
    """Returns the cores of each rank.

    Ranks on CPUs have cores of their own, or share one with others so slow that together
    they are one CPU: ``cpu,cpu@0.5,cpu@0.5`` on two cores are as fast as their names say.
    It is empty for a GPU. Every rank has all cores where nothing is slowed, and where there
    are too few.

    Args:
        devices: one per rank.
        cores: numbers of the cores of this process.
    """
    on_cpus = [
        rank for rank, d in enumerate(devices) if torch.device(d.device).type == "cpu"
    ]
    groups: list[list[int]] = []
    for rank in sorted(
        on_cpus, key=lambda rank: -devices[rank].speed
    ):  # first fit, the fastest first
        fits = (
            g for g in groups if sum(devices[r].speed for r in (*g, rank)) <= 1 + SLACK
        )
        group = next(fits, None)
        if group is None:
            groups.append([rank])
        else:
            group.append(rank)
    slowed = any(devices[rank].emulated for rank in on_cpus)
    each = len(cores) // len(groups) if slowed else 0
    ordered = sorted(cores)
    own = {
        rank: frozenset(ordered[i * each : (i + 1) * each])
        for i, group in enumerate(groups)
        for rank in group
    }
    return [own.get(rank) or None for rank in range(len(devices))]
