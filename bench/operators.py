"""Time each operator on parts of an image, against the same on half of it.

Each operator follows a convolution that is split by rows. What it takes is the step with
it less the step without it, of the split model and of the plain one on half of the rows,
on both ranks at once. All steps run in turn within each round; figures are medians.
"""

from __future__ import annotations

import copy
import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.shared import selection
from bench.shared.machine import commit, now, save, software
from bench.shared.verdict import Demand
from hetconv.autotune.launch.launcher import parse_devices, run_on
from hetconv.autotune.measure.paired_rounds import paired
from hetconv.autotune.models.build import formatted, random_input
from hetconv.autotune.models.inputs import ModelInputs
from hetconv.autotune.search.race import step_of
from hetconv.comm.rank_group import rank_group_of
from hetconv.comm.redistribute import all_gather_tensors
from hetconv.nn.parallelize import parallelize
from hetconv.planner.make_plan import make_plan
from hetconv.planner.partition import whole_model
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import Mode
from hetconv.tracing.tracer import capture

DEVICES, ROUNDS = "cpu,cpu", 15
SHAPE, CHANNELS = (2, 8, 128, 128), 32
MODES: tuple[Mode, ...] = ("infer", "train")
MEMORY = ("contiguous", "channels last")
# Of what half of the image takes, besides one round of messages.
MOST = 1.5


class Function(nn.Module):
    """A function of one image."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class SqueezeExcite(nn.Module):
    """Scales channels by a function of their means."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(CHANNELS, 8, 1), nn.Conv2d(8, CHANNELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.up(F.relu(self.down(x.mean((2, 3), keepdim=True))))
        y: Tensor = x * torch.sigmoid(gate)
        return y


class ChannelsLastNorm(nn.Module):
    """A layer norm over the channels of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return y


def of(function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    """Returns what makes a module of a function."""
    return lambda: Function(function)


def product_of_halves(x: Tensor) -> Tensor:
    """Multiplies the halves of the channels, as gated units do."""
    a, b = x.chunk(2, 1)
    return a * b


C = CHANNELS
OPERATORS: dict[str, Callable[[], nn.Module]] = {
    "convolution 3x3": lambda: nn.Conv2d(C, C, 3, padding=1),
    "convolution 3x3, stride 2": lambda: nn.Conv2d(C, C, 3, 2, 1),
    "convolution 1x1": lambda: nn.Conv2d(C, C, 1),
    "depthwise convolution 7x7": lambda: nn.Conv2d(C, C, 7, padding=3, groups=C),
    "transposed convolution": lambda: nn.ConvTranspose2d(C, C, 2, 2),
    "batch norm": lambda: nn.BatchNorm2d(C),
    "group norm": lambda: nn.GroupNorm(8, C),
    "group norm of one group": lambda: nn.GroupNorm(1, C),
    "instance norm": lambda: nn.InstanceNorm2d(C, affine=True),
    "layer norm over channels": ChannelsLastNorm,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "prelu": nn.PReLU,
    "softmax over channels": lambda: nn.Softmax(1),
    "addition": of(lambda x: x + x),
    "concatenation": of(lambda x: torch.cat([x, x], 1)),
    "chunk and multiply": of(product_of_halves),
    "channel shuffle": lambda: nn.ChannelShuffle(4),
    "pixel shuffle": lambda: nn.PixelShuffle(2),
    "max pool 2": lambda: nn.MaxPool2d(2),
    "max pool 3, stride 2": lambda: nn.MaxPool2d(3, 2, 1),
    "average pool 3": lambda: nn.AvgPool2d(3, 1, 1),
    "adaptive average pool to 7": lambda: nn.AdaptiveAvgPool2d(7),
    "mean over space": of(lambda x: x.mean((2, 3))),
    "amax over space": of(lambda x: x.amax((2, 3))),
    "squeeze and excite": SqueezeExcite,
    "nearest, twice": lambda: nn.Upsample(scale_factor=2),
    "bilinear, twice": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "reflection pad": lambda: nn.ReflectionPad2d(1),
}
# Why an operator takes longer than `allowed_us`.
HALO_COPIED = "own rows are copied to lie in one buffer with the halo"
MOMENTS_EXCHANGED = "torch reads an image once; here moments are exchanged in between"
MANY_CALLS = "Python takes its time for each of several small operators"
REASONS = {
    "adaptive average pool to 7": "rows are averaged by one call for each range of them",
    "depthwise convolution 7x7": HALO_COPIED,
    "batch norm": MOMENTS_EXCHANGED,
    "chunk and multiply": MANY_CALLS,
    "group norm": MOMENTS_EXCHANGED,
    "group norm of one group": MOMENTS_EXCHANGED,
    "instance norm": MOMENTS_EXCHANGED,
    "max pool 3, stride 2": HALO_COPIED,
    "squeeze and excite": MANY_CALLS,
    "average pool 3": HALO_COPIED,
    "bilinear, twice": HALO_COPIED,
    "reflection pad": HALO_COPIED,
}


class After(nn.Module):
    """A convolution, an operator, and the mean of its result."""

    def __init__(self, operator: nn.Module):
        super().__init__()
        self.first, self.operator = nn.Conv2d(SHAPE[1], CHANNELS, 1), operator

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.operator(self.first(x)).mean()
        return y


def add_arguments(parser: ArgumentParser) -> None:
    selection.add_arguments(parser, "operators")


def run(args: Namespace) -> None:
    """Prints a line per operator, mode and memory format, then what must hold."""
    names = selection.chosen(OPERATORS, args.only)
    measured, round_us = run_on(parse_devices(DEVICES), measure, names)
    rows = [with_reason(row, round_us) for row in measured]
    for r in rows:
        reason = f": {r['reason']}" if "reason" in r else ""
        print(
            f"{r['operator']:28} {r['mode']:5} {r['memory']:13} {r['part_us']:7.0f} us on "
            f"parts, {r['half_us']:7.0f} on half the rows{reason}"
        )
    print(f"one round of messages: {round_us:.0f} us\nmust hold:")
    demand = demand_of(rows, round_us)
    print(f"  {demand}")
    document = {
        "suite": "operators",
        "date": now(),
        "shape": [SHAPE[0], CHANNELS, *SHAPE[2:]],
        "round_us": round_us,
        **software(),
        **commit(),
        "cases": rows,
    }
    if args.output is not None:
        save(args.output, document)
    print(json.dumps(document))


def allowed_us(row: dict[str, Any], round_us: float) -> float:
    """Returns what an operator may take on parts.

    A step has a round forward, and in training one backward.
    """
    rounds = 1 if row["mode"] == "infer" else 2
    return MOST * float(row["half_us"]) + rounds * round_us


def with_reason(row: dict[str, Any], round_us: float) -> dict[str, Any]:
    """Returns a row with the reason why it takes more than is allowed, if one is known."""
    reason = REASONS.get(row["operator"])
    if reason is None or row["part_us"] <= allowed_us(row, round_us):
        return row
    return row | {"reason": reason}


def demand_of(rows: Sequence[dict[str, Any]], round_us: float) -> Demand:
    """Returns that no operator takes more than is allowed without a known reason."""
    least = min(
        (
            allowed_us(r, round_us) / max(r["part_us"], 0.1)
            for r in rows
            if "reason" not in r
        ),
        default=None,
    )
    what = f"{MOST:g} times half the rows and the messages, over the worst operator"
    return Demand(what, 1.0, least)


def measure(names: Sequence[str]) -> tuple[list[dict[str, Any]], float]:
    """On every rank: a row per operator, mode and memory format, and a round's time."""
    rows = [
        {"operator": name, "mode": mode, "memory": memory, **_timed(name, mode, memory)}
        for name in names
        for mode in MODES
        for memory in MEMORY
    ]
    word, group = torch.zeros(2, CHANNELS), rank_group_of()
    steps = {"round": lambda: all_gather_tensors(group, word)}
    return rows, round(median(paired(steps, 31, torch.device("cpu"))["round"]) * 1e6, 1)


def _timed(name: str, mode: Mode, memory: str) -> dict[str, float]:
    steps: dict[str, Callable[[], Any]] = {}
    for what, make in (("with", OPERATORS[name]), ("without", nn.Identity)):
        torch.manual_seed(0)
        model = After(make()).train(mode == "train")
        steps |= {
            f"{what} {where}": step
            for where, step in _steps(model, mode, memory).items()
        }
    times = paired(steps, ROUNDS, torch.device("cpu"))

    def own_us(where: str) -> float:
        pairs = zip(times[f"with {where}"], times[f"without {where}"], strict=True)
        return round(max(median(a - b for a, b in pairs), 0.0) * 1e6, 1)

    return {"part_us": own_us("part"), "half_us": own_us("half")}


def _steps(model: nn.Module, mode: Mode, memory: str) -> dict[str, Callable[[], Any]]:
    """Returns a step of the split model, and of the plain one on half of the rows."""
    group, x = rank_group_of(), random_input(SHAPE, 0)
    graph = capture(model, x)
    cluster = ClusterProfile.from_devices(["cpu"] * group.size, link="host")
    plan = make_plan(graph, cluster, mode=mode, kinds=("height",))
    splits = whole_model(graph, "height", (1,) * group.size, ("height",))
    rows = SHAPE[2] // group.size
    half = x.narrow(2, group.rank * rows, rows).contiguous()
    found = {}
    for where, images in (("half", half), ("part", x)):
        made, inputs = copy.deepcopy(model), images
        if memory == "channels last":
            made, inputs = formatted(made, inputs, "channels_last")
        if where == "part":
            made = parallelize(made, plan.with_splits(splits))
        found[where] = step_of(made, ModelInputs.of(inputs), mode)
    return found
