"""The stage of the tuning job that finds in how many chunks a filter split is best gathered while it is computed."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetconv.calls import CONVS
from hetconv.parallel import parallelize
from hetconv.plan import LayerPlan, Plan
from hetconv.rules import Conv, Split
from hetconv.spec import ConvSpec
from hetconv.tuned import TunedChunks

from . import measure
from .models import channels_last, random_input
from .progress import Reporter

CHUNKS = (2, 4, 8)
ROUNDS, FINAL_ROUNDS = 5, 9
GAIN = 0.98  # of the time in one piece: what is not faster by more is noise


def gathered_layers(plan: Plan) -> list[tuple[ConvSpec, Split]]:
    """The distinct convolutions of a plan that chunks can help, the most work first."""
    found = {
        (layer.op.spec, layer.split)
        for layer in plan.layers.values()
        if isinstance(layer.op, Conv) and layer.split.kind == "filter"
        and layer.op.spec.N > 1 and layer.op.spec.groups == 1 and sum(s > 0 for s in layer.split.sizes) > 1
    }  # fmt: skip
    return sorted(found, key=lambda f: f[0].flops, reverse=True)


def tune_chunks(plan: Plan, device: torch.device, enough: Callable[[], bool], say: Reporter) -> tuple[TunedChunks, ...]:
    """Collective: every such convolution alone, with its output gathered, in one piece and in chunks, side by side."""
    asked = gathered_layers(plan)
    say.stage("chunks", len(asked))
    found: list[TunedChunks] = []
    for spec, split in asked:
        if measure.told(enough()):
            say.line(f"chunks: {len(asked) - len(found)} smaller convolutions were left out; --budget would allow more")
            break
        found.append(best_chunks(spec, split, device))
        gain = found[-1].unchunked_s / found[-1].seconds
        shape = "x".join(map(str, spec.x_shape))
        say.advance(f"{shape} by {spec.K}: {found[-1].chunks}, {gain:.2f}x of one piece")
    return tuple(found)


def best_chunks(spec: ConvSpec, split: Split, device: torch.device) -> TunedChunks:
    """More than one only if the bits are the same and they were faster twice: among all, and beside one piece alone."""
    steps = {n: gathering(spec, split, device, n) for n in (1, *(n for n in CHUNKS if n <= spec.N))}
    whole = steps[1]()
    steps = {n: step for n, step in steps.items() if step().equal(whole)}
    first = _ratios(measure.paired({str(n): s for n, s in steps.items()}, ROUNDS, device))
    best = min(first, key=lambda n: first[n])
    times = measure.paired({"1": steps[1], str(best): steps[best]}, FINAL_ROUNDS, device)
    again = _ratios(times)
    chunks = best if max(first[best], again[best]) <= GAIN else 1
    return TunedChunks(spec, split.sizes, chunks, median(times[str(chunks)]), median(times["1"]))


def _ratios(times: dict[str, list[float]]) -> dict[int, float]:
    """Of the time in one piece, the median over rounds."""
    return {int(n): median(t / one for t, one in zip(ts, times["1"], strict=True)) for n, ts in times.items()}


def gathering(spec: ConvSpec, split: Split, device: torch.device, chunks: int) -> Callable[[], Tensor]:
    """An inference of one convolution under ``split``, gathered in ``chunks``."""
    dtype = getattr(torch, spec.dtype)
    alike = all(before == after for before, after in spec.padding)
    padding = tuple(lo for lo, _ in spec.padding) if alike else "same"
    args: Any = (spec.C, spec.K, spec.kernel, spec.stride, padding, spec.dilation, 1, False)
    plain = CONVS[spec.spatial_dims - 1](*args)
    with torch.no_grad():
        plain.weight.copy_(random_input(spec.w_shape, 1))  # the same however many chunks, whose bits are compared
    conv, x = channels_last(plain.to(device, dtype), random_input(spec.x_shape, 0).to(device, dtype))
    layer = LayerPlan(Conv(spec), split, chunks=chunks)
    world = dist.get_world_size()
    plan = Plan((device.type,) * world, "infer", "a convolution", (spec.x_shape,), {"": layer}, "by hand")
    split_conv = parallelize(conv, plan)

    def step() -> Tensor:
        with torch.no_grad():
            y: Tensor = split_conv(x)
        return y

    return step
