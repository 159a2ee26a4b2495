"""Time what Python costs per operator of a split model, and per call of a kernel.

There is one rank, and tensors are so small that a step is all host time. The rest,
messages and computing, is the other benchmarks' business; so are the statistics and
gradients that several ranks add up, of which one has nothing to add. Calls of kernels
are timed up to the launch.
"""

from __future__ import annotations

import copy
import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.overhead import host_time
from bench.shared.machine import add_output_argument, commit, save, software
from bench.shared.verdict import Demand
from hetconv.autotune.launch.launcher import parse_devices, run_on
from hetconv.autotune.measure.paired_rounds import paired
from hetconv.autotune.models.inputs import ModelInputs
from hetconv.autotune.search.race import step_of
from hetconv.nn.parallelize import parallelize
from hetconv.planner.make_plan import make_plan
from hetconv.planner.partition import whole_model
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import Mode
from hetconv.sharding.split import SplitKind
from hetconv.tracing.tracer import capture

BLOCKS, ROUNDS, LIMIT_US = 30, 31, 12.0
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


class Concatenation(nn.Module):
    """Two operators: a concatenation, and a slice of it."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.cat([x, x], 1)[:, : x.shape[1]]
        return y


class Interpolation(nn.Module):
    """An interpolation to the same size."""

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(x, size=x.shape[2:], mode="bilinear")


OPERATORS: dict[str, Callable[[], nn.Module]] = {
    "group norm": partial(nn.GroupNorm, 2, 4),
    "batch norm": partial(nn.BatchNorm2d, 4),
    "concatenation": Concatenation,
    "interpolation": Interpolation,
    "1x1 convolution": partial(nn.Conv2d, 4, 4, 1),
}
"""Operators that are timed one by one, split by rows."""


def add_arguments(parser: ArgumentParser) -> None:
    add_output_argument(parser)


def run(args: Namespace) -> None:
    """Prints a line per kind of split and mode, what must hold, and the results as one
    JSON document last.
    """
    one_cpu = parse_devices("cpu")
    rows, calls = run_on(one_cpu, measure), run_on(one_cpu, host_time.measure)
    for r in rows:
        print(
            f"{r.get('operator', 'all'):16} {r['kind']:8} {r['mode']:6} {r['us']:7.1f} us an "
            f"operator more than plain ({r['plain_us']:.1f} us)"
        )
    for c in calls:
        print(f"{c['call']:34} {c['us']:7.1f} us of host time")
    worst = max(r["us"] for r in rows if r["mode"] == "infer" and "operator" not in r)
    limit = f"{LIMIT_US:g} us over what inference adds to an operator"
    demands = [Demand(limit, 1.0, LIMIT_US / worst), *host_time.demands(calls)]
    print("must hold:", *demands, sep="\n  ")
    setup = software() | commit()
    document = {"suite": "overhead", "setup": setup, "cases": rows, "calls": calls}
    if args.output is not None:
        save(args.output, document)
    print(json.dumps(document))


def measure() -> list[dict[str, Any]]:
    """On every rank: a row per kind and mode, then a row per operator and mode."""
    rows = [
        {"kind": kind, **row}
        for mode in MODES
        for kind, row in _more(Block, KINDS, mode).items()
    ]
    return rows + [
        {"kind": KINDS[0], "operator": name, **row}
        for name, make in OPERATORS.items()
        for mode in MODES
        for row in _more(make, KINDS[:1], mode).values()
    ]


def _more(
    block: Callable[[], nn.Module], kinds: Sequence[SplitKind], mode: Mode
) -> dict[SplitKind, dict[str, Any]]:
    """Returns, for each kind of split, what an operator of a model takes and how much
    more it does split.
    """
    torch.manual_seed(0)
    first = nn.Conv2d(3, 4, 3, padding=1)
    model = nn.Sequential(first, *(block() for _ in range(BLOCKS)))
    model.train(mode == "train")
    x = torch.randn(2, 3, 8, 8)
    graph = capture(model, x)
    plan = make_plan(graph, ClusterProfile.from_devices(["cpu"]))
    steps: dict[str, Callable[[], Any]] = {
        "plain": step_of(copy.deepcopy(model), ModelInputs.of(x), mode)
    }
    for kind in kinds:
        splits = whole_model(graph, kind, (1.0,), (kind,))
        split = parallelize(copy.deepcopy(model), plan.with_splits(splits))
        steps[kind] = step_of(split, ModelInputs.of(x), mode)
    times, count = paired(steps, ROUNDS, torch.device("cpu")), len(graph.nodes)

    def us(seconds: float) -> float:
        return round(seconds / count * 1e6, 2)

    return {
        kind: {
            "mode": mode,
            "us": us(_median_difference(times[kind], times["plain"])),
            "plain_us": us(median(times["plain"])),
        }
        for kind in kinds
    }


def _median_difference(a: Sequence[float], b: Sequence[float]) -> float:
    return median(x - y for x, y in zip(a, b, strict=True))
