"""Time a network split on one rank of a GPU against plain, eager and in graphs.

One rank has all parts and sends nothing, so that what a split costs beside its messages
is left: Python, copies, and other kernels.
"""

from __future__ import annotations

import copy
import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from bench.shared.machine import add_output_argument, commit, facts, need_cuda, save
from bench.shared.models import torchvision_model
from hetconv.autotune.launch.launcher import parse_devices, run_on
from hetconv.autotune.measure.paired_rounds import paired
from hetconv.autotune.models.inputs import ModelInputs
from hetconv.autotune.search.race import step_of
from hetconv.nn.parallelize import parallelize
from hetconv.planner.make_plan import make_plan
from hetconv.planner.partition import whole_model
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import Mode, Plan
from hetconv.sharding.split import SplitKind
from hetconv.tracing.tracer import capture

KINDS: tuple[SplitKind, ...] = ("height", "filter", "sample")
MODES: tuple[Mode, ...] = ("infer", "train")
NETWORK, SAMPLES, SIDE, ROUNDS, WARM_UP = "resnet50", 32, 224, 15, 4
TINY = ("resnet18", 2, 64, 1, 1)  # of a rehearsal, likewise


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="a tiny network once on the CPU, without graphs",
    )
    add_output_argument(parser)


def run(args: Namespace) -> None:
    """Prints a line per mode and variant, and the results as one JSON document last.

    Raises:
        KernelError: There is no GPU, and this is no rehearsal.
    """
    device = "cpu" if args.rehearse else str(need_cuda("one-rank"))
    setup = commit() if args.rehearse else facts()
    rows = run_on(parse_devices(device), measure, args.rehearse)
    for row in rows:
        print(
            f"{row['mode']:6} {row['variant']:24} {row['ms']:8.2f} ms, "
            f"{row['of_plain']:.2f} of plain"
        )
    document = {"suite": "one-rank", **setup, "cases": rows}
    if args.output is not None:
        save(args.output, document)
    print(json.dumps(document))


def measure(rehearse: bool) -> list[dict[str, Any]]:
    """Returns a row per mode and variant, on the only rank.

    Args:
        rehearse: Whether a tiny network runs once on the CPU.
    """
    device = torch.device("cpu" if rehearse else "cuda:0")
    return [row for mode in MODES for row in _rows(mode, device)]


def _rows(mode: Mode, device: torch.device) -> list[dict[str, Any]]:
    rehearse = device.type == "cpu"
    name, samples, side, rounds, warm_up = (
        TINY if rehearse else (NETWORK, SAMPLES, SIDE, ROUNDS, WARM_UP)
    )
    model, x = _network(name, samples, side, mode, device)
    steps = _steps(model, x, mode, with_graphs=not rehearse)
    for _ in range(warm_up):  # compiles, and captures what is captured after two steps
        for step in steps.values():
            step()
    times = paired(steps, rounds, device)
    plain = times["plain"]
    return [
        {
            "network": f"{name} N{samples}",
            "mode": mode,
            "variant": variant,
            "ms": round(median(found) * 1e3, 3),
            "of_plain": round(
                median(a / b for a, b in zip(found, plain, strict=True)), 3
            ),
        }
        for variant, found in times.items()
    ]


def _network(
    name: str, samples: int, side: int, mode: Mode, device: torch.device
) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    memory = {"memory_format": torch.channels_last}
    model = torchvision_model(name).to(device, torch.bfloat16, **memory)  # type: ignore[call-overload]
    x = torch.randn(samples, 3, side, side).to(device, torch.bfloat16, **memory)  # type: ignore[call-overload]
    return model.train(mode == "train"), x


def _steps(
    model: nn.Module, x: Tensor, mode: Mode, with_graphs: bool
) -> dict[str, Callable[[], Any]]:
    inputs, plan = ModelInputs.of(x), _plan(model, x)
    steps: dict[str, Callable[[], Any]] = {"plain": step_of(model, inputs, mode)}
    if with_graphs and mode == "infer":
        steps["plain, graph"] = _captured(steps["plain"])
    for kind in KINDS:
        splits = whole_model(capture(model, x), kind, (1.0,), (kind,))
        for graphs in (False, True)[: 1 + with_graphs]:
            split = parallelize(
                copy.deepcopy(model), plan.with_splits(splits), graphs=graphs
            )
            suffix = ", graphs" if graphs else ""
            steps[f"{kind}{suffix}"] = step_of(split, inputs, mode)
    return steps


def _plan(model: nn.Module, x: Tensor) -> Plan:
    return make_plan(capture(model, x), ClusterProfile.from_devices(["cpu"]))


def _captured(step: Callable[[], Any]) -> Callable[[], Any]:
    """A step in one CUDA graph."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    replay: Callable[[], Any] = graph.replay
    return replay
