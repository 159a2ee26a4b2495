"""Functions on all ranks: those of torchrun, or new local processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hetconv.errors import HetConvError

from . import throttle
from .core_affinity import assign_cores
from .supervisor import run_ranks
from .throttle import DeviceName

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
# Environment variables of the ranks that are started here, unless the user has set
# them. By default glibc returns freed memory to the system and gets it back page by
# page, which takes as long as some layers do, and oneDNN forgets kernels when many
# plans take turns.
CPU_SETTINGS = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TOP_PAD_": str(1 << 26),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(1 << 14),
}


def parse_devices(text: str) -> list[DeviceName]:
    """Reads the devices of all ranks.

    Args:
        text: One device per rank, as in ``cpu,cpu@0.5`` or ``cuda:0,cuda:1``.

    Raises:
        HetConvError: A part of the text is not a device.
    """
    return [DeviceName.parse(part) for part in text.split(",")]


def check_present(devices: Sequence[DeviceName]) -> None:
    """Checks that this process sees its devices: its rank's alone under torchrun.

    Raises:
        HetConvError: A device is not there.
    """
    rank = os.environ.get("RANK")
    own = devices if rank is None else devices[int(rank) : int(rank) + 1]
    gpus = torch.cuda.device_count()
    for name in own:
        device = torch.device(name.device)
        if device.type == "cuda" and (device.index or 0) >= gpus:
            there = ", ".join(["cpu", *(f"cuda:{i}" for i in range(gpus))])
            build = "" if torch.version.cuda else ", whose torch is built without CUDA,"
            raise HetConvError(
                f"device {name.device!r} is not there; this process{build} sees {there}: name "
                "one of these for each rank"
            )


def run_on(devices: Sequence[DeviceName], fn: Callable[..., Any], *args: Any) -> Any:
    """Calls ``fn(*args)`` once per device, in a process group of as many ranks.

    Under torchrun this process is one of the ranks. Otherwise local ranks are started,
    which end with this process, however it ends, and when one of them fails.

    Args:
        devices: The device of each rank.
        fn: A function, picklable unless torchrun started the ranks.
        args: Its arguments, picklable likewise.

    Returns:
        The result of rank 0; None on other ranks.

    Raises:
        HetConvError: A rank failed or died; it says which, on which device, why, and
            what it did last. Or torchrun started another number of ranks.
    """
    if "RANK" in os.environ:
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world != len(devices):
            raise HetConvError(
                f"torchrun started {world} ranks, but {len(devices)} devices were named; name one "
                "per rank"
            )
        check_present(devices)
        return _run_rank(int(os.environ["RANK"]), "env://", devices, fn, args)
    check_present(devices)
    threads = {"OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // len(devices), 1))}
    with _unless_set(threads | CPU_SETTINGS):
        names = [str(device) for device in devices]
        return run_ranks(names, _run_local_rank, (tuple(devices), fn, args))


@contextmanager
def _unless_set(settings: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables, but for those that are set already."""
    added = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ |= added
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _run_local_rank(
    rank: int,
    rendezvous: str,
    devices: Sequence[DeviceName],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    if hasattr(os, "sched_setaffinity"):
        cores = assign_cores(devices, os.sched_getaffinity(0))[rank]
        if cores:
            os.sched_setaffinity(0, cores)
    world = str(len(devices))
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
    }
    return _run_rank(rank, rendezvous, devices, fn, args)


def _run_rank(
    rank: int,
    rendezvous: str,
    devices: Sequence[DeviceName],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    device = torch.device(devices[rank].device)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    throttle.set_speed(devices[rank].speed)
    gpus = {d.device for d in devices if torch.device(d.device).type == "cuda"}
    # NCCL wants a GPU for each rank.
    backend = "nccl" if len(gpus) == len(devices) else "gloo"
    dist.init_process_group(
        backend,
        init_method=rendezvous,
        rank=rank,
        world_size=len(devices),
        timeout=COLLECTIVE_TIMEOUT,
    )
    result = fn(*args)
    dist.barrier()
    # Not after an error: it may wait for ranks that have ended.
    dist.destroy_process_group()
    return result if rank == 0 else None
