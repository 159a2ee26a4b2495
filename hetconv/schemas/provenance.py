"""Provenance of measured numbers: device, time and software versions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from hetconv.sharding.conv_spec import MemoryFormat

from .json_files import STRICT


@dataclass(frozen=True)
class Disturbance:
    """Something else used the devices while they were measured.

    Attributes:
        what: What was measured then: operators, links or plans.
        slower: How many times as long as usual one and the same work took.
    """

    what: str
    slower: Annotated[float, Field(ge=1)]
    __pydantic_config__ = STRICT


@dataclass(frozen=True)
class DeviceIdentity:
    """Device that several profiles may have measured.

    Ranks that share a device have the same identity.

    Attributes:
        host: Name of the host.
        hardware: Model name, as the maker gives it.
        unit: UUID of a GPU; of a CPU, the threads that computed.
        speed: Fraction of its speed that is left where it is throttled.
    """

    host: str
    hardware: str
    unit: str
    speed: float = 1.0
    __pydantic_config__ = STRICT

    def __str__(self) -> str:
        throttled = f" at {self.speed:g} of its speed" if self.speed < 1 else ""
        return f"{self.hardware} ({self.unit}){throttled} on {self.host}"


@dataclass(frozen=True)
class MeasurementConditions:
    """Time and software versions of a measurement.

    An empty string means that something is not known, or not installed.

    Attributes:
        at: Time in UTC, as ``2026-01-31T12:00:00Z``.
        torch: Version of PyTorch.
        triton: Version of Triton.
        driver: Version of the GPU driver.
        memory_format: Memory format of images and filters.
    """

    at: Annotated[str, Field(pattern=r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)?$")]
    torch: str
    triton: str = ""
    driver: str = ""
    memory_format: MemoryFormat = "channels_last"
    __pydantic_config__ = STRICT

    def __str__(self) -> str:
        versions = {"torch": self.torch, "triton": self.triton, "driver": self.driver}
        parts = [f"{name} {version}" for name, version in versions.items() if version]
        return ", ".join([*parts, self.at] if self.at else parts)
