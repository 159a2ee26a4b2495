"""Which devices of a profile the ranks of a run compute on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hetconv.errors import ProfileError, few

from .cluster_profile import ClusterProfile
from .device_model import DeviceModel
from .provenance import DeviceIdentity


@dataclass(frozen=True)
class RankDevice:
    """Device of a rank, as the rank tells it.

    Attributes:
        identity: Which device it is.
        name: Its name in the profile; None if the identity tells.
    """

    identity: DeviceIdentity
    name: str | None = None

    def __str__(self) -> str:
        return str(self.identity) if self.name is None else repr(self.name)


def ranks_in_profile(
    profile: ClusterProfile, devices: Sequence[RankDevice]
) -> tuple[int, ...]:
    """Finds each device of a run in a profile.

    A GPU is found by its UUID, also on a host of another name. A CPU has the host,
    processor, threads and speed that were measured. A device that tells its name is found by
    that; where several have it, by the host too, if the profile has devices of that host.
    Devices that nothing tells apart are interchangeable, and are taken in their order.

    Args:
        profile: Devices and links.
        devices: Device of each rank.

    Returns:
        The device's rank in the profile, for each rank: what `ClusterProfile.subset` takes.

    Raises:
        ProfileError: The profile does not have a device, or not so many of them.
    """
    found: list[int] = []
    for rank, device in enumerate(devices):
        fitting = _fitting(profile, device)
        if not fitting:
            raise ProfileError(_unknown(profile, rank, device))
        free = [known for known in fitting if known not in found]
        if not free:
            ranks = Counter(map(str, devices))[str(device)]
            raise ProfileError(
                f"rank {rank} computes on {device}, as {ranks} of {len(devices)} ranks do, but the "
                f"profile has {len(fitting)} of them; start one rank for each device, or give "
                "each its own name"
            )
        found.append(free[0])
    return tuple(found)


def _fitting(profile: ClusterProfile, device: RankDevice) -> list[int]:
    """Returns the ranks in the profile that a device may have."""
    known = list(enumerate(profile.devices))
    if device.name is None:
        return [rank for rank, model in known if _is_same(model, device.identity)]
    named = [(rank, model) for rank, model in known if model.name == device.name]
    here = [
        rank
        for rank, model in named
        if model.identity and model.identity.host == device.identity.host
    ]
    return here or [rank for rank, _ in named]


def _is_same(model: DeviceModel, identity: DeviceIdentity) -> bool:
    known = model.identity
    if known is None or model.kind == "cpu":
        return known == identity
    return (known.unit, known.speed) == (identity.unit, identity.speed)


def _unknown(profile: ClusterProfile, rank: int, device: RankDevice) -> str:
    """Returns what a rank computes on, what the profile has, and what to do."""
    if device.name is not None:
        return (
            f"rank {rank} computes on a device named {device.name!r}, but the profile has "
            f"{few(map(repr, dict.fromkeys(profile.names)))}; give one of these names"
        )
    known = [model.identity for model in profile.devices if model.identity]
    if not known:
        return (
            f"rank {rank} computes on {device}, but the profile does not say which devices it "
            "has, as those of data sheets do not; give the name that this device has in the "
            f"profile, one of {few(map(repr, dict.fromkeys(profile.names)))}"
        )
    here = device.identity
    other_threads = any(
        (other.host, other.hardware) == (here.host, here.hardware)
        and other.unit != here.unit
        for other in known
        if "thread" in other.unit
    )
    todo = (
        "compute with as many threads as were measured (OMP_NUM_THREADS), "
        if other_threads
        else ""
    )
    return (
        f"rank {rank} computes on {device}, but the profile has {few(map(str, known))}; {todo}"
        "measure the device with hetconv autotune, or give its name in the profile"
    )
