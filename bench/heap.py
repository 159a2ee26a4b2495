"""What steps gain where a process keeps the memory that it frees: plain models in two processes, in turn.

One keeps it, as ranks on CPUs do; the other gives it back to the system, as the C library does by itself.
"""

from __future__ import annotations

import json
import multiprocessing
import platform
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from bench.autotune import CASES, MODES, Case
from bench.machine import commit, save, software
from bench.verdict import Demand
from hetconv.autotune.inputs import ModelInputs
from hetconv.autotune.models import build_model, channels_last, random_input
from hetconv.autotune.race import step_of
from hetconv.errors import HetConvError
from hetconv.heap import keep_freed, pages_taken
from hetconv.plan import Mode

WARM_UP, ROUNDS, ROUND_S = 5, 9, 0.5  # steps; rounds, and seconds of each in each process
LEAST = 0.98  # of the speed, that must be left everywhere: less is no noise


class Turn(NamedTuple):
    """Median seconds of a step, and pages that the system gave for each."""

    seconds: float
    pages: float


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="also write the results here")


def run(args: Namespace) -> None:
    """Prints a line per network and mode, what must hold, and the results as one JSON document last."""
    rows: list[dict[str, Any]] = []
    for case, mode in product(CASES, MODES):
        r = measure(case, mode)
        ms = f"{r['kept_ms']:6.1f} ms, {r['given_back_ms']:6.1f} ms where it is given back"
        print(f"{case.name:16} {mode:5} {ms}: {r['ratio']:.2f}x", flush=True)
        rows.append({"model": case.name, "mode": mode} | r)
    least = min(row["ratio"] for row in rows)
    print(f"must hold:\n  {Demand('keeping it against giving it back, anywhere', LEAST, least)}")
    setup = software() | {"libc": " ".join(platform.libc_ver())} | commit()
    document = {"suite": "heap", "setup": setup, "cases": rows}
    if args.output is not None:
        save(args.output, document)
    print(json.dumps(document))


def measure(case: Case, mode: Mode) -> dict[str, float]:
    """Of one network: milliseconds and new pages of a step in both processes; how many times as fast the first is."""
    with ExitStack() as stack:
        both = [stack.enter_context(stepping(case, mode, keep)) for keep in (True, False)]
        rounds = [[asked(pipe) for pipe in both] for _ in range(ROUNDS)]
    kept, given_back = (median(turn.seconds for turn in turns) for turns in zip(*rounds, strict=True))
    return {
        "kept_ms": round(kept * 1e3, 3), "given_back_ms": round(given_back * 1e3, 3),
        "ratio": round(median(back.seconds / own.seconds for own, back in rounds), 4),
        "kept_pages": round(median(own.pages for own, _ in rounds)),
        "given_back_pages": round(median(back.pages for _, back in rounds)),
    }  # fmt: skip


def asked(pipe: Connection) -> Turn:
    """The next turn of a process. Raises `HetConvError` if it ended."""
    try:
        pipe.send(True)
        turn: Turn = pipe.recv()
    except (EOFError, OSError) as e:
        raise HetConvError("a process that runs steps ended, see above") from e
    return turn


@contextmanager
def stepping(case: Case, mode: Mode, keep: bool) -> Iterator[Connection]:
    """A process that steps for a while whenever it is asked to."""
    own, other = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=steps, args=(other, case, mode, keep), daemon=True)
    process.start()
    other.close()
    try:
        yield own
    finally:
        own.close()
        process.join(10)
        process.kill()


def steps(pipe: Connection, case: Case, mode: Mode, keep: bool) -> None:
    """What it does, until nobody asks any more."""
    torch.set_num_threads(1)
    if keep and not keep_freed():
        raise HetConvError("this process cannot keep what it frees: another C library, or MALLOC_... is set")
    model, x = channels_last(build_model(case.model, case.arguments, 0), random_input(case.input, 0))
    step = step_of(model.train(mode == "train"), ModelInputs.of(x), mode)
    for _ in range(WARM_UP):
        step()
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        pages, seconds = pages_taken(), list[float]()
        while sum(seconds) < ROUND_S:
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        pipe.send(Turn(median(seconds), (pages_taken() - pages) / len(seconds)))
