"""What this process runs on: the identity of a device, and the versions under which it
is measured.
"""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from hetconv.autotune.launch.throttle import DeviceName
from hetconv.schemas.provenance import DeviceIdentity, MeasurementConditions

ANSWERS = 10.0  # seconds that nvidia-smi gets


def identity(name: DeviceName) -> DeviceIdentity:
    """Of the device that this rank computes on."""
    device = torch.device(name.device)
    if device.type == "cuda":
        p = torch.cuda.get_device_properties(device)
        # torch writes a UUID without the prefix under which the driver's tools know it
        return DeviceIdentity(platform.node(), p.name, f"GPU-{p.uuid}", name.speed)
    threads = torch.get_num_threads()
    return DeviceIdentity(
        platform.node(),
        cpu_model(),
        f"{threads} thread{'s' * (threads > 1)}",
        name.speed,
    )


def conditions(device: torch.device) -> MeasurementConditions:
    """Those of a measurement on ``device`` now."""
    return in_use() if device.type == "cuda" else replace(in_use(), driver="")


def in_use() -> MeasurementConditions:
    """The time, and the versions that this process would measure with."""
    at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return MeasurementConditions(at, torch.__version__, triton_version(), driver())


def memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cpu_model() -> str:
    """As Linux names it, or the kind of processor where there is no such name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = next(
        (
            line.partition(":")[2].strip()
            for line in lines
            if line.startswith("model name")
        ),
        "",
    )
    return named or platform.processor() or platform.machine()


def triton_version() -> str:
    """Empty where triton is not installed."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


def here() -> tuple[str, MeasurementConditions]:
    """The name of this host, and `in_use`."""
    return platform.node(), in_use()


@cache
def driver() -> str:
    """The version of the NVIDIA driver; empty where there is none."""
    asked = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        said = subprocess.run(
            asked, capture_output=True, text=True, timeout=ANSWERS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return next(iter(said.split()), "")
