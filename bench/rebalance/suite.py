"""Slow one of two equal ranks while it trains, with and without a rebalancer."""

from __future__ import annotations

import json
import platform
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.shared.machine import add_output_argument, commit, now, output_path, save
from hetconv.autotune.launch.launcher import parse_devices, run_on

from .scenarios import SLOW_SPEED, Schedule, measure

QUIET_STEPS, PAIRED_STEPS = 500, 60
SETTLED = 1.15
"""A plan has followed the devices once its step is at most so many times the tuned plan's."""
NEIGHBOURS = 5  # steps whose median counts as one
SECONDS_DIGITS = 5


def add_arguments(parser: ArgumentParser) -> None:
    add_output_argument(parser)
    parser.add_argument(
        "--picture",
        type=_picture,
        metavar="FILE",
        help="also draw the seconds of all steps, as PNG or SVG",
    )


def _picture(text: str) -> Path:
    path = output_path(text)
    if path.suffix not in (".png", ".svg"):
        raise ArgumentTypeError(f"{text}: name a file that ends in .png or .svg")
    return path


def run(args: Namespace) -> None:
    """Prints a line per scenario, and the results as one JSON document last."""
    schedule = Schedule()
    devices = parse_devices("cpu,cpu")
    found = run_on(devices, measure, schedule, QUIET_STEPS, PAIRED_STEPS)
    quiet = {name: found.pop(name) for name in ("quiet", "example")}
    results: dict[str, Any] = {
        name: followed(of, schedule) for name, of in found.items()
    } | {name: stayed(of) for name, of in quiet.items()}
    for name, figures in results.items():
        told = ", ".join(
            f"{key} {value}" for key, value in figures.items() if key != "decisions"
        )
        print(f"{name}: {told}", flush=True)
    if args.picture is not None:
        from .picture import draw

        draw(found, schedule, args.picture)
    if args.output is not None:
        save(args.output, _document(results, found | quiet))
    print(json.dumps(results))


def followed(course: dict[str, Any], schedule: Schedule) -> dict[str, Any]:
    """Returns the figures of one scenario, from the seconds of its steps."""
    start, end = schedule.slow_from, schedule.slow_until
    fixed, moved, tuned = (
        course[f"{name}_s"] for name in ("fixed", "rebalanced", "tuned")
    )
    control, late = course["control_s"], slice((start + end) // 2, end)
    over_tuned = [a / b for a, b in zip(moved, tuned, strict=True)]
    over_fixed = [a / b for a, b in zip(moved, fixed, strict=True)]
    recovered = slice(end + (schedule.steps - end) // 2, schedule.steps)
    moves = [d for d in course["decisions"] if d["action"] != "keep"]
    ms = {
        "before_ms": fixed[start // 2 : start],
        "fixed_ms": fixed[late],
        "rebalanced_ms": moved[late],
        "tuned_ms": tuned[late],
        "after_ms": moved[recovered],
    }
    return {
        **{name: round(median(of) * 1e3, 1) for name, of in ms.items()},
        "over_tuned": round(median(over_tuned[late]), 3),
        "steps_to_follow": steps_to_follow(over_tuned[start:end]),
        "over_fixed_after": round(median(over_fixed[recovered]), 3),
        "net_gain": round(
            sum(fixed[:end]) / (sum(moved[:end]) + sum(control[:end])), 3
        ),
        "moves": len(moves),
        "migration_s": round(sum(d["migration_s"] for d in moves), 3),
        "control_s": round(sum(control), 3),
        "decisions": course["decisions"],
    }


def stayed(quiet: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures of a run in which no device changes."""
    pairs = zip(quiet["controlled_s"], quiet["plain_s"], strict=True)
    return {
        "steps": len(quiet["plain_s"]),
        "plain_ms": round(median(quiet["plain_s"]) * 1e3, 1),
        "moves": sum(d["action"] != "keep" for d in quiet["decisions"]),
        "controlled_over_plain": round(median(a / b for a, b in pairs), 4),
        "decisions": quiet["decisions"],
    }


def steps_to_follow(over_tuned: Sequence[float]) -> int | None:
    """Returns the step from which on the plan keeps up with the tuned one; None for never."""
    for n in range(len(over_tuned) - NEIGHBOURS + 1):
        if median(over_tuned[n : n + NEIGHBOURS]) <= SETTLED:
            return n
    return None


def _document(results: dict[str, Any], courses: dict[str, Any]) -> dict[str, Any]:
    steps = {
        name: {key: _rounded(of) for key, of in course.items() if key != "decisions"}
        for name, course in courses.items()
    }
    setup = {
        "devices": ["cpu", "cpu"],
        "slow_speed": SLOW_SPEED,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "date": now(),
        **commit(),
    }
    return {"suite": "rebalance", "setup": setup, **results, "steps": steps}


def _rounded(seconds: Any) -> Any:
    if isinstance(seconds, float):
        return round(seconds, SECONDS_DIGITS)
    return [_rounded(s) for s in seconds]
