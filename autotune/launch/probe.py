"""A test of a backend on two ranks: rendezvous, sum, exchange and barrier."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from hetconv.comm.exchange import PendingExchange
from hetconv.comm.rank_group import rank_group_of

from .supervisor import RankFailedError, log_last_action, run_ranks

REPLY_MARGIN_S = 2.0  # beyond a backend's own timeout, to say what is wrong itself
Probe = Callable[[int, str], None]


@dataclass(frozen=True)
class Outcome:
    """Result of a test.

    Attributes:
        problem: What went wrong, in words; None if all went well.
        seconds: What the test took.
    """

    problem: str | None
    seconds: float


def communicate(rank: int, device: str) -> None:
    """Runs what a split model needs of a backend.

    Args:
        rank: 0 or 1.
        device: Where its tensors are, as in ``cuda:0``.

    Raises:
        RuntimeError: A sum or a message has wrong values.
    """
    numbers = torch.full((1024,), float(rank + 1), device=device)
    log_last_action("all_reduce")
    dist.all_reduce(numbers)
    _expect(numbers, 3.0)
    log_last_action("a point-to-point exchange")
    mine = torch.full((1024,), float(rank), device=device)
    peer = 1 - rank
    exchange = PendingExchange(rank_group_of(), mine, {peer: mine}, {peer: (1024,)})
    _expect(exchange.wait()[peer], float(peer))


def _expect(found: torch.Tensor, value: float) -> None:
    wrong = found[found != value]  # waits for a GPU
    if wrong.numel():
        raise RuntimeError(f"gave {wrong[0].item()} where {value} was expected")


def try_pair(
    devices: tuple[str, str],
    backend: str,
    timeout_s: float,
    probe: Probe = communicate,
) -> Outcome:
    """Runs a test on a rank for each device.

    Args:
        devices: The two devices.
        backend: A backend of torch.distributed.
        timeout_s: Seconds that each operation may take.
        probe: The test.

    Returns:
        Whether it passed. No process is left when this function returns.
    """
    start = time.monotonic()
    args = (devices, backend, timeout_s, probe)
    try:
        run_ranks(
            devices,
            _run_probe,
            args,
            start_method=_start_method(),
            grace_s=0.0,
            max_silence_s=timeout_s + REPLY_MARGIN_S,
            keep_output=True,
        )
    except RankFailedError as e:
        return Outcome(_problem(e, timeout_s), time.monotonic() - start)
    return Outcome(None, time.monotonic() - start)


def _start_method() -> Literal["spawn", "forkserver"]:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    # torch is imported once for all pairs.
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    return "forkserver"


def _run_probe(
    rank: int,
    rendezvous: str,
    devices: tuple[str, str],
    backend: str,
    timeout_s: float,
    probe: Probe,
) -> None:
    device = torch.device(devices[rank])
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    log_last_action("init_process_group")
    dist.init_process_group(
        backend,
        init_method=rendezvous,
        rank=rank,
        world_size=len(devices),
        timeout=timedelta(seconds=timeout_s),
    )
    probe(rank, devices[rank])
    log_last_action("barrier")
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.destroy_process_group()


def _problem(failure: RankFailedError, timeout_s: float) -> str:
    if failure.kind == "hung":
        return f"hangs in {failure.last_action}: no answer for {timeout_s:g} s"
    if failure.kind == "raised":
        return f"fails in {failure.last_action}: {main_reason(failure.detail)}"
    output = f"; last output: {failure.last_output}" if failure.last_output else ""
    return f"fails in {failure.last_action}: rank {failure.rank} died{output}"


def main_reason(error: str) -> str:
    """Shortens the text of an error to its type and the line that says most.

    NCCL puts that line last, other libraries first.

    Args:
        error: A text such as ``module.Error: message``, of one or more lines.
    """
    kind, _, message = error.partition(": ")
    last = message.partition("Last error:")[2]
    lines = [line.strip() for line in (last or message).splitlines() if line.strip()]
    name = kind.strip().rpartition(".")[2]
    return f"{name}: {lines[0]}" if lines else name
