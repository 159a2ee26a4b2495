"""Run all that needs a GPU, in minutes: tests and benchmarks as separate processes."""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.shared.machine import RESULTS, facts, need_cuda, results_file, save, slug
from hetconv.errors import KernelError

from .processes import performed
from .stages import NO_TIME, Done, Stage, stages

BUDGET_S = 230.0  # in all
REHEARSAL_S = 180.0  # of all stages together, without a GPU
ON_CPU = {"HETCONV_TEST_DEVICE": "cpu"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds",
        type=float,
        default=BUDGET_S,
        help="for all stages together (default: %(default)s)",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="leave out stages that passed in an earlier run, as its result file says",
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="try every stage without a GPU: collect tests, check launches",
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
    """Runs the stages one after the other.

    Raises:
        KernelError: There is no GPU, and this is no rehearsal.
        SystemExit: A stage failed or ran out of time; the status is 1.
    """
    start = time.monotonic()
    if args.rehearse:
        done = rehearsed(args.only)
    else:
        need_cuda("gpu")
        done = measured(args, start)
    print(table(done), flush=True)
    if any(d.outcome in ("failed", "timed out") for d in done):
        raise SystemExit(1)


def measured(args: argparse.Namespace, start: float) -> list[Done]:
    """Runs the stages on the GPU; the result file is written after each.

    Args:
        args: The command's arguments.
        start: When the command started, in `time.monotonic`'s seconds.
    """
    machine = facts()
    committed = RESULTS / slug(machine["device"])
    folder = Path(args.output) if args.output else committed
    folder.mkdir(parents=True, exist_ok=True)
    print(
        f"{machine['device']}, torch {machine['torch']}, triton {machine['triton']}: into {folder}",
        flush=True,
    )
    known = earlier((folder, committed)) if args.resume else {}
    done: list[Done] = []
    every = stages(folder)
    wanted = {stage.name for stage in chosen(every, args.only)}
    for stage in every:
        before = known.get(stage.name)
        if stage.name not in wanted:
            done += [before] if before is not None else []
        elif before is not None and before.outcome == "passed":
            done.append(before)
        else:
            left = args.seconds - (time.monotonic() - start)
            found = replace(performed(stage, left), commit=machine["commit"])
            done.append(before if before and found.said == NO_TIME else found)
        document = {"suite": "gpu", **machine, "stages": [asdict(d) for d in done]}
        save(results_file(folder, "gpu"), document)
    return done


def rehearsed(only: str) -> list[Done]:
    """Tries the stages without a GPU, within `REHEARSAL_S`.

    Args:
        only: Regular expression that names match.
    """
    start, done = time.monotonic(), []
    for stage in chosen(stages(RESULTS / "rehearsal"), only):
        left = REHEARSAL_S - (time.monotonic() - start)
        trial = Stage(stage.name, stage.rehearsal, left, ON_CPU, stage.needs)
        done.append(performed(trial, left))
    return done


def chosen(found: Sequence[Stage], only: str) -> list[Stage]:
    """Returns the stages whose name a regular expression matches somewhere.

    Raises:
        KernelError: It matches none, or is no regular expression.
    """
    try:
        matching = [stage for stage in found if re.search(only, stage.name)]
    except re.error as e:
        raise KernelError(f"--only {only!r} is no regular expression: {e}") from e
    if not matching:
        names = ", ".join(repr(stage.name) for stage in found)
        raise KernelError(f"no stage matches --only {only!r}; there are {names}")
    return matching


def earlier(folders: Sequence[Path]) -> dict[str, Done]:
    """Returns what came of stages in an earlier run, by name.

    Args:
        folders: Folders of result files; the first that has one counts.
    """
    for folder in folders:
        file = results_file(folder, "gpu")
        if file.exists():
            rows: list[dict[str, Any]] = json.loads(file.read_text())["stages"]
            return {row["name"]: Done(**row) for row in rows}
    return {}


def table(done: Sequence[Done]) -> str:
    """Returns a line for each stage."""
    rows = [f"{d.name:36} {d.outcome:10} {d.seconds:6.1f} s  {d.said}" for d in done]
    return "\n".join(["", *rows])
