"""Identity of a device, and the versions under which it is measured."""

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

NVIDIA_SMI_TIMEOUT_S = 10.0


def identity(name: DeviceName) -> DeviceIdentity:
    """Returns the identity of the device that this rank computes on."""
    device, host = torch.device(name.device), platform.node()
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        # torch writes a UUID without the prefix under which the driver's tools know it
        return DeviceIdentity(host, gpu.name, f"GPU-{gpu.uuid}", name.speed)
    threads = torch.get_num_threads()
    unit = f"{threads} thread{'s' * (threads > 1)}"
    return DeviceIdentity(host, cpu_model(), unit, name.speed)


def conditions(device: torch.device) -> MeasurementConditions:
    """Returns the conditions of a measurement on ``device`` now."""
    return in_use() if device.type == "cuda" else replace(in_use(), driver="")


def in_use() -> MeasurementConditions:
    """Returns the time, and the versions that this process would measure with."""
    at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return MeasurementConditions(at, torch.__version__, triton_version(), driver())


def memory_bytes(device: torch.device) -> int:
    """Returns the bytes of memory of a device; of a CPU, those of the host."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


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


def triton_version() -> str:
    """Returns the version of triton; empty where it is not installed."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


def here() -> tuple[str, MeasurementConditions]:
    """Returns the name of this host, and `in_use`."""
    return platform.node(), in_use()


@cache
def driver() -> str:
    """Returns the version of the NVIDIA driver; empty where there is none."""
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        answer = subprocess.run(
            query,
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return next(iter(answer.stdout.split()), "")
