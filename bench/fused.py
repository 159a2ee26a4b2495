"""What folding what follows a convolution into it gains in inference: the same split with and without, in turn.

Norms, residuals and activations are then no passes of their own over what convolutions compute, and Python folds them
at each call. It is done here also on devices where ``fuse=True`` leaves it out, to see whether it should.
"""

from __future__ import annotations

import copy
import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.autotune import CASES, Case
from bench.machine import commit, save, software
from bench.verdict import Demand
from hetconv.autotune.inputs import ModelInputs
from hetconv.autotune.launch import parse_devices, run_on
from hetconv.autotune.models import build_model, channels_last, random_input
from hetconv.autotune.race import step_of
from hetconv.autotune.rounds import paired
from hetconv.emulate import DeviceName
from hetconv.ops.waiting import fold_anywhere, folding_pays
from hetconv.parallel import parallelize
from hetconv.planner import make_plan
from hetconv.profile import ClusterProfile
from hetconv.proportions import whole_model
from hetconv.recorder import capture
from hetconv.rules import SplitKind
from hetconv.transport import team_of

KINDS: tuple[SplitKind, ...] = ("height", "filter")
WAYS = {"without": False, "folded": True}
ROUNDS, ROUNDS_S = 21, 4.0  # of both steps: at least so many, and so long
LEAST = 0.98  # of the speed without it, that must be left everywhere: less is no noise


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--devices", default="cpu,cpu", help="one per rank (default: %(default)s)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="also write the results here")


def run(args: Namespace) -> None:
    """Prints a line per network and kind of split, what must hold, and the results as one JSON document last."""
    devices, rows = parse_devices(args.devices), list[dict[str, Any]]()
    for case in CASES:
        for row in run_on(devices, measure, tuple(devices), case):
            ms = f"{row['folded_ms']:7.2f} ms, {row['without_ms']:7.2f} ms without"
            print(f"{row['model']:16} {row['kind']:6} {ms}: {row['ratio']:.2f}x", flush=True)
            rows.append(row)
    least = min((row["ratio"] for row in rows if row["folds"]), default=None)
    print(f"must hold:\n  {Demand('folding against not folding, where fuse=True folds', LEAST, least)}")
    document = {"suite": "fused", "setup": software() | commit() | {"devices": [*map(str, devices)]}, "cases": rows}
    if args.output is not None:
        save(args.output, document)
    print(json.dumps(document))


def measure(devices: tuple[DeviceName, ...], case: Case) -> list[dict[str, Any]]:
    """On every rank: a row per kind of split, even, with milliseconds and how many times as fast a folded step is.

    ``folds``: whether ``fuse=True`` folds by itself on these devices.
    """
    team, rows = team_of(), list[dict[str, Any]]()
    device = torch.device(devices[team.rank].device)
    model, x = channels_last(build_model(case.model, case.arguments, 0), random_input(case.input, 0))
    model, x = model.to(device).eval(), x.to(device)
    graph, even = capture(model, x), (1,) * team.size
    plan = make_plan(graph, ClusterProfile.from_devices(["cpu"] * team.size, link="host"), mode="infer")
    folds = folding_pays(team)
    for kind in KINDS:
        cut = plan.with_splits(whole_model(graph, kind, even, (kind,)))  # its seconds are nobody's
        with fold_anywhere():
            ways = {name: parallelize(copy.deepcopy(model), cut, fuse=fuse) for name, fuse in WAYS.items()}
        steps = {name: step_of(way, ModelInputs.of(x), "infer") for name, way in ways.items()}
        times = paired(steps, ROUNDS, device, ROUNDS_S)
        ratio = median(a / b for a, b in zip(times["without"], times["folded"], strict=True))
        ms = {f"{name}_ms": round(median(seconds) * 1e3, 3) for name, seconds in times.items()}
        rows.append({"model": case.name, "kind": kind, "folds": folds} | ms | {"ratio": round(ratio, 4)})
    return rows
