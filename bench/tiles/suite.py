"""Time tiles of convolutions beside cuDNN, or fit the predicted time to such a file."""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.kernels.processes import checks_in_processes
from bench.shared.machine import RESULTS, facts, need_cuda, save
from bench.shared.report import add_run_arguments
from hetconv.errors import KernelError
from hetconv.kernels.chip import chip_of
from hetconv.kernels.tiles import Pass

from .fit import Data, Models, fitted
from .measured import MeasuredPass, load, read, summary
from .study import candidates, row, studied

MEASURED = RESULTS / "nvidia-h100-80gb-hbm3" / "tiles.json"
HALVES = 3  # random halves of the passes that are fitted alone


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fit",
        type=Path,
        metavar="FILE",
        nargs="*",
        help="fit the constants to these result files (default: that of an H100); needs no "
        "GPU",
    )
    parser.add_argument(
        "--filter",
        metavar="REGEX",
        default="",
        help="only cases whose name matches somewhere",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep what the output file has, and leave it out",
    )
    add_run_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Measures tiles, or fits constants; prints what was found, one JSON document last.

    Raises:
        KernelError: There is no GPU, no such case, or the file to fit is of another suite.
    """
    if args.fit is None:
        document = measured_document(args)
    else:
        document = fit_document([p for f in args.fit or [MEASURED] for p in load(f)])
    if args.output is not None:
        save(args.output, document)
    print(json.dumps(document))


def measured_document(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the times of the tiles of each pass, saved after each.

    Raises:
        KernelError: There is no GPU, or no such case.
    """
    chosen = studied(args.filter)
    device = need_cuda("tiles")
    machine, start = facts(), time.monotonic()
    chip = chip_of(device)
    document: dict[str, Any] = {"suite": "tiles", **machine, "chip": asdict(chip)}
    document["weight_gradient_steps"] = "runs"
    document["rows"] = earlier(args.output, machine) if args.resume else []
    known = {(r["name"], r["pass"]) for r in document["rows"]}
    chosen = [(case, p) for case, p in chosen if (case.name, p) not in known]
    with checks_in_processes() as check:
        for case, what in chosen:
            if args.budget is not None and time.monotonic() > start + args.budget:
                document["stopped"] = f"after the budget of {args.budget:.0f} s"
                break
            tiles = candidates(case, what, chip)
            faults = check([(case, what, tile) for tile in tiles])
            found = row(case, what, tiles, faults, device, machine["l2_bytes"])
            document["rows"].append(found)
            print(line(found), flush=True)
            if args.output is not None:
                save(args.output, document)
    return document


def earlier(output: Path | None, machine: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of a file that was written before on such a machine.

    Args:
        output: The file.
        machine: What `facts` says of this machine.

    Raises:
        KernelError: No file is given, or it is of another machine or suite.
    """
    if output is None:
        raise KernelError("--resume keeps what a file has; give it with --output")
    if not output.exists():
        return []
    document = read(output)
    same = "device", "torch", "triton"
    if any(document[key] != machine[key] for key in same):
        raise KernelError(
            f"{output} is of {', '.join(document[key] for key in same)}, not of "
            f"{', '.join(machine[key] for key in same)}; give another --output"
        )
    rows: list[dict[str, Any]] = document["rows"]
    return rows


def line(row: dict[str, Any]) -> str:
    """Returns the fastest tile of a row beside cuDNN and the default one."""
    timed = {tile: v["us"] for tile, v in row["tiles"].items() if "us" in v}
    head = f"{row['name']:42} {row['pass']:15}"
    if not timed:
        return f"{head} none of {len(row['tiles'])} tiles ran"
    best = min(timed, key=lambda tile: timed[tile])
    first = next(iter(timed))
    return (
        f"{head} {best} {timed[best]:8.1f} us, {row['cudnn_us'] / timed[best]:.2f}x of cuDNN, "
        f"{timed[first] / timed[best]:.2f} by the default; {len(timed)} of "
        f"{len(row['tiles'])} ran"
    )


def fit_document(passes: list[MeasuredPass]) -> dict[str, Any]:
    """Returns the fitted constants and their regret, on all passes and on held-out ones."""
    models = fitted(passes)
    document: dict[str, Any] = {"suite": "tiles, fitted", "constants": asdict(models)}
    print_models(models)
    found = Data(passes).regrets(models)
    document["regret"] = summary(found)
    print_regrets("fitted to all passes", found)
    document["held_out"] = []
    for seed in range(HALVES):
        shuffled = random.Random(seed).sample(passes, len(passes))
        half = len(passes) // 2
        held = Data(shuffled[half:]).regrets(fitted(shuffled[:half]))
        document["held_out"].append(summary(held))
        print_regrets(f"passes that were held out, {seed + 1}", held)
    return document


def print_models(models: Models) -> None:
    """Prints the constants as `kernels.tiles.fitted_models` has them."""
    print(f"FORWARD = {models.other}")
    print(f"WEIGHT_GRADIENT = {models.weight_gradient}", flush=True)


def print_regrets(title: str, regrets: dict[Pass, list[float]]) -> None:
    """Prints a line per kind of pass."""
    print(f"{title}: the chosen tile's time, of the fastest one's")
    for what, found in summary(regrets).items():
        print(
            f"  {what:15} {found['geomean']:.3f} on average, {found['worst']:.2f} at worst, "
            f"{found['passes']} passes",
            flush=True,
        )
