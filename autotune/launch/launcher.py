"""Ranks: this process's own, under torchrun, or new local ones, none of which outlives
this process or each other.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hetconv.errors import HetConvError, LostRankError

from . import throttle
from .core_affinity import cores_of
from .guard import guarded
from .throttle import DeviceName

TIMEOUT = timedelta(minutes=10)
# Environment variables of the ranks that are started here, unless the user has set
# them. glibc returns freed memory to the system and gets it back page by page, which
# takes as long as some layers do; oneDNN would forget kernels when many plans take
# turns.
CPU_SETTINGS = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TOP_PAD_": str(1 << 26),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(1 << 14),
}
GRACE = 5.0  # seconds in which ranks may end by themselves once one of them has failed
_diary: Path | None = None


def parse_devices(text: str) -> list[DeviceName]:
    """``cpu,cpu@0.5`` -> one device per rank. Raises `HetConvError` for what is not a device."""
    return [DeviceName.parse(part) for part in text.split(",")]


def did(what: str) -> None:
    """Notes what this rank did last: what is said of it if it dies."""
    if _diary is not None:
        _diary.write_text(what, encoding="utf-8")


def run_on(devices: Sequence[DeviceName], fn: Callable[..., Any], *args: Any) -> Any:
    """Calls ``fn(*args)`` once per device, in a process group of as many ranks; rank
    0's result (None elsewhere).

    Under torchrun this process is one of the ranks; otherwise local ranks are started,
    and ``fn`` and ``args`` must be picklable. When one of these fails or dies, the
    others are ended, and `HetConvError` says which it was, on which device, why, and
    what it did last. They end with this process too, however it ends.
    """
    if "RANK" in os.environ:
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world != len(devices):
            raise HetConvError(
                f"torchrun started {world} ranks, but {len(devices)} devices were named; name "
                "one per rank"
            )
        return _rank(devices, "env://", fn, args)
    threads = {"OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // len(devices), 1))}
    method = get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="hetconv-ranks-") as folder:
        calls = (
            pickle.dumps((_local, (Path(folder), r, tuple(devices), fn, args)))
            for r in range(len(devices))
        )
        ranks = [
            method.Process(target=guarded, args=(os.getpid(), Path(folder), call))
            for call in calls
        ]
        try:
            with _deaf_to_ctrl_c(), _unless_set(threads | CPU_SETTINGS):
                for p in ranks:
                    p.start()
            ended = _wait(ranks)
        finally:
            for p in ranks:
                if p.is_alive():
                    p.kill()
                    p.join()
        if any(ended.values()):
            raise HetConvError(_failure(Path(folder), devices, ended))
        return pickle.loads(Path(folder, "result").read_bytes())


@contextmanager
def _unless_set(settings: Mapping[str, str]) -> Iterator[None]:
    """Environment variables of processes started meanwhile; those that are set already stay."""
    new = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ |= new
    try:
        yield
    finally:
        for name in new:
            del os.environ[name]


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Processes started meanwhile ignore Ctrl-C, which a terminal sends to all: the one
    that started them ends them.
    """
    if (
        threading.current_thread() is not threading.main_thread()
    ):  # nor may any other change what is done on signals
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _wait(ranks: Sequence[BaseProcess]) -> dict[int, int]:
    """The status of each rank that ended, in the order in which they did.

    Waits for all, or until `GRACE` seconds after the first that failed, which the
    others fail by or wait for.
    """
    alive, found = {p.sentinel: rank for rank, p in enumerate(ranks)}, dict[int, int]()
    deadline: float | None = None
    while alive and (
        ready := connection.wait(
            list(alive), deadline and max(deadline - time.monotonic(), 0)
        )
    ):
        for rank in sorted(
            alive.pop(sentinel) for sentinel in ready if isinstance(sentinel, int)
        ):
            ranks[rank].join()
            found[rank] = ranks[rank].exitcode or 0
            if found[rank] and deadline is None:
                deadline = time.monotonic() + GRACE
    return found


def _failure(
    folder: Path, devices: Sequence[DeviceName], ended: Mapping[int, int]
) -> str:
    """Of the rank that failed first: one that died, without a word to the others, or
    the first that raised an error.
    """
    files = {rank: folder / f"{rank}.error" for rank, status in ended.items() if status}
    died = [rank for rank, file in files.items() if not file.exists()]
    rank = (
        died[0] if died else min(files, key=lambda rank: files[rank].stat().st_mtime_ns)
    )
    if rank not in died:
        why = f"failed: {files[rank].read_text(encoding='utf-8')}"
    elif ended[rank] < 0:
        why = f"was killed by {signal.Signals(-ended[rank]).name}{_last(folder, rank)}"
    else:
        why = f"ended with status {ended[rank]}{_last(folder, rank)}"
    return f"rank {rank} ({devices[rank]}) {why}"


def _last(folder: Path, rank: int) -> str:
    diary = folder / f"{rank}.did"
    return f"; the last it did: {diary.read_text(encoding='utf-8') if diary.exists() else 'start'}"


def _local(
    folder: Path,
    rank: int,
    devices: Sequence[DeviceName],
    fn: Callable[..., Any],
    args: Any,
) -> None:
    """One of the processes that `run_on` starts."""
    global _diary
    _diary = folder / f"{rank}.did"
    world = str(len(devices))
    if hasattr(os, "sched_setaffinity") and (
        cores := cores_of(devices, os.sched_getaffinity(0))[rank]
    ):
        os.sched_setaffinity(0, cores)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
    }
    try:
        result = _rank(devices, f"file://{folder}/rendezvous", fn, args)
        if rank == 0:
            Path(folder, "result").write_bytes(pickle.dumps(result))
    except BaseException as e:
        own = isinstance(e, HetConvError) and not isinstance(
            e, LostRankError
        )  # which says all there is to say
        said = (
            str(e)
            if own
            else "".join(traceback.format_exception_only(e)).strip()
            + _last(folder, rank)
        )
        Path(folder, f"{rank}.error").write_text(said, encoding="utf-8")
        sys.stderr.flush()
        os._exit(
            1
        )  # at once: connections that are left open could keep it, and so the others


def _rank(
    devices: Sequence[DeviceName],
    rendezvous: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    rank = int(os.environ["RANK"])
    device = torch.device(devices[rank].device)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    throttle.set_speed(devices[rank].speed)
    gpus = {d.device for d in devices if torch.device(d.device).type == "cuda"}
    backend = (
        "nccl" if len(gpus) == len(devices) else "gloo"
    )  # NCCL wants a GPU for each rank
    dist.init_process_group(
        backend,
        init_method=rendezvous,
        rank=rank,
        world_size=len(devices),
        timeout=TIMEOUT,
    )
    result = fn(*args)
    dist.barrier()
    dist.destroy_process_group()  # not after an error: it may wait for ranks that are no more
    return result if rank == 0 else None
