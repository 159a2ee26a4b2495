"""Time a VAE's decoder under Workers and on torchrun's ranks; start Workers often.

Both have the same plan and inputs. Each round is one call of either, in an order that
turns. A call under Workers is timed in the calling process; one on ranks is timed in rank
0, from where all are about to call the model. Cycles start Workers, call a model, and
close: then no process, open descriptor or temporary file may be left.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Client, Listener
from statistics import median
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.shared.machine import (
    add_output_argument,
    children_of,
    commit,
    now,
    save,
    software,
)
from bench.shared.networks import vae_decoder
from bench.shared.selection import whole_number
from bench.shared.timing import alternated
from bench.shared.torchvision_operators import declare_operators
from hetconv.autotune.launch.launcher import parse_devices, run_on
from hetconv.nn.parallelize import parallelize
from hetconv.planner.make_plan import make_plan
from hetconv.planner.partition import whole_model
from hetconv.runtime.throttle import DeviceName
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import Plan
from hetconv.tracing.tracer import capture
from hetconv.workers.workers import Workers

declare_operators()  # which diffusers needs where worker processes import this module

SIZES = 16, 32, 48  # of latents; images are eight times as large
WARMUPS, ROUNDS = 3, 61
WANTED = 1.10  # the most that Workers may take, over ranks
TOLERANCE = 1e-5


class Decoder(nn.Module):
    """The decoder, of a class of this module."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = vae_decoder()

    def forward(self, latent: Tensor) -> Tensor:
        image: Tensor = self.decoder(latent)
        return image


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--devices", default="cpu,cpu", help="one per rank (default: %(default)s)"
    )
    parser.add_argument(
        "--cycles",
        type=whole_number(0),
        default=50,
        help="starts and ends of Workers (default: %(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help="one size, fewer rounds")
    add_output_argument(parser)


def run(args: Namespace) -> None:
    """Prints a line per size and for the cycles, and the results as one JSON document last."""
    devices = parse_devices(args.devices)
    rows = []
    for size in SIZES[:1] if args.quick else SIZES:
        rows.append(compared(devices, size, 5 if args.quick else ROUNDS))
        print(
            "latent {latent}: Workers {workers_ms:.2f} ms, ranks {ranks_ms:.2f} ms, "
            "{ratio:.3f}x; error {error:.1e}".format(**rows[-1]),
            flush=True,
        )
    cycles = cycled(devices, args.cycles)
    print(
        "{cycles} cycles: {start_s} s to start, {end_s} s to end; left: {left}".format(
            **cycles
        ),
        flush=True,
    )
    setup = {"devices": args.devices, "cores": os.cpu_count(), "date": now()}
    document = {"suite": "workers", **software(), **commit(), **setup}
    document |= {"wanted": WANTED, "rounds": rows, "cycles": cycles}
    if args.output is not None:
        save(args.output, document)
    print(json.dumps(document))
    wrong = [row for row in rows if row["error"] > TOLERANCE]
    if wrong or any(cycles["left"].values()):
        raise SystemExit(1)


def split_by_height(model: nn.Module, x: Tensor, devices: list[DeviceName]) -> Plan:
    """A plan of shares as the devices' speeds are."""
    names = ["cpu"] * len(devices)
    profile = ClusterProfile.from_devices(names, link="host")
    with torch.no_grad():
        graph = capture(model, x)
    weights = [device.speed for device in devices]
    splits = whole_model(graph, "height", weights, ("height",))
    return make_plan(graph, profile, mode="infer").with_splits(splits)


def compared(devices: list[DeviceName], size: int, rounds: int) -> dict[str, Any]:
    """Seconds of a call both ways, and the error against the plain model."""
    torch.manual_seed(0)
    model, x = Decoder().eval(), torch.randn(1, 4, size, size)
    plan = split_by_height(model, x, devices)
    with torch.no_grad():
        wanted = model(x)
    names = [str(device) for device in devices]
    with Workers(plan, names) as workers, ranks(devices, plan, model, x) as timed:
        decode = workers.parallelize(model)
        error = float((decode(x) - wanted).abs().max() / wanted.abs().max())

        def call() -> float:
            start = time.perf_counter()
            decode(x)
            return time.perf_counter() - start

        runs: dict[str, Callable[[], float]] = {"workers": call, "ranks": timed}
        alternated(runs, WARMUPS)
        times = alternated(runs, rounds)
    ratios = [a / b for a, b in zip(times["workers"], times["ranks"], strict=True)]
    return {
        "latent": list(x.shape),
        **{f"{name}_ms": round(median(ts) * 1e3, 3) for name, ts in times.items()},
        **{f"{name}_least_ms": round(min(ts) * 1e3, 3) for name, ts in times.items()},
        "ratio": round(median(ratios), 4),
        "rounds": rounds,
        "error": error,
    }


@contextmanager
def ranks(
    devices: list[DeviceName], plan: Plan, model: nn.Module, x: Tensor
) -> Iterator[Callable[[], float]]:
    """Ranks that are no workers, and a function that returns seconds of a call on them."""
    with Listener(family="AF_UNIX") as listener:

        def job() -> None:
            try:
                run_on(devices, serve, listener.address, plan, model, x)
            finally:  # ends the wait for ranks that failed at the start
                with suppress(OSError):
                    Client(str(listener.address)).close()

        thread = Thread(target=job, daemon=True)
        thread.start()
        ends = [listener.accept() for _ in devices]

        def timed() -> float:
            for end in ends:
                end.send(True)
            seconds = [end.recv() for end in ends]
            return float(max(seconds))

        yield timed
        for end in ends:
            end.send(False)
        thread.join()


def serve(address: str, plan: Plan, model: nn.Module, x: Tensor) -> None:
    """On every rank: calls the model as often as it is told, and answers with seconds."""
    split = parallelize(model, plan)
    with Client(address) as caller:
        while caller.recv():
            dist.barrier()
            start = time.perf_counter()
            with torch.no_grad():
                split(x)
            caller.send(time.perf_counter() - start if dist.get_rank() == 0 else 0.0)


def cycled(devices: list[DeviceName], cycles: int) -> dict[str, Any]:
    """Median seconds to start and end, and what is left after all cycles but was not before."""
    torch.manual_seed(0)
    model, x = nn.Conv2d(4, 4, 3, padding=1).eval(), torch.randn(1, 4, 16, 16)
    plan = split_by_height(model, x, devices)
    names = [str(device) for device in devices]

    def once() -> tuple[float, float]:
        start = time.perf_counter()
        workers = Workers(plan, names)
        started = time.perf_counter()
        workers.parallelize(model)(x)
        called = time.perf_counter()
        workers.close()
        return started - start, time.perf_counter() - called

    with temporary_folder():
        once()  # what this imports and opens for good does not count
        before = present()
        times = [once() for _ in range(cycles)]
        after = present()
    starts, ends = zip(*times, strict=True) if times else ((0.0,), (0.0,))
    return {
        "cycles": cycles,
        "start_s": round(median(starts), 2),
        "end_s": round(median(ends), 2),
        "left": {what: len(after[what] - before[what]) for what in before},
    }


@contextmanager
def temporary_folder() -> Iterator[None]:
    """Has this process and those that it starts use an empty folder for temporary files."""
    with tempfile.TemporaryDirectory() as folder:
        before, tempfile.tempdir = tempfile.tempdir, folder
        variable, os.environ["TMPDIR"] = os.environ.get("TMPDIR"), folder
        try:
            yield
        finally:
            tempfile.tempdir = before
            del os.environ["TMPDIR"]
            if variable is not None:
                os.environ["TMPDIR"] = variable


def present() -> dict[str, set[Any]]:
    """This process's children, open descriptors, and temporary files."""
    return {
        "processes": set(children_of(os.getpid())),
        "descriptors": set(os.listdir("/proc/self/fd")),
        "temporary files": set(os.listdir(tempfile.gettempdir())),
        "files in memory": {*os.listdir("/dev/shm")},
    }
