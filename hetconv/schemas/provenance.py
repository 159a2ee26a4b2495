"""Where the numbers of a profile come from: of which device, when, and under which versions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from .json_files import STRICT


@dataclass(frozen=True)
class DeviceIdentity:
    """A device that several profiles may have measured.

    ``hardware``: its maker's name for it. ``unit``: a GPU's UUID; of a CPU, the threads
    that computed. ``speed``: what is left of it where it is emulated. Ranks that share
    a device have one identity.
    """

    host: str
    hardware: str
    unit: str
    speed: float = 1.0
    __pydantic_config__ = STRICT

    def __str__(self) -> str:
        emulated = f" at {self.speed:g} of its speed" if self.speed < 1 else ""
        return f"{self.hardware} ({self.unit}){emulated} on {self.host}"


@dataclass(frozen=True)
class MeasurementConditions:
    """When something was measured, in UTC, and with what. Empty: not known, or, of
    triton and driver, not there.
    """

    at: Annotated[str, Field(pattern=r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)?$")]
    torch: str
    triton: str = ""
    driver: str = ""
    memory_format: str = "channels_last"
    __pydantic_config__ = STRICT

    def __str__(self) -> str:
        said = {"torch": self.torch, "triton": self.triton, "driver": self.driver}
        return ", ".join(
            [f"{what} {version}" for what, version in said.items() if version]
            + [self.at] * bool(self.at)
        )
