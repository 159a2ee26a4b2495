"""Runs functions on gloo ranks: a pool that is kept for many checks, or ranks of their
own for those that die.

Another backend can be named. Rendezvous is a file, so ports never clash. ``fn`` is a
function of a module, started alike on every rank.
"""

from __future__ import annotations

import atexit
import gc
import os
import pickle
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hetconv.comm import call_tags

# Where tests make tensors, and all ranks theirs: with HETCONV_TEST_DEVICE=cuda on the first GPU.
DEVICE = (
    torch.device("cuda", 0)
    if os.environ.get("HETCONV_TEST_DEVICE") == "cuda"
    else torch.device("cpu")
)
TIMEOUT = timedelta(seconds=60)
GRACE = 10.0  # seconds that ranks get to finish once another one has failed
# What most ranks import: the process that they are forked from does so once.
PRELOADED = [
    "tests.conftest",
    "tests.placed",
    "tests.nets",
    "hetconv.nn.checkpoint",
    "hetconv.nn.parallelize",
    "hetconv.planner.make_plan",
    "hetconv.tracing.tracer",
    "torch._dynamo.polyfills.loader",
]
# Not fork: autograd starts threads where torch is built for CUDA, and they do not survive it.
Method = Literal["forkserver", "spawn"]
Outcome = tuple[bool, Any]  # (whether it returned, what it returned or the traceback)


class RankError(AssertionError):
    """A rank raised; the message holds its traceback."""


def _serve(
    rank: int,
    world: int,
    folder: str,
    backend: str,
    timeout: timedelta,
    jobs: Connection,
) -> None:
    gc.freeze()  # what was imported is not looked at again
    torch.set_num_threads(1)
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
        torch.set_default_device(DEVICE)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=world,
        timeout=timeout,
    )
    while (job := jobs.recv_bytes()) != b"stop":
        torch.manual_seed(0)
        # The last job may have left each rank in another call.
        call_tags.enter_step("nothing")
        try:
            fn, args = pickle.loads(job)
            answer = pickle.dumps((True, fn(*args)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        torch.set_default_dtype(torch.float32)
        jobs.send_bytes(answer)
    os._exit(0)  # peers may hold sockets open: leave without waiting for them


class Pool:
    """``world`` ranks of one process group that take jobs one after the other."""

    def __init__(
        self,
        world: int,
        method: Method = "forkserver",
        backend: str = "gloo",
        timeout: timedelta = TIMEOUT,
    ) -> None:
        context: Any = mp.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload(PRELOADED)
        self._folder, self._timeout = tempfile.mkdtemp(), timeout
        self._ends, self._ranks = [], []
        for rank in range(world):
            here, there = context.Pipe()
            p = context.Process(
                target=_serve,
                args=(rank, world, self._folder, backend, timeout, there),
                daemon=True,
            )
            p.start()
            there.close()
            self._ends.append(here)
            self._ranks.append(p)

    def outcomes(
        self, fn: Callable[..., Any], *args: Any, last: bool = False
    ) -> list[Outcome]:
        """What came of ``fn(*args)`` on every rank, in rank order. After the ``last``
        job each leaves by itself.
        """
        for end in self._ends:
            end.send_bytes(pickle.dumps((fn, args)))
            if last:
                end.send_bytes(b"stop")
        found: list[Outcome] = [(False, "no answer in time")] * len(self._ends)
        waiting, deadline = (
            set(self._ends),
            time.monotonic() + 2 * self._timeout.total_seconds(),
        )
        while waiting and (
            ready := wait(list(waiting), max(deadline - time.monotonic(), 0))
        ):
            for end in ready:
                assert isinstance(end, Connection)
                waiting.remove(end)
                outcome = _received(end)
                found[self._ends.index(end)] = outcome
                if not outcome[0]:
                    deadline = min(deadline, time.monotonic() + GRACE)
        return found

    def close(self) -> None:
        for end, p in zip(self._ends, self._ranks, strict=True):
            end.close()
            p.kill()
            p.join()
        shutil.rmtree(self._folder, ignore_errors=True)


def _received(end: Connection) -> Outcome:
    try:
        outcome: Outcome = pickle.loads(end.recv_bytes())
    except (EOFError, ConnectionResetError):
        return False, "died without a word"
    return outcome


_pools: dict[tuple[int, Method, str], Pool] = {}


def on_ranks(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    method: Method = "forkserver",
    backend: str = "gloo",
) -> list[Any]:
    """``fn(*args)`` on every rank of the pool of ``world``, in rank order. A pool that
    failed is not used again.
    """
    key = (world, method, backend)
    if key not in _pools:
        _pools[key] = Pool(*key)
    found: list[Outcome] = []
    try:
        found = _pools[key].outcomes(fn, *args)
    finally:
        # A test that was interrupted would leave its answers to the next one.
        if not found or not all(ok for ok, _ in found):
            _pools.pop(key).close()
    return _values(found)


def outcomes(world: int, fn: Callable[..., Any], *args: Any) -> list[Outcome]:
    """The same on ranks of their own, some of which may raise or die."""
    pool = Pool(world)
    try:
        return pool.outcomes(fn, *args, last=True)
    finally:
        pool.close()


def spawn(world: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """``fn(*args)`` on every rank of a new process group; the results in rank order."""
    return _values(outcomes(world, fn, *args))


def _values(found: list[Outcome]) -> list[Any]:
    failures = [
        f"--- rank {r}\n{value}" for r, (ok, value) in enumerate(found) if not ok
    ]
    if failures:
        raise RankError("\n".join(failures))
    return [value for _, value in found]


@atexit.register
def close_pools() -> None:
    while _pools:
        _pools.popitem()[1].close()
