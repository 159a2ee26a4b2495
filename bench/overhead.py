"""Time what Python costs per operator of a split model, on one rank.

Tensors are so small that a step is all host time. The rest, messages and computing, is
the other benchmarks' business; so are the statistics and gradients that several ranks
add up, of which one has nothing to add.
"""

from __future__ import annotations

import copy
import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from bench.shared.machine import commit, save, software
from bench.shared.verdict import Demand
from hetconv.autotune.launch.launcher import parse_devices, run_on
from hetconv.autotune.measure.model_inputs import ModelInputs
from hetconv.autotune.measure.paired_rounds import paired
from hetconv.autotune.search.race import step_of
from hetconv.nn.parallelize import parallelize
from hetconv.planner.make_plan import make_plan
from hetconv.planner.partition import whole_model
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import Mode
from hetconv.sharding.split import SplitKind
from hetconv.tracing.tracer import capture

BLOCKS, ROUNDS, LIMIT_US = 30, 31, 15.0
KINDS: tuple[SplitKind, ...] = ("height", "filter", "sample")
MODES: tuple[Mode, ...] = ("infer", "train")


class Block(nn.Module):
    """relu(norm(conv(x))) + x: four operators."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.relu(self.norm(self.conv(x))) + x
        return y


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="also write the results here"
    )


def run(args: Namespace) -> None:
    """Prints a line per kind of split and mode, what must hold, and the results as one
    JSON document last.
    """
    rows = run_on(parse_devices("cpu"), measure)
    for r in rows:
        print(
            f"{r['kind']:8} {r['mode']:6} {r['us']:7.1f} us an operator more than plain "
            f"({r['plain_us']:.1f} us)"
        )
    worst = max(r["us"] for r in rows if r["mode"] == "infer")
    limit = f"{LIMIT_US:g} us over what inference adds to an operator"
    print(f"must hold:\n  {Demand(limit, 1.0, LIMIT_US / worst)}")
    document = {"suite": "overhead", "setup": software() | commit(), "cases": rows}
    if args.output is not None:
        save(args.output, document)
    print(json.dumps(document))


def measure() -> list[dict[str, Any]]:
    """On every rank: a row per kind and mode."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), *(Block() for _ in range(BLOCKS))
    )
    x, rows = torch.randn(2, 3, 8, 8), []
    graph = capture(model, x)
    plan = make_plan(graph, ClusterProfile.from_devices(["cpu"]))
    for mode in MODES:
        plain = copy.deepcopy(model).train(mode == "train")
        steps: dict[str, Callable[[], Any]] = {
            "plain": step_of(plain, ModelInputs.of(x), mode)
        }
        for kind in KINDS:
            split = parallelize(
                copy.deepcopy(plain),
                plan.with_splits(whole_model(graph, kind, (1.0,), (kind,))),
            )
            steps[kind] = step_of(split, ModelInputs.of(x), mode)
        times = paired(steps, ROUNDS, torch.device("cpu"))
        own = median(times["plain"]) / len(graph.nodes) * 1e6
        for kind in KINDS:
            more = (
                median(a - b for a, b in zip(times[kind], times["plain"], strict=True))
                / len(graph.nodes)
                * 1e6
            )
            rows.append(
                {
                    "kind": kind,
                    "mode": mode,
                    "us": round(more, 2),
                    "plain_us": round(own, 2),
                }
            )
    return rows
