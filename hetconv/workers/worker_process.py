"""A worker: a process that is one rank, and answers the requests of the calling process."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hetconv.nn.parallelize import parallelize
from hetconv.runtime.local_rank import join_group, take_cores
from hetconv.runtime.rank_devices import device_identity
from hetconv.runtime.throttle import DeviceName

from .main_module import import_main
from .messages import Answer, Call, Failure, Load
from .transport import Packed, SharedMemory, pack, unpack


def run(
    rank: int,
    devices: Sequence[str],
    seed: int,
    connection: int,
    rendezvous: int,
    models: int,
    arguments: int,
    results: int,
) -> None:
    """Is a worker, to its end.

    Args:
        rank: Its rank.
        devices: Names of the devices of all ranks.
        seed: Seed of random numbers.
        connection: Descriptor of the connection to the calling process.
        rendezvous: Descriptor of a file by which the ranks find each other.
        models: Descriptor of shared memory in which models come.
        arguments: Likewise, arguments of calls.
        results: Likewise, in which results go.
    """
    caller = Connection(connection)
    names = [DeviceName.parse(name) for name in devices]
    where = f"in the worker of rank {rank} ({names[rank]})"
    try:
        take_cores(rank, names)
        torch.manual_seed(seed)
        store = dist.FileStore(  # type: ignore[attr-defined]
            f"/proc/self/fd/{rendezvous}", len(names)
        )
        join_group(rank, names, store=store)
        caller.send(Answer(device_identity(names[rank].device, names[rank].speed)))
    except Exception as e:
        caller.send(Answer(failure=Failure.of(e, where)))
        return
    worker = _Worker(
        rank,
        torch.device(names[rank].device),
        where,
        *map(SharedMemory, (models, arguments, results)),
    )
    with suppress(EOFError, OSError):
        while (request := caller.recv()) is not None:
            caller.send(worker.answer(request))
            del request
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a second before the interpreter has taken everything apart


class _Worker:
    def __init__(
        self,
        rank: int,
        device: torch.device,
        where: str,
        models: SharedMemory,
        arguments: SharedMemory,
        results: SharedMemory,
    ):
        self._rank, self._device, self._where = rank, device, where
        self._models_memory, self._arguments = models, arguments
        self._results = results
        self._models: dict[int, nn.Module] = {}

    def answer(self, request: Load | Call) -> Answer:
        """Does what a request says."""
        called = False
        try:
            if request.main is not None:
                import_main(request.main)
            if isinstance(request, Load):
                self._load(request)
                return Answer()
            result = self._call(request)
            called = True
            return Answer(self._packed(result))
        except BaseException as e:
            return Answer(failure=Failure.of(e, self._where, in_step=called))

    def _load(self, request: Load) -> None:
        try:
            model = unpack(request.model, self._models_memory, self._device)
        finally:
            self._models_memory.unmap()
        self._models[request.key] = parallelize(
            model, request.plan, fuse=request.fuse, graphs=request.graphs
        )

    def _call(self, request: Call) -> Any:
        for key in request.unused:
            self._models.pop(key, None)
        model = self._models[request.key]
        if model.training != request.training:
            model.train(request.training)
        args, kwargs = unpack(request.arguments, self._arguments, self._device)
        cast = request.autocast
        autocast = (
            nullcontext() if cast is None else torch.autocast(self._device.type, cast)
        )
        with torch.no_grad(), autocast:
            return model(*args, **kwargs)

    def _packed(self, result: Any) -> Packed | None:
        return pack("the result", result, self._results) if self._rank == 0 else None
