"""Time tiles of convolutions beside cuDNN, or fit the predicted time to such a file."""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.shared.machine import RESULTS, save
from hetconv.kernels.tiles import Pass

from .fit import Data, Models, fitted
from .measured import MeasuredPass, load, summary

MEASURED = RESULTS / "nvidia-h100-80gb-hbm3" / "tiles.json"
HALVES = 3  # random halves of the passes that are fitted alone


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fit",
        type=Path,
        metavar="FILE",
        nargs="?",
        const=MEASURED,
        help="fit the constants to this result file (default: the committed one of an H100); "
        "needs no GPU",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="also write the results here"
    )


def run(args: argparse.Namespace) -> None:
    """Prints the constants, how far the default tile is off, and one JSON document last."""
    document = fit_document(load(args.fit))
    if args.output is not None:
        save(args.output, document)
    print(json.dumps(document))


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
