"""Which device this rank computes on, and what a profile knows of the devices of all ranks."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

import torch
import torch.distributed as dist

from hetconv.comm.consensus import validate_together
from hetconv.comm.rank_group import all_gather_object, rank_group_of
from hetconv.errors import HetConvError
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.device_matching import RankDevice, ranks_in_profile
from hetconv.schemas.provenance import DeviceIdentity


def profile_of_ranks(
    profile: ClusterProfile,
    device: torch.device | str,
    *,
    name: str | None = None,
    group: dist.ProcessGroup | None = None,
) -> ClusterProfile:
    """Returns the part of a profile that today's ranks compute on; collective.

    Each rank tells which device it has. So a program that is started anew on fewer
    machines, or with its ranks in another order, plans for the devices that it got.

    A GPU is known by its UUID, a CPU by its host, processor and threads, as `hetconv
    autotune` wrote them. Equal devices of a host are interchangeable.

    Args:
        profile: Devices and links of the whole cluster, the same on every rank.
        device: The device that this rank computes on.
        name: Its name in the profile, where the profile does not say which devices were
            measured, as those of data sheets do not, or where hosts are called otherwise now.
        group: The ranks; all of them by default.

    Returns:
        The profile of their devices, in the order of ranks.

    Raises:
        ProfileError: On every rank, if the profile does not have the device of a rank, or
            has fewer of them than there are ranks.
        DisagreementError: On every rank, if ranks have different profiles.

    Examples:
        >>> profile = hetconv.ClusterProfile.load("cluster.json")
        >>> profile = hetconv.profile_of_ranks(profile, "cuda")
        >>> model = hetconv.parallelize(model, hetconv.make_plan(graph, profile))
    """
    rank_group = rank_group_of(group)
    own = validate_together(
        rank_group,
        "profile_of_ranks",
        lambda: RankDevice(device_identity(device), name),
        lambda _: f"profile {hashlib.sha256(repr(profile).encode()).hexdigest()[:16]}",
    )
    devices = all_gather_object(rank_group, own)
    return profile.subset(ranks_in_profile(profile, devices))


def device_identity(device: torch.device | str, speed: float = 1.0) -> DeviceIdentity:
    """Returns the identity of a device of this process.

    Args:
        device: A CPU or a CUDA device.
        speed: Fraction of its speed that is left.

    Raises:
        HetConvError: It is another kind of device.
    """
    device, host = torch.device(device), platform.node()
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        # torch writes a UUID without the prefix under which the driver's tools know it
        return DeviceIdentity(host, gpu.name, f"GPU-{gpu.uuid}", speed)
    if device.type != "cpu":
        raise HetConvError(
            f"this rank's device is {str(device)!r}; give cpu, or a CUDA device such as cuda:0"
        )
    threads = torch.get_num_threads()
    unit = f"{threads} thread{'s' * (threads > 1)}"
    return DeviceIdentity(host, cpu_model(), unit, speed)


def cpu_model() -> str:
    """Returns the processor's name as Linux has it, or its kind where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()
