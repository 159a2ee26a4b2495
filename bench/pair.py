"""Time two unequal devices on one model: one alone, an even split, the tuned split.

All steps run in turn within each round, so that a machine's drift falls on all alike;
ratios are medians over rounds.
"""

from __future__ import annotations

import copy
import json
import platform
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.shared.machine import add_output_argument, save
from bench.shared.models import Stack, stack
from bench.shared.selection import whole_number
from hetconv.autotune.launch.launcher import parse_devices, run_on
from hetconv.autotune.measure.paired_rounds import paired
from hetconv.autotune.models.build import formatted, random_input
from hetconv.autotune.models.inputs import InputSpec, ModelInputs, TensorSpec
from hetconv.autotune.search.job import Job
from hetconv.autotune.search.race import step_of
from hetconv.autotune.search.ratio_search import (
    RatioKind,
    Weights,
    ratio_of,
)
from hetconv.autotune.search.tune import tune
from hetconv.comm.rank_group import rank_group_of
from hetconv.errors import HetConvError
from hetconv.nn.parallelize import parallelize
from hetconv.operators.layers import conv_spec
from hetconv.ops.conv import ConvCase, conv_case, convolution
from hetconv.planner.make_plan import make_plan
from hetconv.planner.partition import Splits, whole_model
from hetconv.runtime.throttle import DeviceName
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import Mode
from hetconv.sharding.layer_rules import Conv, split_dim
from hetconv.sharding.layout import Layout, Shape, spans
from hetconv.sharding.split import REPLICATE, ratio_text
from hetconv.tracing.tracer import capture

MODES: tuple[tuple[str, Mode], ...] = (("inference", "infer"), ("training", "train"))
ROUNDS = {"infer": 25, "train": 11}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--devices", default="cpu,cpu@0.5", help="one per rank (default: %(default)s)"
    )
    parser.add_argument(
        "--size",
        type=whole_number(8),
        default=Stack.size,
        help="height and width of the image (default: %(default)s)",
    )
    add_output_argument(parser)


def run(args: Namespace) -> None:
    """Prints the ideal first, a line per mode, and the results as one JSON document last."""
    devices, case, output = (
        parse_devices(args.devices),
        Stack(size=args.size),
        args.output,
    )
    speeds = [d.speed for d in devices]
    ideal = sum(speeds) / max(speeds)
    print(
        f"{case} on {', '.join(map(str, devices))}; ideal speed-up over the fastest device "
        f"{ideal:.2f}x",
        flush=True,
    )
    results, shares = run_on(devices, measure, tuple(devices), case, ideal)
    for mode, r in results.items():
        print(
            f"{mode}: alone {r['alone_ms']:.0f} ms, even {r['even_ms']:.0f}, tuned "
            f"{r['tuned_ms']:.0f} "
            f"({shares[mode]}), without communication {r['bound_ms']:.0f}; "
            f"{r['vs_alone']:.2f}x alone, {r['vs_even']:.2f}x even, {r['vs_bound']:.2f} of the "
            "bound's time"
        )
    if output is not None:
        setup = {
            "devices": [str(d) for d in devices],
            "shares": shares,
            "rounds": ROUNDS,
            "torch": torch.__version__,
        }
        setup |= {"machine": platform.machine(), "python": platform.python_version()}
        save(output, {"suite": "pair", "setup": setup, **results})
    print(json.dumps(results))


def measure(devices: tuple[DeviceName, ...], case: Stack, ideal: float) -> Any:
    """On every rank: ({mode: figures}, {mode: shares})."""
    results, shares = {}, {}
    for name, mode in MODES:
        tuned, kind, weights = _tuned(devices, case, mode)
        times = paired(
            _steps(case, mode, tuned, kind, weights), ROUNDS[mode], torch.device("cpu")
        )
        alone = min((times["alone"], times["alone NCHW"]), key=median)
        ratio = {
            n: median(a / b for a, b in zip(x, y, strict=True))
            for n, x, y in (
                ("vs_alone", alone, times["tuned"]),
                ("vs_even", times["even"], times["tuned"]),
                ("vs_bound", times["tuned"], times["bound"]),
            )
        }
        figures = {
            f"{n}_ms": round(median(times[n]) * 1e3, 2)
            for n in ("even", "tuned", "bound")
        }
        rounded = {n: round(v, 3) for n, v in ratio.items()}
        results[name] = (
            {"alone_ms": round(median(alone) * 1e3, 2)}
            | figures
            | rounded
            | {"ideal": ideal}
        )
        shares[name] = f"{kind} {ratio_text(weights)}"
    return results, shares


def _tuned(
    devices: tuple[DeviceName, ...], case: Stack, mode: Mode
) -> tuple[Splits, RatioKind, Weights]:
    """The plan that `hetconv autotune` finds for this stack, and the kind and weights
    of its splits.
    """
    with tempfile.TemporaryDirectory() as folder:
        args = json.dumps({"blocks": case.blocks, "channels": case.channels})
        inputs, output = (
            InputSpec((TensorSpec((1, 3, case.size, case.size)),)),
            Path(folder, "cluster.json"),
        )
        job = Job(
            devices,
            "bench.shared.models:stack",
            args,
            inputs,
            mode,
            trials=8,
            budget=75,
            output=output,
            seed=0,
        )
        profile = tune(job).profile
    for plan in profile.plans:
        if (found := ratio_of(plan.splits)) is not None:
            return dict(plan.splits), *found
    raise HetConvError(
        "the fastest plan does not split all by rows, columns or samples: nothing to compare"
    )


def _steps(
    case: Stack, mode: Mode, tuned: Splits, kind: RatioKind, weights: Weights
) -> dict[str, Callable[[], None]]:
    """What is timed: every rank takes part in each step but the ones of the fast device
    alone, rank 0.
    """
    group, rank = rank_group_of(), dist.get_rank()
    torch.manual_seed(0)
    nchw, x = (
        stack(case.blocks, case.channels),
        random_input((1, 3, case.size, case.size), 0),
    )
    plain, x_NHWC = formatted(copy.deepcopy(nchw), x, "channels_last")
    graph = capture(plain, x)
    anywhere = ClusterProfile.from_devices(
        ["cpu"] * group.size, link="host"
    )  # the splits are given below
    plan = make_plan(graph, anywhere, mode=mode, kinds=(kind,))

    def split(splits: Splits) -> nn.Module:
        return parallelize(copy.deepcopy(plain), plan.with_splits(splits))

    lo, hi = spans(weights)[rank]
    dim = split_dim(kind, range(2, x.dim()))
    assert dim is not None
    own = x_NHWC.narrow(dim, lo, hi - lo)
    inputs = ModelInputs.of(x_NHWC)
    idle = (lambda: None) if rank else None
    return {
        "alone": idle or step_of(plain, inputs, mode),
        "alone NCHW": idle or step_of(nchw, ModelInputs.of(x), mode),
        "even": step_of(
            split(whole_model(graph, kind, (1,) * group.size, (kind,))), inputs, mode
        ),
        "tuned": step_of(split(tuned), inputs, mode),
        "bound": step_of(_silent(copy.deepcopy(plain)), ModelInputs.of(own), mode),
    }


def _silent(model: nn.Module) -> nn.Module:
    """The model on this rank's rows alone: every convolution at the device's speed, and
    not a word to the others.
    """
    group = rank_group_of()
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):

            @cache
            def way(
                shape: Shape, dtype: torch.dtype, layer: nn.Conv2d = layer
            ) -> ConvCase:
                spec = conv_spec(
                    shape, layer.weight.shape, dtype, 1, layer.padding, 1, 1
                )
                return conv_case(
                    Conv(spec), Layout.replicated(shape, group.size), REPLICATE, group
                )

            def forward(
                x: Tensor, layer: nn.Conv2d = layer, way: Callable[..., ConvCase] = way
            ) -> Tensor:
                return convolution(
                    x, layer.weight, layer.bias, way(tuple(x.shape), x.dtype), group
                )

            layer.forward = forward  # type: ignore[assignment]
    return model
