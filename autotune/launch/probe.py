"""Two ranks that try a backend: they meet, sum, exchange and wait for each other. What
hangs is ended.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hetconv.comm.exchange import PendingExchange
from hetconv.comm.rank_group import rank_group_of

START = 60.0  # seconds in which a process is there, and its device with it, on a busy machine
STARTING = "starting"
GRACE = 2.0  # seconds beyond its own timeout, for a backend to say what is wrong itself
Say = Callable[[str], None]
Probe = Callable[[int, str, str, Path, float, Say], None]


@dataclass(frozen=True)
class Outcome:
    """``problem``: what went wrong, in words; None if all went well. ``seconds`` that
    it took, from start to end.
    """

    problem: str | None
    seconds: float


def communicate(
    rank: int, device: str, backend: str, folder: Path, timeout: float, say: Say
) -> None:
    """What a split model needs of a backend, on rank 0 or 1. ``say`` names each
    operation before it starts.
    """
    where = torch.device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    say("init_process_group")
    limit = timedelta(seconds=timeout)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=2,
        timeout=limit,
    )
    numbers = torch.full((1024,), float(rank + 1), device=where)
    say("all_reduce")
    dist.all_reduce(numbers)
    _expect(numbers, 3.0)
    say("a point-to-point exchange")
    mine = torch.full((1024,), float(rank), device=where)
    got = PendingExchange(
        rank_group_of(), mine, {1 - rank: mine}, {1 - rank: (1024,)}
    ).wait()
    _expect(got[1 - rank], float(1 - rank))
    say("barrier")
    dist.barrier()
    if where.type == "cuda":
        torch.cuda.synchronize(where)


def _expect(found: torch.Tensor, value: float) -> None:
    wrong = found[found != value]  # waits for a GPU
    if wrong.numel():
        raise RuntimeError(f"gave {wrong[0].item()} where {value} was expected")


def try_pair(
    devices: tuple[str, str], backend: str, timeout: float, probe: Probe = communicate
) -> Outcome:
    """Runs ``probe`` on a rank for each device, for ``timeout`` seconds an operation.
    No process outlives the call.
    """
    method = (
        "forkserver"
        if "forkserver" in multiprocessing.get_all_start_methods()
        else "spawn"
    )
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(
            [__name__]
        )  # torch is imported once for all pairs
    with tempfile.TemporaryDirectory() as folder:
        ends, ranks = [], []
        try:
            for rank, device in enumerate(devices):
                here, there = context.Pipe()
                args = (probe, rank, device, backend, Path(folder), timeout, there)
                ranks.append(context.Process(target=_rank, args=args, daemon=True))
                ends.append(here)
                ranks[-1].start()
                there.close()
            return _watch(ends, timeout, Path(folder))
        finally:
            for process in ranks:
                if process.pid is not None:
                    process.kill()
                    process.join()
            for end in ends:
                end.close()


def _rank(
    probe: Probe,
    rank: int,
    device: str,
    backend: str,
    folder: Path,
    timeout: float,
    to: Connection,
) -> None:
    with open(folder / f"rank{rank}", "wb") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)  # what backends print beside what they raise
    threading.Thread(target=_leave_with, args=(to,), daemon=True).start()
    torch.set_num_threads(1)
    try:
        probe(
            rank, device, backend, folder, timeout, lambda stage: to.send(("at", stage))
        )
        to.send(("done", ""))
    except BaseException as e:
        to.send(("failed", reason(e)))
    threading.Event().wait()  # until it is ended: the other one may not have all its messages yet


def _leave_with(parent: Connection) -> None:
    """Ends this process when the one that started it is gone."""
    with suppress(EOFError, OSError):
        parent.recv_bytes()
    os._exit(1)


def reason(error: BaseException) -> str:
    """The line of an error that says most: NCCL puts it last, all others first."""
    lines = [
        line.strip()
        for line in str(error).partition("Last error:")[2].splitlines()
        if line.strip()
    ]
    lines += [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _watch(ends: list[Connection], timeout: float, folder: Path) -> Outcome:
    """What two ranks say, until both are done, one fails or dies, or one says nothing
    for too long.
    """
    begun = time.monotonic()
    doing, limits, left = (
        dict.fromkeys(ends, STARTING),
        dict.fromkeys(ends, begun + START),
        list(ends),
    )

    def ended(problem: str | None) -> Outcome:
        return Outcome(problem, time.monotonic() - begun)

    while left:
        first = min(left, key=lambda end: limits[end])
        ready = wait(left, max(limits[first] - time.monotonic(), 0.0))
        if not ready:
            return ended(
                f"hangs in {doing[first]}: no answer for "
                f"{START if doing[first] == STARTING else timeout:g} s"
            )
        for end in ready:
            assert isinstance(end, Connection)
            try:
                what, said = end.recv()
            except (EOFError, OSError):
                rank = ends.index(end)
                return ended(
                    f"fails in {doing[end]}: rank {rank} died{_last_line(folder / f'rank{rank}')}"
                )
            if what == "failed":
                return ended(f"fails in {doing[end]}: {said}")
            if what == "done":
                left.remove(end)
            doing[end], limits[end] = said, time.monotonic() + timeout + GRACE
    return ended(None)


def _last_line(log: Path) -> str:
    """Of what a process printed before it died."""
    lines = (
        log.read_text(encoding="utf-8", errors="replace").split("\n")
        if log.exists()
        else []
    )
    said = [line.strip() for line in lines if line.strip()]
    return f", having said: {said[-1]}" if said else ""
