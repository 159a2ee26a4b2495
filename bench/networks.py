"""Time networks of public libraries on two equal ranks, against half of each alone.

A network's bound is the plain model on half of the image, on both ranks at once: the
same work with no message and nothing repeated. Each is timed in both memory formats, of
which the faster one counts. All steps run in turn within each round,
so that a machine's drift falls on all alike; ratios are medians over rounds.
"""

from __future__ import annotations

import copy
import json
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.overlap import within
from bench.shared import selection
from bench.shared.machine import commit, now, save, software
from bench.shared.networks import NETWORKS, Network
from bench.shared.step_profile import profiled
from bench.shared.verdict import Demand, geomean
from hetconv.autotune.launch.launcher import parse_devices, run_on
from hetconv.autotune.measure.paired_rounds import paired
from hetconv.autotune.models.build import formatted, random_input
from hetconv.autotune.models.inputs import ModelInputs
from hetconv.autotune.search.race import step_of
from hetconv.comm.rank_group import all_gather_object, no_payload, rank_group_of
from hetconv.cost.estimator import StepEstimator
from hetconv.cost.memory import input_bytes, parameter_bytes
from hetconv.cost.memory_timeline import held_copies
from hetconv.nn.parallelize import parallelize
from hetconv.planner.make_plan import make_plan
from hetconv.planner.partition import Splits, whole_model
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import Mode
from hetconv.sharding.layout import spans
from hetconv.sharding.split import REPLICATE, SplitKind
from hetconv.tracing.graph import Graph
from hetconv.tracing.tracer import capture

DEVICES = "cpu,cpu"
MEMORY = ("", " channels last")
MODES: tuple[Mode, ...] = ("infer", "train")
ROUNDS = {"infer": 15, "train": 9}
# A step's time over its bound: of each network, and of their geometric mean.
LIMITS = {"infer": (1.25, 1.10), "train": (1.30, 1.15)}
# A rank's peak memory over that of the plain model.
MEMORY_LIMITS = {"infer": 0.65, "train": 0.7}
MEMORY_NETWORKS = ("MONAI SegResNet", "VAE decoder")
MEMORY_ERROR = 0.15

Step = Callable[[], Any]


def add_arguments(parser: ArgumentParser) -> None:
    selection.add_arguments(parser, "networks")


def run(args: Namespace) -> None:
    """Prints a line per network and mode, then what must hold, then one JSON document."""
    names = selection.chosen(NETWORKS, args.only)
    # What torch's profiler says of itself in every rank.
    os.environ |= {"KINETO_LOG_LEVEL": "9", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    rows: list[dict[str, Any]] = []
    for name in names:
        for row in run_on(parse_devices(DEVICES), measure, name):
            print(line(row), flush=True)
            rows.append(row)
    print("must hold:")
    for demand in demands(rows):
        print(f"  {demand}")
    document = {
        "suite": "networks",
        "date": now(),
        "devices": DEVICES.split(","),
        "rounds": ROUNDS,
        **software(),
        **commit(),
        "cases": rows,
    }
    if args.output is not None:
        save(args.output, document)
    print(json.dumps(document))


def line(r: dict[str, Any]) -> str:
    """Returns a row in words."""
    parts = ", ".join(
        f"{what} {r[f'{what}_ms']:.1f}" for what in ("messages", "python", "repeated")
    )
    return (
        f"{r['network']:24} {r['mode']:5} plain {r['plain_ms']:.0f} ms, bound "
        f"{r['bound_ms']:.1f}, split {r['split_ms']:.1f} ({parts}): "
        f"{r['vs_bound']:.2f} of the bound, {r['vs_plain']:.2f}x plain; memory "
        f"{r['plain_bytes'] / 1e6:.0f} MB plain, {max(r['rank_bytes']) / 1e6:.0f} a rank, "
        f"predicted {max(r['predicted_bytes']) / 1e6:.0f}"
    )


def demands(rows: Sequence[dict[str, Any]]) -> list[Demand]:
    """Returns what must hold of the rows."""
    found = []
    for mode in MODES:
        of_mode = [r for r in rows if r["mode"] == mode]
        if not of_mode:
            continue
        each, mean = LIMITS[mode]
        bounds = [r["vs_bound"] for r in of_mode]
        named = [r for r in of_mode if r["network"] in MEMORY_NETWORKS]
        share = max((max(r["rank_bytes"]) / r["plain_bytes"] for r in named), default=0)
        limit = MEMORY_LIMITS[mode]
        found += [
            Demand(
                f"{mode}: {each} over the worst step's bound", 1, each / max(bounds)
            ),
            Demand(
                f"{mode}: {mean} over the geometric mean of bounds",
                1,
                mean / (geomean(bounds) or 1),
            ),
            Demand(f"{mode}: worst gain", 1, min(r["vs_plain"] for r in of_mode)),
            Demand(
                f"{mode}: {limit} over the share of plain memory, large images",
                1,
                limit / share if share else None,
            ),
            Demand(
                f"{mode}: {MEMORY_ERROR:.0%} over the worst error of memory",
                1,
                MEMORY_ERROR / max(map(_memory_error, of_mode)),
            ),
        ]
    return found


def _memory_error(row: dict[str, Any]) -> float:
    """Returns the largest relative error of a rank's predicted peak."""
    pairs = zip(row["predicted_bytes"], row["rank_bytes"], strict=True)
    return max(abs(float(predicted / peak) - 1) for predicted, peak in pairs)


def measure(name: str) -> list[dict[str, Any]]:
    """Returns a row per mode; runs on every rank."""
    network = NETWORKS[name]
    torch.manual_seed(0)
    model = network.make()
    graph = capture(model, random_input(network.shape, 0))
    return [
        {"network": name, "mode": mode, **_measured(network, model, graph, mode)}
        for mode in MODES
    ]


def _measured(
    network: Network, model: nn.Module, graph: Graph, mode: Mode
) -> dict[str, Any]:
    group = rank_group_of()
    cluster = ClusterProfile.from_devices(["cpu"] * group.size, link="host")
    kind = network.kind
    splits = _even(graph, kind, group.size)
    steps = _steps(network, model.train(mode == "train"), graph, splits, mode)
    times = paired(steps, ROUNDS[mode], torch.device("cpu"))
    best = {what: _faster(what, times) for what in ("plain", "bound", "split")}
    plain, bound, split = (times[name] for name in best.values())
    silent = within(no_payload, steps[best["split"]])
    both = {"split": steps[best["split"]], "silent": silent}
    messages = paired(both, ROUNDS[mode], torch.device("cpu"))
    messages_s = _median(lambda a, b: a - b, messages["split"], messages["silent"])
    profiles = {name: profiled(steps[best[name]]) for name in ("bound", "split")}
    repeated_s = profiled(silent).operators_s - profiles["bound"].operators_s
    missed_s = _median(lambda a, b: a - b, split, bound)
    missed = {
        "messages": messages_s,
        "repeated": repeated_s,
        "python": missed_s - messages_s - repeated_s,
    }
    predicted = StepEstimator(graph, cluster, mode).estimate(splits)[0]
    return {
        "plain_ms": _ms(median(plain)),
        "bound_ms": _ms(median(bound)),
        "split_ms": _ms(median(split)),
        "vs_bound": round(_median(lambda a, b: a / b, split, bound), 3),
        "vs_plain": round(_median(lambda a, b: a / b, plain, split), 3),
        **{f"{what}_ms": _ms(seconds) for what, seconds in missed.items()},
        "memory_formats": best,
        "plain_bytes": _plain_peak(steps),
        "rank_bytes": all_gather_object(group, profiles["split"].peak_bytes),
        "predicted_bytes": _activations(graph, splits, mode, predicted.memory_bytes),
    }


def _even(graph: Graph, kind: SplitKind, world: int) -> Splits:
    """Splits every layer evenly; one with fewer rows than ranks is computed by all."""
    splits = whole_model(graph, kind, (1,) * world, (kind,))
    return {n: s if all(s.sizes) else REPLICATE for n, s in splits.items()}


def _steps(
    network: Network, model: nn.Module, graph: Graph, splits: Splits, mode: Mode
) -> dict[str, Step]:
    """Makes what is timed, by name.

    Rank 0 alone runs the plain model; all ranks run each other step.
    """
    group = rank_group_of()
    x, dim = random_input(network.shape, 0), 2
    lo, hi = spans((network.shape[dim] // group.size,) * group.size)[group.rank]
    half = x.narrow(dim, lo, hi - lo).contiguous()
    cluster = ClusterProfile.from_devices(["cpu"] * group.size, link="host")
    plan = make_plan(graph, cluster, mode=mode, kinds=(network.kind,))
    plan = plan.with_splits(splits)
    steps: dict[str, Step] = {}
    for suffix in MEMORY:
        for what, images in (("plain", x), ("bound", half), ("split", x)):
            made, inputs = copy.deepcopy(model), images
            if suffix:
                made, inputs = formatted(made, inputs, "channels_last")
            if what == "split":
                made = parallelize(made, plan)
            step = step_of(made, ModelInputs.of(inputs), mode)
            alone = what == "plain" and dist.get_rank() != 0
            steps[what + suffix] = (lambda: None) if alone else step
    return steps


def _faster(what: str, times: Mapping[str, Sequence[float]]) -> str:
    """Returns the name of a step in the memory format in which it is faster."""
    return min((what + suffix for suffix in MEMORY), key=lambda n: median(times[n]))


def _plain_peak(steps: dict[str, Step]) -> int:
    """Returns the least peak of the plain model in both memory formats; collective."""
    peaks = [profiled(steps[n]).peak_bytes for n in map("plain{}".format, MEMORY)]
    of_ranks: list[int] = all_gather_object(rank_group_of(), min(peaks))
    return of_ranks[0]


def _activations(
    graph: Graph, splits: Splits, mode: Mode, total: Sequence[int]
) -> list[int]:
    """Returns the predicted bytes without the model's inputs and parameters.

    Gradients of parameters count: a step makes them.
    """
    layers, world = (None, *graph.layers), len(total)
    held = [parameter_bytes(graph, splits, world, name) for name in layers]
    of_ranks = [sum(of_rank) for of_rank in zip(*held, strict=True)]
    fixed = [held_copies(mode) * n + input_bytes(graph) for n in of_ranks]
    return [int(n - f) for n, f in zip(total, fixed, strict=True)]


def _median(
    of: Callable[[float, float], float], a: Sequence[float], b: Sequence[float]
) -> float:
    return median(of(x, y) for x, y in zip(a, b, strict=True))


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)
