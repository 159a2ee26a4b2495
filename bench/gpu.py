"""Run all that needs a GPU, in minutes: tests and benchmarks as separate processes."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from bench.shared.machine import (
    RESULTS,
    ROOT,
    facts,
    need_cuda,
    results_file,
    save,
    slug,
)

BUDGET_S = 520.0  # in all
GRACE_S = 5.0  # seconds that a stage gets to end by itself once it is interrupted
PASSED = r"\b\d+ passed"
# Without the project's settings: a key that no plugin knows is an error, and
# pytest-timeout may be missing.
PYTEST = (
    "-m",
    "pytest",
    "-c",
    os.devnull,
    "--rootdir",
    str(ROOT),
    "-p",
    "no:cacheprovider",
    "-p",
    "no:benchmark",
    "-q",
    "-ra",
)
WORKERS = 15  # compilers and ranks want cores, and contexts take half a gigabyte of the GPU each
ON_DEVICE = {
    "HETCONV_TEST_DEVICE": "cuda",
    "PYTEST_TIMEOUT": "120",
    "PYTHONFAULTHANDLER": "1",
}

Outcome = Literal["passed", "failed", "timed out", "not run"]


@dataclass(frozen=True)
class Stage:
    """A command with a limit in seconds. It passed if it ended with status 0 and its
    output has ``expects`` in it.
    """

    name: str
    command: tuple[str, ...]
    limit: float
    env: dict[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()  # modules without which it is not run
    expects: str = ""


@dataclass(frozen=True)
class Done:
    name: str
    outcome: Outcome
    seconds: float
    said: str  # the last line of its output, or why it was not run
    command: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds",
        type=float,
        default=BUDGET_S,
        help="for all stages together (default: %(default)s)",
    )
    parser.add_argument(
        "--only",
        metavar="REGEX",
        default="",
        help="only stages whose name matches somewhere",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        default=os.environ.get("HETCONV_RESULTS"),
        help="write results here (default: $HETCONV_RESULTS, else bench/results/<gpu>)",
    )


def run(args: argparse.Namespace) -> None:
    """Raises `KernelError` without a GPU, `SystemExit` with status 1 if a stage failed
    or ran out of time.
    """
    start = time.monotonic()
    need_cuda("gpu")
    machine = facts()
    folder = Path(args.output) if args.output else RESULTS / slug(machine["device"])
    folder.mkdir(parents=True, exist_ok=True)
    print(
        f"{machine['device']}, torch {machine['torch']}, triton {machine['triton']}: into {folder}",
        flush=True,
    )
    done: list[Done] = []
    for stage in stages(folder):
        if re.search(args.only, stage.name):
            left = args.seconds - (time.monotonic() - start)
            done.append(performed(stage, left))
            document = {"suite": "gpu", **machine, "stages": [asdict(d) for d in done]}
            save(results_file(folder, "gpu"), document)
    print(table(done), flush=True)
    if any(d.outcome in ("failed", "timed out") for d in done):
        raise SystemExit(1)


def stages(folder: Path) -> list[Stage]:
    """In order of what is known least without them. The longest benchmark comes last
    and takes what time is left.
    """
    return [*kernel_stages(), *rank_stages(), *bench_stages(folder)]


def kernel_stages() -> list[Stage]:
    of_triton = "tests/kernels/triton/test_"
    convolutions = (
        f"{of_triton}conv2d.py",
        f"{of_triton}conv2d_tiles.py",
        f"{of_triton}strided_tensors.py",
        "tests/kernels/test_epilogue.py",
        "tests/kernels/test_conv2d_op.py",
    )
    others = (
        *(
            f"{of_triton}{name}.py"
            for name in ("concat", "concat_forms", "norms", "pack", "conv2d_parts")
        ),
        "tests/kernels/test_concat_calls.py",
        "tests/kernels/test_packing.py",
    )
    needs = "pytest", "hypothesis"
    return [
        pytest_stage("convolutions", 170, "--maxfail=10", *convolutions, needs=needs),
        pytest_stage(
            "concatenation, norms and packing",
            110,
            "--maxfail=10",
            *others,
            needs=needs,
        ),
    ]


def rank_stages() -> list[Stage]:
    ranks, model = "tests/devices/test_gpu.py", ("pydantic",)
    names = "norms", "pooling", "random", "einsum"
    operators = (
        "tests/operators/test_functions_on_shards.py",
        "tests/measure/test_sampling.py",
        *(f"tests/ops/test_{name}.py" for name in names),
    )
    generated = (*model, "hypothesis")
    programs = (*generated, "timm", "torchvision")
    return [
        pytest_stage(
            "messages over NCCL", 30, ranks, "-k", "nccl and messages", alone=True
        ),
        pytest_stage(
            "model over NCCL",
            30,
            ranks,
            "-k",
            "nccl and model",
            needs=model,
            alone=True,
        ),
        pytest_stage("two ranks over gloo", 80, ranks, "-k", "gloo", needs=model),
        pytest_stage("programs on ranks", 150, "tests/programs", needs=programs),
        pytest_stage("laws on ranks", 100, "tests/laws", needs=generated),
        pytest_stage("operators on ranks", 100, *operators, needs=generated),
    ]


def pytest_stage(
    name: str,
    limit: float,
    *arguments: str,
    needs: tuple[str, ...] = (),
    alone: bool = False,
) -> Stage:
    """A run of pytest on the device, one test after the other if each needs it ``alone``."""
    workers = () if alone else in_parallel()
    command = (*PYTEST, *workers, *arguments)
    return Stage(name, command, limit, ON_DEVICE, needs, PASSED)


def bench_stages(folder: Path) -> list[Stage]:
    def bench(suite: str, *options: str) -> tuple[str, ...]:
        output = str(results_file(folder, suite))
        return ("-m", "bench", suite, "--quick", *options, "-o", output)

    budget = "--budget", "{seconds}"
    ranks = "--devices", "cuda:0,cuda:0@0.5"
    needs = "pydantic", "optuna", "rich"
    return [
        Stage("concatenation against torch", bench("concat", *budget), 40),
        Stage("norms against torch", bench("norms", *budget), 40),
        Stage("messages beside work", bench("overlap", *ranks), 40, needs=needs),
        Stage("kernels against cuDNN", bench("kernels", *budget), float("inf")),
    ]


def in_parallel() -> tuple[str, ...]:
    """pytest's options for as many workers as leave a core free, where its plugin for
    that is installed.
    """
    workers = min(WORKERS, (os.cpu_count() or 1) - 1)
    if workers < 2 or importlib.util.find_spec("xdist") is None:
        return ()
    return "-n", str(workers), "--dist", "worksteal"


def performed(stage: Stage, left: float) -> Done:
    """Runs a stage within its limit and the seconds ``left``; prints its output as it comes."""
    said = f"python {' '.join(stage.command)}".replace(
        str(ROOT), "."
    )  # as in any checkout
    missing = [m for m in stage.needs if importlib.util.find_spec(m) is None]
    if missing:
        return Done(
            stage.name, "not run", 0.0, f"{', '.join(missing)} is not installed", said
        )
    limit = min(stage.limit, left - GRACE_S)
    if limit < 10:
        return Done(stage.name, "not run", 0.0, "no time was left", said)
    # What starts up or winds down takes time too: the stage's own budget ends before it
    # would be interrupted.
    command = [
        sys.executable,
        *(c.replace("{seconds}", f"{max(limit - 20, 5):.0f}") for c in stage.command),
    ]
    print(f"\n--- {stage.name}, at most {limit:.0f} s: {' '.join(command)}", flush=True)
    start = time.monotonic()
    status, in_time, lines = streamed(command, limit, os.environ | stage.env)
    last = next(
        (text for text in reversed(lines) if text and not text.startswith("{")), ""
    )
    outcome: Outcome = "passed" if status == 0 else "failed"
    if not in_time:
        outcome = "timed out"
    elif outcome == "passed" and not re.search(stage.expects, "\n".join(lines)):
        outcome, last = "not run", f"status 0, but nothing passed: {last}"
    return Done(
        stage.name, outcome, round(time.monotonic() - start, 1), last[:200], said
    )


def streamed(
    command: Sequence[str], limit: float, env: dict[str, str]
) -> tuple[int, bool, list[str]]:
    """(status, whether it ended in time, lines of output). What it started ends with it."""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=env,
        cwd=ROOT,
        start_new_session=True,
    ) as p:
        late = threading.Event()

        def interrupt() -> None:
            late.set()
            _signalled(
                p.pid, signal.SIGINT
            )  # so that pytest still says what it has found
            killer.start()

        killer = threading.Timer(GRACE_S, lambda: _signalled(p.pid, signal.SIGKILL))
        timer = threading.Timer(limit, interrupt)
        timer.start()
        lines = []
        try:
            assert p.stdout is not None
            for text in p.stdout:
                print(text, end="", flush=True)
                lines.append(text.rstrip())
            status = p.wait()
        finally:
            timer.cancel()
            killer.cancel()
            _signalled(p.pid, signal.SIGKILL)
    return status, not late.is_set(), lines


def _signalled(group: int, what: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, what)


def table(done: Sequence[Done]) -> str:
    rows = [f"{d.name:24} {d.outcome:10} {d.seconds:6.1f} s  {d.said}" for d in done]
    return "\n".join(["", *rows])
