"""The stages of `bench gpu`, in order of what decides most."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bench.shared.machine import ROOT, results_file

PASSED = r"\b\d+ passed"
NO_TIME = "no time was left"
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
OF_TRITON = "tests/kernels/triton/test_"
OF_RANKS = "tests/devices/test_gpu.py"
MODEL = ("pydantic",)
GENERATED = (*MODEL, "hypothesis")

Outcome = Literal["passed", "failed", "timed out", "not run"]


@dataclass(frozen=True)
class Stage:
    """A command with a limit.

    It passed if it ended with status 0 and its output has ``expects`` in it.

    Attributes:
        name: Name in results and on the command line.
        command: Arguments of Python; ``{seconds}`` is what a benchmark may take.
        limit: Seconds, at most.
        env: Environment variables that it is given.
        needs: Modules without which it is not run.
        expects: Regular expression.
        rehearsal: Arguments of Python that try the stage without a GPU.
    """

    name: str
    command: tuple[str, ...]
    limit: float
    env: dict[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    expects: str = ""
    rehearsal: tuple[str, ...] = ()


@dataclass(frozen=True)
class Done:
    """What came of a stage.

    Attributes:
        name: The stage.
        outcome: What came of it.
        seconds: Its time.
        said: The last line of its output, or why it was not run.
        command: What was run.
        commit: Commit that it was run at, if known.
    """

    name: str
    outcome: Outcome
    seconds: float
    said: str
    command: str
    commit: str | None = None


def stages(folder: Path) -> list[Stage]:
    """Returns all stages.

    Args:
        folder: Where benchmarks write their results.
    """
    return [*right(), *fast(folder), *right_in_breadth(), study(folder)]


def right() -> list[Stage]:
    """Returns stages that tell whether kernels, messages and models are right."""
    kernels = (
        *(
            f"{OF_TRITON}{name}.py"
            for name in (
                "conv2d",
                "conv2d_tiles",
                "composite_tiles",
                "strided_tensors",
                "concat",
                "concat_launches",
                "norms",
                "pack",
                "conv2d_parts",
            )
        ),
        *(
            f"tests/kernels/test_{name}.py"
            for name in ("epilogue", "conv2d_op", "concat_calls", "packing")
        ),
    )
    needs = "pytest", "hypothesis"
    return [
        pytest_stage("kernels", 210, "--maxfail=10", *kernels, needs=needs),
        pytest_stage(
            "messages over NCCL", 30, OF_RANKS, "-k", "nccl and messages", alone=True
        ),
        pytest_stage(
            "model over NCCL",
            30,
            OF_RANKS,
            "-k",
            "nccl and model",
            needs=MODEL,
            alone=True,
        ),
        pytest_stage("two ranks over gloo", 80, OF_RANKS, "-k", "gloo", needs=MODEL),
        pytest_stage("norms on ranks", 60, "tests/ops/norms", needs=GENERATED),
    ]


def right_in_breadth() -> list[Stage]:
    """Returns stages of programs, laws and operators on ranks."""
    names = "pooling", "random", "einsum"
    operators = (
        "tests/operators/test_functions_on_shards.py",
        "tests/measure/test_sampling.py",
        *(f"tests/ops/test_{name}.py" for name in names),
    )
    programs = (*GENERATED, "timm", "torchvision")
    return [
        pytest_stage("programs on ranks", 150, "tests/programs", needs=programs),
        pytest_stage("laws on ranks", 100, "tests/laws", needs=GENERATED),
        pytest_stage("operators on ranks", 100, *operators, needs=GENERATED),
    ]


def fast(folder: Path) -> list[Stage]:
    """Returns the benchmarks.

    Args:
        folder: Where they write their results.
    """
    budget = "--budget", "{seconds}"
    ranks = "--devices", "cuda:0,cuda:0@0.5"
    needs = "pydantic", "optuna", "rich"
    return [
        bench_stage("kernels against cuDNN", 90, folder, "kernels", *budget),
        bench_stage("concatenation against torch", 40, folder, "concat", *budget),
        bench_stage("norms against torch", 40, folder, "norms", *budget),
        Stage(
            "a network on one rank against plain",
            ("-m", "bench", "one-rank", "-o", str(results_file(folder, "one-rank"))),
            60,
            needs=("pydantic", "torchvision"),
            rehearsal=("-m", "bench", "one-rank", "--rehearse"),
        ),
        Stage(
            "messages beside work",
            (
                *("-m", "bench", "overlap", "--quick", *ranks),
                *("-o", str(results_file(folder, "overlap"))),
            ),
            40,
            needs=needs,
            rehearsal=("-m", "bench", "overlap", "--quick"),
        ),
    ]


def study(folder: Path) -> Stage:
    """Returns the study of tiles, which takes what time is left."""
    output = str(results_file(folder, "tiles"))
    command = ("-m", "bench", "tiles", "--budget", "{seconds}", "-o", output)
    rehearsal = ("-m", "bench.gpu.rehearsal", "tiles")
    return Stage("tiles beside cuDNN", command, float("inf"), rehearsal=rehearsal)


def bench_stage(
    name: str, limit: float, folder: Path, suite: str, *options: str
) -> Stage:
    """Returns a benchmark of kernels, whose rehearsal records its launches.

    Args:
        name: Name of the stage.
        limit: Seconds, at most.
        folder: Where it writes its results.
        suite: Name of the benchmark.
        options: Its arguments.
    """
    output = str(results_file(folder, suite))
    command = ("-m", "bench", suite, "--quick", *options, "-o", output)
    rehearsal = ("-m", "bench.gpu.rehearsal", suite)
    return Stage(name, command, limit, rehearsal=rehearsal)


def pytest_stage(
    name: str,
    limit: float,
    *arguments: str,
    needs: tuple[str, ...] = (),
    alone: bool = False,
) -> Stage:
    """Returns a run of pytest on the device, whose rehearsal collects its tests.

    Args:
        name: Name of the stage.
        limit: Seconds, at most.
        arguments: Files, and options of pytest.
        needs: Modules without which it is not run.
        alone: Whether one test runs after the other.
    """
    workers = () if alone else in_parallel()
    command = (*PYTEST, *workers, *arguments)
    rehearsal = (*PYTEST, "--collect-only", *arguments)
    return Stage(name, command, limit, ON_DEVICE, needs, PASSED, rehearsal)


def in_parallel() -> tuple[str, ...]:
    """Returns pytest's options for as many workers as leave a core free.

    There are none where its plugin for that is missing.
    """
    workers = min(WORKERS, (os.cpu_count() or 1) - 1)
    if workers < 2 or importlib.util.find_spec("xdist") is None:
        return ()
    return "-n", str(workers), "--dist", "worksteal"
