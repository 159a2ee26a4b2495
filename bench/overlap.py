"""Time messages that overlap with computation against messages that are waited for.

Halos and buckets are timed through torch's backend too, which carries nothing between
CPUs of one host otherwise.

``halo``: a residual stack cut by height, inference and training. ``buckets`` of weight
gradients: a stack of more weights, cut by sample. ``chunks``: convolutions of a batch,
cut by filter and gathered, in one piece and in chunks. All run in turn within each
round; ratios are medians over rounds.
"""

from __future__ import annotations

import copy
import json
import platform
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass, replace
from statistics import median
from typing import Any

import torch

from bench.shared.machine import add_output_argument, commit, save
from bench.shared.models import Stack, stack
from hetconv.autotune.launch.launcher import parse_devices, run_on
from hetconv.autotune.measure.overlap import gathering
from hetconv.autotune.measure.paired_rounds import paired
from hetconv.autotune.models.build import formatted, random_input
from hetconv.autotune.models.inputs import ModelInputs
from hetconv.autotune.search.race import step_of
from hetconv.comm.rank_group import blocking, rank_group_of, through_backend
from hetconv.kernels import fastest_format
from hetconv.nn.parallelize import parallelize
from hetconv.planner.make_plan import make_plan
from hetconv.planner.partition import whole_model
from hetconv.runtime.throttle import DeviceName
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import Mode
from hetconv.sharding.conv_spec import ConvSpec
from hetconv.sharding.layout import apportion
from hetconv.sharding.split import Split, SplitKind
from hetconv.tracing.tracer import capture

MODES: tuple[Mode, Mode] = ("infer", "train")
CHUNKS = (2, 4)
BATCH, WEIGHTY = 6, Stack(6, 256, 14)


@dataclass(frozen=True)
class Gathered:
    """A 3x3 convolution of a batch of square images."""

    samples: int
    channels: int
    size: int
    filters: int

    @property
    def spec(self) -> ConvSpec:
        n, c, s, k = astuple(self)
        return ConvSpec(n, c, (s, s), k, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))

    def __str__(self) -> str:
        return f"{self.samples}x{self.channels}x{self.size}x{self.size} by {self.filters} filters"


GATHERED = (
    Gathered(8, 64, 56, 64),
    Gathered(8, 128, 28, 256),
    Gathered(8, 32, 112, 64),
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--devices", default="cpu,cpu@0.5", help="one per rank (default: %(default)s)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer and smaller problems, fewer rounds"
    )
    add_output_argument(parser)


def run(args: Namespace) -> None:
    """Prints a line per case, and the results as one JSON document last."""
    devices = parse_devices(args.devices)
    setup, rows = run_on(devices, measure, tuple(devices), args.quick)
    print(f"on {', '.join(map(str, devices))}, over {setup['backend']}")
    for row in rows:
        print(
            f"{row['case']:40} {row['how']:9} {row['ms']:8.2f} ms, in turn "
            f"{row['in_turn_ms']:8.2f}",
            end="",
        )
        print(f": {row['gain']:.3f}x", end="")
        more = {"of_one_piece": "of one piece", "of_backend": "of the backend"}
        print(
            *(f", {row[key]:.3f}x {what}" for key, what in more.items() if key in row),
            sep="",
        )
    document = {"suite": "overlap", "setup": setup | commit(), "cases": rows}
    if args.output is not None:
        save(args.output, document)
    print(json.dumps(document))


def measure(
    devices: tuple[DeviceName, ...], quick: bool
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """On every rank: (where and with what this ran, a row per case)."""
    group = rank_group_of()
    device = torch.device(devices[group.rank].device)
    weights = tuple(d.speed for d in devices)
    rounds = 5 if quick else 15
    layers = Stack(2, 64, 128) if quick else Stack()
    rows = [
        row for mode in MODES for row in halo(layers, mode, weights, device, rounds)
    ]
    rows += buckets(Stack(2, 64, 14) if quick else WEIGHTY, weights, device, rounds)
    for case in GATHERED[:1] if quick else GATHERED:
        rows += chunks(case, weights, device, rounds)
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.machine()
    )
    setup = {
        "devices": [str(d) for d in devices],
        "backend": group.backend,
        "machine": name,
        "rounds": rounds,
    }
    return setup | {
        "torch": torch.__version__,
        "python": platform.python_version(),
    }, rows


def within(
    context: Callable[[], AbstractContextManager[None]], step: Callable[[], Any]
) -> Callable[[], None]:
    """The same step in such a context."""

    def run() -> None:
        with context():
            step()

    return run


def halo(
    case: Stack, mode: Mode, weights: Sequence[float], device: torch.device, rounds: int
) -> list[dict[str, Any]]:
    times = _every_way(case, 1, "height", mode, weights, device, rounds)
    return [
        _row(
            f"halo, {case.blocks} blocks of {case.channels} @{case.size}", mode, *times
        )
    ]


def buckets(
    case: Stack, weights: Sequence[float], device: torch.device, rounds: int
) -> list[dict[str, Any]]:
    times = _every_way(case, BATCH, "sample", "train", weights, device, rounds)
    return [
        _row(
            f"buckets, {case.blocks} blocks of {case.channels} @{case.size}",
            "train",
            *times,
        )
    ]


def _every_way(
    case: Stack,
    samples: int,
    kind: SplitKind,
    mode: Mode,
    weights: Sequence[float],
    device: torch.device,
    rounds: int,
) -> tuple[list[float], list[float], list[float]]:
    """Seconds of a step of a stack that is cut one way: messages under way, waited for,
    and carried by the backend.
    """
    torch.manual_seed(0)
    model, x = formatted(
        stack(case.blocks, case.channels),
        random_input((samples, 3, case.size, case.size), 0),
        fastest_format(device),
    )
    model, x = model.to(device).train(mode == "train"), x.to(device)
    graph = capture(model, x)
    world = len(weights)
    plan = make_plan(
        graph,
        ClusterProfile.from_devices(["cpu"] * world, link="host"),
        mode=mode,
        kinds=(kind,),
    )
    split = parallelize(
        copy.deepcopy(model),
        plan.with_splits(whole_model(graph, kind, weights, (kind,))),
    )
    step = step_of(split, ModelInputs.of(x), mode)
    ways = {
        "on": step,
        "off": within(blocking, step),
        "backend": within(through_backend, step),
    }
    times = paired(ways, rounds, device)
    return times["on"], times["off"], times["backend"]


def chunks(
    case: Gathered, weights: Sequence[float], device: torch.device, rounds: int
) -> list[dict[str, Any]]:
    split = Split("filter", apportion(case.filters, tuple(weights), 16))
    spec = replace(case.spec, dtype="float32" if device.type == "cpu" else "float16")
    memory_format = fastest_format(device)
    steps: dict[str, Callable[[], Any]] = {
        "1": gathering(spec, split, device, 1, memory_format)
    }
    for n in CHUNKS:
        steps[str(n)] = gathering(spec, split, device, n, memory_format)
        steps[f"{n} in turn"] = within(blocking, steps[str(n)])
    times = paired(steps, rounds, device)
    one = times["1"]
    return [
        _row(f"chunks, {case}", f"{n} chunks", times[str(n)], times[f"{n} in turn"])
        | {"one_piece_ms": _ms(one), "of_one_piece": _gain(times[str(n)], one)}
        for n in CHUNKS
    ]


def _row(
    case: str,
    how: str,
    on: Sequence[float],
    off: Sequence[float],
    backend: Sequence[float] = (),
) -> dict[str, Any]:
    row = {
        "case": case,
        "how": how,
        "ms": _ms(on),
        "in_turn_ms": _ms(off),
        "gain": _gain(on, off),
    }
    return row | (
        {"backend_ms": _ms(backend), "of_backend": _gain(on, backend)}
        if backend
        else {}
    )


def _ms(times: Sequence[float]) -> float:
    return round(median(times) * 1e3, 3)


def _gain(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return round(median(b / a for a, b in zip(ours, theirs, strict=True)), 3)
