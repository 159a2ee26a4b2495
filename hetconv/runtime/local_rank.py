"""This process as a rank beside others of its host: cores, threads, device, process group."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hetconv.errors import HetConvError

from .core_affinity import assign_cores
from .throttle import DeviceName, set_speed

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
# By default glibc returns freed memory to the system and gets it back page by page,
# which takes as long as some layers do, and oneDNN forgets kernels when many plans take
# turns.
CPU_SETTINGS = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TOP_PAD_": str(1 << 26),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(1 << 14),
}


def rank_settings(world: int) -> dict[str, str]:
    """Returns environment variables for ranks of this host, which share its cores.

    They count from the start of a process. Those that the user has set are left out.

    Args:
        world: Number of ranks.
    """
    threads = {"OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // world, 1))}
    settings = threads | CPU_SETTINGS
    return {name: settings[name] for name in settings if name not in os.environ}


def check_devices(devices: Sequence[DeviceName]) -> None:
    """Raises `HetConvError` unless this process sees all of these devices."""
    gpus = torch.cuda.device_count()
    for name in devices:
        device = torch.device(name.device)
        if device.type == "cuda" and (device.index or 0) >= gpus:
            there = ", ".join(["cpu", *(f"cuda:{i}" for i in range(gpus))])
            build = "" if torch.version.cuda else ", whose torch is built without CUDA,"
            raise HetConvError(
                f"device {name.device!r} is not there; this process{build} sees {there}: name "
                "one of these for each rank"
            )


def take_cores(rank: int, devices: Sequence[DeviceName]) -> None:
    """Binds this process to the cores of a rank, where devices are slowed on purpose.

    Args:
        rank: This rank.
        devices: The device of each rank, all of this host.
    """
    if hasattr(os, "sched_setaffinity"):
        cores = assign_cores(devices, os.sched_getaffinity(0))[rank]
        if cores:
            os.sched_setaffinity(0, cores)


def join_group(rank: int, devices: Sequence[DeviceName], **rendezvous: Any) -> None:
    """Makes this process a rank of the default process group, on its device.

    Args:
        rank: This rank.
        devices: The device of each rank.
        rendezvous: ``init_method`` or ``store`` of `torch.distributed.init_process_group`.
    """
    device = torch.device(devices[rank].device)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    set_speed(devices[rank].speed)
    gpus = {d.device for d in devices if torch.device(d.device).type == "cuda"}
    # NCCL wants a GPU for each rank.
    backend = "nccl" if len(gpus) == len(devices) else "gloo"
    dist.init_process_group(
        backend,
        rank=rank,
        world_size=len(devices),
        timeout=COLLECTIVE_TIMEOUT,
        **rendezvous,
    )
