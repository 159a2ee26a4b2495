"""What messages that travel while a device computes save: of halos which part is
hidden; of a filter split's gathering in how many chunks it is best done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetconv.autotune.launch.progress import Reporter
from hetconv.comm.rank_group import blocking, rank_group_of
from hetconv.comm.redistribute import start_exchange
from hetconv.cost.network import Network
from hetconv.cost.operator_cost import Operators
from hetconv.cost.propagate import propagate
from hetconv.nn.parallelize import parallelize
from hetconv.operators.layers import CONVS
from hetconv.ops.conv import conv_case, convolution
from hetconv.planner.candidates import Candidates
from hetconv.runtime.het_tensor import HetTensor
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import LayerPlan, Mode, Plan
from hetconv.schemas.tuning_results import TunedChunks
from hetconv.sharding.conv_spec import ConvSpec
from hetconv.sharding.layer_rules import SPATIAL_KINDS, Conv, Split
from hetconv.sharding.layout import Layout, apportion
from hetconv.tracing.graph import Graph

from . import timer
from .models import channels_last, random_input
from .paired_rounds import paired
from .statistics import error_of_median, inverse_variance_mean

CHUNKS = (2, 4, 8)
ROUNDS, FINAL_ROUNDS = 5, 9
# seconds that rounds of one layer and its halos take at least, if they are not too many
HALOS_S = 1.0
GUESS, UNSURE = 0.5, 0.3  # the part of halos that is hidden, and how far it may be off
SUREST = 1e-3  # how far what rounds say may be off at least
GAIN = 0.98  # of the time in one piece: what is not faster by more is noise


def with_overlap(
    profile: ClusterProfile,
    graph: Graph,
    mode: Mode,
    device: torch.device,
    say: Reporter,
) -> ClusterProfile:
    """Collective: with the ``overlap`` that one layer shows, if there is one with halos."""
    found = haloed_layer(graph, profile, mode)
    if found is None:
        return profile
    times = haloed(*found, device)
    overlap = timer.told(hidden(times["in turn"], times["on"], times["halos"]))
    say.line(f"{overlap:.0%} of the shorter of computing and halos is hidden")
    return replace(profile, overlap=overlap)


def haloed_layer(
    graph: Graph, profile: ClusterProfile, mode: Mode
) -> tuple[ConvSpec, Split] | None:
    """Under balanced spatial splits, the convolution with most to hide: of the longest
    shorter one of both.
    """
    ways, network, operators = (
        Candidates(graph, profile, mode),
        Network.of(profile),
        Operators(graph, profile.devices),
    )
    found: list[tuple[float, ConvSpec, Split]] = []
    for kind in SPATIAL_KINDS:
        for a in propagate(graph, ways.balanced(kind), profile.world, "infer")[0]:
            if a.overlaps_halos and a.forward and isinstance(a.node.op, Conv):
                computing = float(
                    operators.seconds(a.node, a.split, a.sharding, False).max()
                )
                moving = sum(network.rounds_s(*t) for t in a.forward)
                found.append((min(computing, moving), a.node.op.spec, a.split))
    return max(found, key=lambda f: f[0])[1:] if found else None


def hidden(
    in_turn_s: Sequence[float], on_s: Sequence[float], halos_s: Sequence[float]
) -> float:
    """Which part of the shorter of computing and transferring takes no time of its own,
    from 0 to 1.

    Seconds of both one after the other, of both at the same time, and of the transfer
    alone. The median of rounds, as far as these agree: short halos of a long layer are
    lost in its noise, and what they leave open is `GUESS`.
    """
    rounds = zip(in_turn_s, on_s, halos_s, strict=True)
    parts = [
        (both - on) / least
        for both, on, halos in rounds
        if (least := min(both - halos, halos)) > 0
    ]
    if len(parts) < 2:
        return GUESS
    part, _ = inverse_variance_mean(
        (GUESS, UNSURE), (median(parts), max(error_of_median(parts), SUREST))
    )
    return round(min(max(part, 0.0), 1.0), 3)


def haloed(
    spec: ConvSpec, split: Split, device: torch.device
) -> dict[str, list[float]]:
    """Collective: seconds of a convolution on own rows, with halos under way and waited
    for, and of these alone.
    """
    op, group = Conv(spec), rank_group_of()
    dim = op.dim(split.kind)
    assert dim is not None
    src = Layout.sharded(spec.x_shape, dim, apportion(spec.x_shape[dim], split.sizes))
    way, (need,) = (
        conv_case(op, src, split, group),
        op.sharding((src,), split).input_layouts,
    )
    dtype = getattr(torch, spec.dtype)
    held = src.boxes[group.rank], way.held["weight"].boxes[group.rank]
    x, w = (random_input(box.shape, 0).to(device, dtype) for box in held)
    parts = HetTensor.wrap(x, src, group)

    def step() -> None:
        with torch.no_grad():
            convolution(parts, w, None, way, group)

    def waiting() -> None:
        with blocking():
            step()

    def halos() -> None:
        start_exchange(group, x, src.boxes, need.boxes).wait()

    return paired(
        {"on": step, "in turn": waiting, "halos": halos}, FINAL_ROUNDS, device, HALOS_S
    )


def gathered_layers(plan: Plan) -> list[tuple[ConvSpec, Split]]:
    """The distinct convolutions of a plan that chunks can help, the most work first."""
    found = {
        (layer.op.spec, layer.split)
        for layer in plan.layers.values()
        if isinstance(layer.op, Conv)
        and layer.split.kind == "filter"
        and not layer.split.nodes
        and layer.op.spec.N > 1
        and layer.op.spec.groups == 1
        and sum(s > 0 for s in layer.split.sizes) > 1
    }
    return sorted(found, key=lambda f: f[0].flops, reverse=True)


def tune_chunks(
    plan: Plan, device: torch.device, enough: Callable[[], bool], say: Reporter
) -> tuple[TunedChunks, ...]:
    """Collective: every such convolution alone, with its output gathered, in one piece
    and in chunks, side by side.
    """
    asked = gathered_layers(plan)
    say.stage("chunks", len(asked))
    found: list[TunedChunks] = []
    for spec, split in asked:
        if timer.told(enough()):
            say.line(
                f"chunks: {len(asked) - len(found)} smaller convolutions were left out; "
                "--budget would allow more"
            )
            break
        found.append(best_chunks(spec, split, device))
        gain = found[-1].unchunked_s / found[-1].seconds
        shape = "x".join(map(str, spec.x_shape))
        say.advance(
            f"{shape} by {spec.K}: {found[-1].chunks}, {gain:.2f}x of one piece"
        )
    return tuple(found)


def best_chunks(spec: ConvSpec, split: Split, device: torch.device) -> TunedChunks:
    """More than one only if the bits are the same and they were faster twice: among
    all, and beside one piece alone.
    """
    steps = {
        n: gathering(spec, split, device, n)
        for n in (1, *(n for n in CHUNKS if n <= spec.N))
    }
    whole = steps[1]()
    steps = {n: step for n, step in steps.items() if step().equal(whole)}
    first = _ratios(paired({str(n): s for n, s in steps.items()}, ROUNDS, device))
    best = min(first, key=lambda n: first[n])
    times = paired({"1": steps[1], str(best): steps[best]}, FINAL_ROUNDS, device)
    again = _ratios(times)
    chunks = best if max(first[best], again[best]) <= GAIN else 1
    return TunedChunks(
        spec, split.sizes, chunks, median(times[str(chunks)]), median(times["1"])
    )


def _ratios(times: dict[str, list[float]]) -> dict[int, float]:
    """Of the time in one piece, the median over rounds."""
    return {
        int(n): median(t / one for t, one in zip(ts, times["1"], strict=True))
        for n, ts in times.items()
    }


def gathering(
    spec: ConvSpec, split: Split, device: torch.device, chunks: int
) -> Callable[[], Tensor]:
    """An inference of one convolution under ``split``, gathered in ``chunks``."""
    dtype = getattr(torch, spec.dtype)
    alike = all(before == after for before, after in spec.padding)
    padding = tuple(lo for lo, _ in spec.padding) if alike else "same"
    args: Any = (
        spec.C,
        spec.K,
        spec.kernel,
        spec.stride,
        padding,
        spec.dilation,
        1,
        False,
    )
    plain = CONVS[spec.spatial_dims - 1](*args)
    with torch.no_grad():
        plain.weight.copy_(
            random_input(spec.w_shape, 1)
        )  # the same however many chunks, whose bits are compared
    conv, x = channels_last(
        plain.to(device, dtype), random_input(spec.x_shape, 0).to(device, dtype)
    )
    layer = LayerPlan(Conv(spec), split, chunks=chunks)
    world = dist.get_world_size()
    plan = Plan(
        (device.type,) * world,
        "infer",
        "a convolution",
        (spec.x_shape,),
        {"": layer},
        "by hand",
    )
    split_conv = parallelize(conv, plan)

    def step() -> Tensor:
        with torch.no_grad():
            y: Tensor = split_conv(x)
        return y

    return step
