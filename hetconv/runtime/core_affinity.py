"""Assignment of CPU cores to ranks, some of which are slowed on purpose."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from .throttle import DeviceName

SPEED_TOLERANCE = 1e-6  # of sums of speeds


def assign_cores(
    devices: Sequence[DeviceName], cores: Collection[int]
) -> list[frozenset[int] | None]:
    """Gives each CPU rank cores of its own, or with ranks whose speeds add up to one.

    On two cores the ranks of ``cpu,cpu@0.5,cpu@0.5`` are so as fast as their names say,
    whatever their shares of the work: the slow ones take no time from the fast one.

    Args:
        devices: The device of each rank.
        cores: The cores that this process may use.

    Returns:
        The cores of each rank. None, for any core, on a GPU, where no CPU is slowed,
        and where there are too few cores.
    """
    cpu_ranks = [
        rank
        for rank, device in enumerate(devices)
        if torch.device(device.device).type == "cpu"
    ]
    assigned: list[frozenset[int] | None] = [None] * len(devices)
    if not any(devices[rank].emulated for rank in cpu_ranks):
        return assigned
    speeds = {rank: devices[rank].speed for rank in cpu_ranks}
    groups = _first_fit(speeds)
    ordered = sorted(cores)
    cores_per_group = len(ordered) // len(groups)
    if cores_per_group == 0:
        return assigned
    for i, group in enumerate(groups):
        first = i * cores_per_group
        for rank in group:
            assigned[rank] = frozenset(ordered[first : first + cores_per_group])
    return assigned


def _first_fit(speeds: Mapping[int, float]) -> list[list[int]]:
    """Groups ranks whose speeds add up to at most one, the fastest ranks first."""
    groups: list[list[int]] = []
    for rank in sorted(speeds, key=lambda rank: -speeds[rank]):
        for group in groups:
            total = sum(speeds[member] for member in group) + speeds[rank]
            if total <= 1 + SPEED_TOLERANCE:
                group.append(rank)
                break
        else:
            groups.append([rank])
    return groups
