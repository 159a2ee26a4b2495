"""From samples to models: plain numbers in, frozen models out. No clock, no tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from math import log
from statistics import median
from typing import Any

import torch

from hetconv.cost.operator_cost import arithmetic
from hetconv.runtime.rank_devices import device_identity
from hetconv.runtime.throttle import DeviceName
from hetconv.schemas.device_model import Curve, DeviceModel, LinkModel, OperatorModel
from hetconv.sharding.conv_spec import MemoryFormat

from .device_info import conditions, memory_bytes
from .layer_workloads import LayerWorkload, Workload, forward_flops
from .other_workloads import DispatchOverhead, NonLayerOperator
from .sampling import Granularity, Passes
from .timer import Samples

MIN_LATENCY_S = 1e-7
DEFAULT_FLOPS_PER_S = 1e9  # where no layer was timed
DEFAULT_BACKWARD_RATIO = 2.0


def curve(samples: Mapping[float, Sequence[float]], rising: bool = True) -> Curve:
    """Fits a piecewise-linear curve through the medians of the seconds at each share.

    Args:
        samples: seconds of each repeat by share.
        rising: whether a larger share cannot take less. Where it was faster (noise),
            neighbours are pooled to their mean (isotonic regression).
    """
    shares = sorted(samples)
    medians = [median(samples[share]) for share in shares]
    if not rising:
        return Curve(tuple(shares), tuple(medians))
    pooled: list[tuple[float, int]] = []
    for seconds in medians:
        mean, count = seconds, 1
        while pooled and pooled[-1][0] > mean:
            before, n = pooled.pop()
            mean, count = (before * n + mean * count) / (n + count), n + count
        pooled.append((mean, count))
    rising_s = [mean for mean, count in pooled for _ in range(count)]
    return Curve(tuple(shares), tuple(rising_s))


def with_steps(measured: Curve, granularity: Granularity) -> Curve:
    """Adds the steps of kernels that compute whole grains.

    Where nothing was measured within a grain, any part of it takes what all of it does.
    """
    points = dict(zip(measured.shares, measured.seconds, strict=True))
    for start, stop in granularity.grains:
        first, end = (start + 1) / granularity.extent, stop / granularity.extent
        if not any(first <= share < end for share in measured.shares):
            points |= {first: measured.at(end), end: measured.at(end)}
    shares = tuple(sorted(points))
    return Curve(shares, tuple(points[share] for share in shares))


def operator_model(
    samples: Mapping[float, Passes],
    rising: bool = True,
    granularity: Granularity | None = None,
) -> OperatorModel:
    """Fits the model of one operator.

    Args:
        samples: passes by share or bytes; backward at one of them at least.
        rising: see `curve`.
        granularity: the steps in which its kernels compute, see `with_steps`.
    """
    forward = curve({x: p.forward for x, p in samples.items()}, rising)
    backward = curve({x: p.backward for x, p in samples.items() if p.backward}, rising)
    if granularity is not None:
        forward = with_steps(forward, granularity)
        backward = with_steps(backward, granularity)
    return OperatorModel(forward, backward)


def with_dispatch(
    kernels: OperatorModel, host_s: tuple[float, float], asynchronous: bool
) -> OperatorModel:
    """Adds what the host takes for a call.

    Args:
        kernels: what the device computes.
        host_s: seconds of the host, forward and backward.
        asynchronous: whether the host goes ahead while kernels run, so that the longer
            of both counts.
    """

    def called(computing: Curve, host: float) -> Curve:
        seconds = (
            max(s, host) if asynchronous else s + host for s in computing.seconds
        )
        return replace(computing, seconds=tuple(seconds))

    return replace(
        kernels,
        forward=called(kernels.forward, host_s[0]),
        backward=called(kernels.backward, host_s[1]),
    )


def whole_seconds(model: OperatorModel) -> tuple[float, float]:
    """Returns the seconds of both passes at the full share."""
    return model.forward.at(1.0), model.backward.at(1.0)


def line(samples: Mapping[int, Sequence[float]]) -> tuple[float, float]:
    """Fits a line to the medians that is off by the least factors.

    Of factors, so that small messages count as large ones do, and half as much as
    twice; the factors' logarithms are added, not squared, so that one size that was
    disturbed does not count. Lines are tried through two of the points, and through one
    and the origin, for no time is negative.

    Args:
        samples: seconds of each repeat by message size in bytes.

    Returns:
        Seconds of an empty message, and seconds per byte.
    """
    points = [(size, median(times)) for size, times in sorted(samples.items())]
    lines = [(0.0, seconds / size) for size, seconds in points]
    for (small, small_s), (large, large_s) in combinations(points, 2):
        slope = (large_s - small_s) / (large - small)
        if slope > 0 and small_s >= small * slope:
            lines.append((small_s - small * slope, slope))

    def error(tried: tuple[float, float]) -> float:
        start, slope = tried
        return sum(abs(log((start + size * slope) / s)) for size, s in points)

    return min(lines, key=error)


def link(
    there: Mapping[int, Sequence[float]], back: Mapping[int, Sequence[float]]
) -> LinkModel:
    """Fits latency and seconds per byte of a link.

    Args:
        there: one-way seconds of each repeat by message size in bytes.
        back: the same in the other direction.
    """
    there_latency, s_per_byte = line(there)
    back_latency, back_s_per_byte = line(back)
    latency = max((there_latency + back_latency) / 2, MIN_LATENCY_S)
    return LinkModel(latency, s_per_byte, back_s_per_byte=back_s_per_byte)


def ratio_of_sums(dividends: Iterable[float], divisors: Iterable[float]) -> float:
    """Returns a total over a total, so that long measurements count as much more."""
    return sum(dividends) / max(sum(divisors), 1e-12)


def device_model(
    name: DeviceName,
    device: torch.device,
    samples: Samples,
    workloads: Sequence[Workload],
    bytes_per_s: float,
    memory_format: MemoryFormat = "channels_last",
) -> DeviceModel:
    """Fits the model of this rank's device; the roofline to the whole layers.

    Args:
        name: of the device, with the speed that is left of it.
        device: the same for torch.
        samples: passes by workload; of some there may be none.
        workloads: all workloads of the model.
        bytes_per_s: of an elementwise operator on a large tensor.
        memory_format: of images and filters in the samples.
    """
    kind: Any = device.type
    timed = [workload for workload in workloads if samples.get(workload.key)]
    models = {w.key: _fitted(w, samples[w.key], device) for w in timed}
    layers = [w for w in timed if isinstance(w, LayerWorkload)]
    others = [w for w in timed if isinstance(w, NonLayerOperator)]
    overheads = [w for w in timed if isinstance(w, DispatchOverhead)]
    host_s = whole_seconds(models[overheads[0].key]) if overheads else (0.0, 0.0)
    whole_layers = {(w.op, w.dtype): whole_seconds(models[w.key]) for w in layers}
    flops: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {}
    for (op, dtype), (forward_s, _) in whole_layers.items():
        rate = arithmetic(op, dtype) if kind == "cuda" else dtype
        flops.setdefault(rate, []).append(forward_flops(op))
        seconds.setdefault(rate, []).append(forward_s)
    rates = {rate: ratio_of_sums(flops[rate], seconds[rate]) for rate in flops}
    backward_ratio = DEFAULT_BACKWARD_RATIO
    if whole_layers:
        forward, backward = zip(*whole_layers.values(), strict=True)
        backward_ratio = ratio_of_sums(backward, forward)
    return DeviceModel(
        str(name),
        kind,
        memory_bytes(device),
        rates or {"float32": DEFAULT_FLOPS_PER_S},
        bytes_per_s,
        overhead_s=host_s[0],
        backward_overhead_s=host_s[1],
        backward_ratio=backward_ratio,
        emulated=name.emulated,
        operators={
            w.key: with_dispatch(models[w.key], host_s, kind == "cuda") for w in layers
        },
        others={w.key: models[w.key] for w in others},
        identity=device_identity(device, name.speed),
        measured=conditions(device, memory_format),
    )


def _fitted(
    workload: Workload, samples: Mapping[float, Passes], device: torch.device
) -> OperatorModel:
    """Fits the passes of a workload.

    More pixels never take less; whole blocks of filters or channels may be faster than a
    part.
    """
    if not isinstance(workload, LayerWorkload):
        return operator_model(samples)
    rising = workload.axis == "pixels"
    return operator_model(samples, rising, workload.granularity(device))
