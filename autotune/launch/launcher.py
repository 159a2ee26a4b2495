"""Functions on all ranks: those of torchrun, or new local processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from hetconv.errors import HetConvError
from hetconv.runtime.local_rank import (
    check_devices,
    join_group,
    rank_settings,
    take_cores,
)
from hetconv.runtime.throttle import DeviceName

from .supervisor import run_ranks


def parse_devices(text: str) -> list[DeviceName]:
    """Reads the devices of all ranks.

    Args:
        text: One device per rank, as in ``cpu,cpu@0.5`` or ``cuda:0,cuda:1``.

    Raises:
        HetConvError: A part of the text is not a device.
    """
    return [DeviceName.parse(part) for part in text.split(",")]


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
        rank = int(os.environ["RANK"])
        check_devices(devices[rank : rank + 1])
        return _run_rank(rank, "env://", devices, fn, args)
    check_devices(devices)
    with _environment(rank_settings(len(devices))):
        names = [str(device) for device in devices]
        return run_ranks(names, _run_local_rank, (tuple(devices), fn, args))


@contextmanager
def _environment(added: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables that are not set."""
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
    take_cores(rank, devices)
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
    join_group(rank, devices, init_method=rendezvous)
    result = fn(*args)
    dist.barrier()
    # Not after an error: it may wait for ranks that have ended.
    dist.destroy_process_group()
    return result if rank == 0 else None
