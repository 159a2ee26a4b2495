"""Ranks: this process's own, under torchrun, or new local ones through torch's launcher."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from hetconv import emulate
from hetconv.emulate import DeviceName
from hetconv.errors import HetConvError

TIMEOUT = timedelta(minutes=10)


def parse_devices(text: str) -> list[DeviceName]:
    """``cpu,cpu@0.5`` -> one device per rank. Raises `HetConvError` for what is not a device."""
    return [DeviceName.parse(part) for part in text.split(",")]


def run_on(devices: Sequence[DeviceName], fn: Callable[..., Any], *args: Any) -> Any:
    """Calls ``fn(*args)`` once per device, in a process group of as many ranks; rank 0's result (None elsewhere).

    Under torchrun this process is one of the ranks; otherwise local ranks are started, and ``fn`` and ``args`` must be
    picklable. Raises `HetConvError` when a rank fails.
    """
    if "RANK" in os.environ:
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world != len(devices):
            raise HetConvError(
                f"torchrun started {world} ranks, but {len(devices)} devices were named; name one per rank"
            )
        return _rank(devices, fn, args)
    threads = str(max((os.cpu_count() or 1) // len(devices), 1))
    os.environ.setdefault("OMP_NUM_THREADS", threads)
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=len(devices), run_id=uuid.uuid4().hex, max_restarts=0,
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="spawn", monitor_interval=0.2,
    )  # fmt: skip
    try:
        return elastic_launch(config, _rank)(devices, fn, args)[0]
    except ChildFailedError as e:
        rank, failure = e.get_first_failure()
        raise HetConvError(f"rank {rank} failed: {_said(failure.message)}") from None


def _said(message: Any) -> str:
    """The exception at the end of a rank's traceback, all its lines."""
    lines = str(message.get("message", message) if isinstance(message, dict) else message).strip().splitlines()
    starts = [i for i, line in enumerate(lines) if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)]
    return "\n".join(lines[starts[-1] :] if starts else lines[-1:]) or "no message; see its output above"


def _rank(devices: Sequence[DeviceName], fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    rank = int(os.environ["RANK"])
    device = torch.device(devices[rank].device)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    emulate.set_speed(devices[rank].speed)
    gpus = {d.device for d in devices if torch.device(d.device).type == "cuda"}
    backend = "nccl" if len(gpus) == len(devices) else "gloo"  # NCCL wants a GPU for each rank
    dist.init_process_group(backend, timeout=TIMEOUT)
    try:
        result = fn(*args)
        dist.barrier()
        return result if rank == 0 else None
    finally:
        dist.destroy_process_group()
