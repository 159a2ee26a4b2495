"""Memory of a device, and the versions under which it is measured."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch

from hetconv.schemas.provenance import MeasurementConditions
from hetconv.sharding.conv_spec import MemoryFormat

NVIDIA_SMI_TIMEOUT_S = 10.0


def conditions(
    device: torch.device, memory_format: MemoryFormat = "channels_last"
) -> MeasurementConditions:
    """Returns the conditions of a measurement now.

    Args:
        device: where something is measured.
        memory_format: of images and filters.
    """
    now = replace(in_use(), memory_format=memory_format)
    return now if device.type == "cuda" else replace(now, driver="")


def in_use() -> MeasurementConditions:
    """Returns the time, and the versions that this process would measure with."""
    at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return MeasurementConditions(at, torch.__version__, triton_version(), driver())


def memory_bytes(device: torch.device) -> int:
    """Returns the bytes of memory of a device; of a CPU, those of the host."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


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
