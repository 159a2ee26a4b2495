"""What is gained by messages that travel while a device computes.

Of halos, the part that is hidden; of a filter split that is gathered, the best number
of chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetconv.autotune.launch.progress import Reporter
from hetconv.autotune.models.build import formatted, random_input
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
from hetconv.sharding.conv_spec import ConvSpec, MemoryFormat
from hetconv.sharding.layer_rules import Conv
from hetconv.sharding.layout import Layout, apportion
from hetconv.sharding.split import SPATIAL_KINDS, Split
from hetconv.tracing.graph import Graph

from . import timer
from .paired_rounds import paired
from .sampling import error_of_median

CHUNKS = (2, 4, 8)
ROUNDS, FINAL_ROUNDS = 5, 9
MIN_HALO_ROUNDS_S = (
    1.0  # that rounds of a layer and its halos take, if there may be more
)
# The part of halos that is hidden where nothing is known, and the standard errors of
# that, and of what was measured at least.
DEFAULT_HIDDEN, DEFAULT_ERROR, MIN_ERROR = 0.5, 0.3, 1e-3
MAX_RATIO = 0.98  # of the time in one piece: what is not faster by more is noise


def with_overlap(
    profile: ClusterProfile,
    graph: Graph,
    mode: Mode,
    device: torch.device,
    say: Reporter,
) -> ClusterProfile:
    """Adds the ``overlap`` that one layer shows, if there is one with halos. Collective.

    Args:
        profile: with devices and links.
        graph: the model.
        mode: what it is tuned for.
        device: the device of this rank.
        say: told what was found.
    """
    layer = most_halo_bound_layer(graph, profile, mode)
    if layer is None:
        return profile
    times = time_halos(*layer, device)
    overlap = timer.broadcast_object(
        hidden_part(times["in turn"], times["overlapped"], times["halos"])
    )
    say.detail(f"{overlap:.0%} of the shorter of computing and halos is hidden")
    return replace(profile, overlap=overlap)


def most_halo_bound_layer(
    graph: Graph, profile: ClusterProfile, mode: Mode
) -> tuple[ConvSpec, Split] | None:
    """Finds the convolution with most to hide under balanced spatial splits.

    That is where the shorter of computing and moving halos is longest.
    """
    candidates = Candidates(graph, profile, mode)
    network, operators = Network.of(profile), Operators(graph, profile.devices)
    found: tuple[ConvSpec, Split] | None = None
    most_s = 0.0
    for kind in SPATIAL_KINDS:
        balanced = candidates.balanced(kind)
        for a in propagate(graph, balanced, profile.world, "infer")[0]:
            if not (a.overlaps_halos and a.forward and isinstance(a.node.op, Conv)):
                continue
            computing_s = operators.seconds(a.node, a.split, a.sharding, False).max()
            moving_s = sum(network.rounds_s(*t) for t in a.forward)
            if (shorter_s := min(float(computing_s), moving_s)) > most_s:
                most_s, found = shorter_s, (a.node.op.spec, a.split)
    return found


def hidden_part(
    in_turn_s: Sequence[float], overlapped_s: Sequence[float], halos_s: Sequence[float]
) -> float:
    """Estimates which part of the shorter of computing and transferring takes no time.

    The median of rounds, as far as these agree: short halos of a long layer are lost in
    its noise, and what they leave open is `DEFAULT_HIDDEN`.

    Args:
        in_turn_s: seconds of both one after the other, by round.
        overlapped_s: of both at the same time.
        halos_s: of the transfer alone.

    Returns:
        The part, from 0 to 1.
    """
    parts = []
    for both, overlapped, halos in zip(in_turn_s, overlapped_s, halos_s, strict=True):
        if (shorter := min(both - halos, halos)) > 0:
            parts.append((both - overlapped) / shorter)
    if len(parts) < 2:
        return DEFAULT_HIDDEN
    error = max(error_of_median(parts), MIN_ERROR)
    weight = DEFAULT_ERROR**2 / (DEFAULT_ERROR**2 + error**2)
    part = weight * median(parts) + (1 - weight) * DEFAULT_HIDDEN
    return round(min(max(part, 0.0), 1.0), 3)


def time_halos(
    spec: ConvSpec, split: Split, device: torch.device
) -> dict[str, list[float]]:
    """Times a convolution on own rows and its halos. Collective.

    Args:
        spec: the whole convolution.
        split: a spatial one.
        device: the device of this rank.

    Returns:
        Seconds of each round: ``overlapped``, ``in turn``, and of ``halos`` alone.
    """
    op, group = Conv(spec), rank_group_of()
    dim = op.dim(split.kind)
    assert dim is not None
    rows = Layout.sharded(spec.x_shape, dim, apportion(spec.x_shape[dim], split.sizes))
    way, (need,) = (
        conv_case(op, rows, split, group),
        op.sharding((rows,), split).input_layouts,
    )
    dtype = getattr(torch, spec.dtype)
    x, w = (
        random_input(box.shape, 0).to(device, dtype)
        for box in (rows.boxes[group.rank], way.held["weight"].boxes[group.rank])
    )
    part = HetTensor.wrap(x, rows, group)

    def overlapped() -> None:
        with torch.no_grad():
            convolution(part, w, None, way, group)

    def one_after_the_other() -> None:
        with blocking():
            overlapped()

    def halos() -> None:
        start_exchange(group, x, rows.boxes, need.boxes).wait()

    steps = {"overlapped": overlapped, "in turn": one_after_the_other, "halos": halos}
    return paired(steps, FINAL_ROUNDS, device, MIN_HALO_ROUNDS_S)


def gathered_layers(plan: Plan) -> list[tuple[ConvSpec, Split]]:
    """Lists the distinct convolutions of a plan that chunks can help, the largest first."""
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
    return sorted(found, key=lambda layer: layer[0].flops, reverse=True)


def tune_chunks(
    plan: Plan, device: torch.device, enough: Callable[[], bool], say: Reporter
) -> tuple[TunedChunks, ...]:
    """Finds in how many chunks each of `gathered_layers` is best gathered. Collective.

    Args:
        plan: the plan whose layers are tuned.
        device: the device of this rank.
        enough: asked on rank 0 before each layer: whether to leave out the rest.
        say: told what was found.
    """
    layers = gathered_layers(plan)
    say.stage("chunks", len(layers))
    found: list[TunedChunks] = []
    for spec, split in layers:
        if timer.broadcast_object(enough()):
            say.detail(
                f"chunks: {len(layers) - len(found)} smaller convolutions were left out; "
                "--budget would allow more"
            )
            break
        best = best_chunks(spec, split, device, plan.memory_format)
        found.append(best)
        shape, gain = "x".join(map(str, spec.x_shape)), best.unchunked_s / best.seconds
        say.advance(f"{shape} by {spec.K}: {best.chunks}, {gain:.2f}x of one piece")
    return tuple(found)


def best_chunks(
    spec: ConvSpec, split: Split, device: torch.device, memory_format: MemoryFormat
) -> TunedChunks:
    """Finds in how many chunks a convolution is best gathered. Collective.

    More than one only if the bits are the same and they were faster twice: among all,
    and beside one piece alone.

    Args:
        spec: the convolution.
        split: by filters.
        device: the device of this rank.
        memory_format: of the convolution and its input.
    """
    counts = (1, *(n for n in CHUNKS if n <= spec.N))
    steps = {n: gathering(spec, split, device, n, memory_format) for n in counts}
    whole = steps[1]()
    exact = {str(n): step for n, step in steps.items() if step().equal(whole)}
    ratios = _ratios(paired(exact, ROUNDS, device))
    best = min(ratios, key=ratios.__getitem__)
    times = paired({"1": exact["1"], best: exact[best]}, FINAL_ROUNDS, device)
    faster = max(ratios[best], _ratios(times)[best]) <= MAX_RATIO
    chosen = best if faster else "1"
    return TunedChunks(
        spec, split.sizes, int(chosen), median(times[chosen]), median(times["1"])
    )


def _ratios(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Of the time in one piece, the median over rounds."""
    return {
        n: median(s / one for s, one in zip(seconds, times["1"], strict=True))
        for n, seconds in times.items()
    }


def gathering(
    spec: ConvSpec,
    split: Split,
    device: torch.device,
    chunks: int,
    memory_format: MemoryFormat,
) -> Callable[[], Tensor]:
    """Makes an inference of one convolution, to be run on all ranks.

    Args:
        spec: the convolution.
        split: by filters.
        device: the device of this rank.
        chunks: of the batch, in which the output is gathered.
        memory_format: of the convolution and its input.
    """
    symmetric = all(before == after for before, after in spec.padding)
    padding = tuple(before for before, _ in spec.padding) if symmetric else "same"
    window = spec.kernel, spec.stride, padding, spec.dilation
    args: Any = (spec.C, spec.K, *window, 1, False)  # no groups, no bias
    plain = CONVS[spec.spatial_dims - 1](*args)
    with torch.no_grad():  # the same however many chunks, whose bits are compared
        plain.weight.copy_(random_input(spec.w_shape, 1))
    dtype = getattr(torch, spec.dtype)
    x = random_input(spec.x_shape, 0).to(device, dtype)
    conv, x = formatted(plain.to(device, dtype), x, memory_format)
    layers = {"": LayerPlan(Conv(spec), split, chunks=chunks)}
    devices = (device.type,) * dist.get_world_size()
    plan = Plan(devices, "infer", "a convolution", (spec.x_shape,), layers, "by hand")
    split_conv = parallelize(conv, plan)

    def step() -> Tensor:
        with torch.no_grad():
            y: Tensor = split_conv(x)
        return y

    return step
