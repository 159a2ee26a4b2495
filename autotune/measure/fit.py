"""From samples to models: plain numbers in, frozen models out. No clock, no tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from math import log
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch

from hetconv.autotune.launch.throttle import DeviceName
from hetconv.cost.operator_cost import arithmetic, operator_key
from hetconv.schemas.cluster_profile import (
    Alone,
    Curve,
    DeviceModel,
    LinkModel,
    OperatorModel,
)

from .device_info import conditions, identity, memory_bytes
from .layer_workloads import AXES, Layer, Subject, work
from .other_workloads import Call, Other
from .sampling import Passes, Steps
from .timer import Samples

LEAST_LATENCY_S = 1e-7


def stepped(known: Curve, steps: Steps) -> Curve:
    """Where nothing was measured within a grain, any part of it takes what the whole grain does."""
    points = dict(zip(known.shares, known.seconds, strict=True))
    for lo, hi in steps.grains:
        first, end = (lo + 1) / steps.extent, hi / steps.extent
        if not any(first <= share < end for share in known.shares):
            points |= {first: known.at(end), end: known.at(end)}
    return Curve(
        tuple(sorted(points)), tuple(points[share] for share in sorted(points))
    )


def curve(samples: Mapping[float, Sequence[float]], rising: bool = True) -> Curve:
    """A piecewise-linear curve through the medians of the seconds at each share.

    Of what must be ``rising``: where a larger share was measured faster (noise),
    neighbours are pooled to their mean (isotonic regression).
    """
    shares = sorted(samples)
    if not rising:
        return Curve(tuple(shares), tuple(median(samples[s]) for s in shares))
    pooled: list[list[float]] = []
    for share in shares:
        pooled.append([median(samples[share]), 1])
        while len(pooled) > 1 and pooled[-2][0] > pooled[-1][0]:
            (a, m), (b, n) = pooled[-2:]
            pooled[-2:] = [[(a * m + b * n) / (m + n), m + n]]
    seconds = [value for value, count in pooled for _ in range(int(count))]
    return Curve(tuple(shares), tuple(seconds))


def operator(
    samples: Mapping[float, Passes], rising: bool = True, steps: Steps | None = None
) -> OperatorModel:
    """Of an operator that was measured at some shares, all at one speed of its device,
    see `at_pulse` and `curve`.

    Backward at some of these, one at least. In ``steps``, if it is computed so, see `stepped`.
    """
    forward = {x: p.forward for x, p in samples.items()}
    backward = {x: p.backward for x, p in samples.items() if p.backward}
    ahead, back = curve(forward, rising), curve(backward, rising)
    return (
        OperatorModel(stepped(ahead, steps), stepped(back, steps))
        if steps
        else OperatorModel(ahead, back)
    )


def at_pulse(
    samples: Mapping[float, Passes], pulse_s: float | None
) -> Mapping[float, Passes]:
    """As they would be on the device when a pulse takes it ``pulse_s``; as they are, if
    that is not known.
    """
    return (
        samples
        if pulse_s is None
        else {at: passes.at(pulse_s) for at, passes in samples.items()}
    )


def usual_pulse(found: Iterable[Mapping[float, Passes]]) -> float | None:
    """The median of pulses while all these were measured, if anything was."""
    pulses = _pulses(found)
    return median(pulses) if pulses else None


def pulse_at_rest(
    usual_s: float, resting: float, alone: Iterable[Mapping[float, Passes]]
) -> float:
    """What a pulse takes while all others rest, if that is ``resting`` times what it
    usually takes while they work.

    No longer than that; and neither shorter nor longer than in most of what was
    measured ``alone``, but for a tenth at either end: cores may be in each other's way
    for some seconds, hyperthreads of one core above all, and take twice as long
    together then.
    """
    pulses = _pulses(alone)
    if len(pulses) < 2:
        return min(usual_s * resting, usual_s)
    tenths = quantiles(pulses, n=10, method="inclusive")
    return min(max(usual_s * resting, tenths[0]), tenths[-1], usual_s)


def slow_phases(found: Iterable[Mapping[float, Passes]]) -> float:
    """How many times as long as usually a pulse took in the slowest tenth of all that
    was measured.
    """
    pulses = _pulses(found)
    return ninetieth(pulses) / median(pulses) if pulses else 1.0


def _pulses(found: Iterable[Mapping[float, Passes]]) -> list[float]:
    return [passes.pulse_s for samples in found for passes in samples.values()]


def ninetieth(seconds: Sequence[float]) -> float:
    """The 90 % quantile."""
    return (
        quantiles(seconds, n=10, method="inclusive")[-1]
        if len(seconds) > 1
        else seconds[0]
    )


def called(
    kernels: OperatorModel, host_s: tuple[float, float], ahead: bool
) -> OperatorModel:
    """With the host's seconds of a call, forward and backward: added, unless it goes
    ``ahead`` while kernels run.
    """

    def both(computing: Curve, host: float) -> Curve:
        return replace(
            computing,
            seconds=tuple(
                max(s, host) if ahead else s + host for s in computing.seconds
            ),
        )

    return replace(
        kernels,
        forward=both(kernels.forward, host_s[0]),
        backward=both(kernels.backward, host_s[1]),
    )


def whole(model: OperatorModel) -> tuple[float, float]:
    """Seconds of both passes at the full share."""
    return model.forward.at(1.0), model.backward.at(1.0)


def line(samples: Mapping[int, Sequence[float]]) -> tuple[float, float]:
    """(seconds of nothing, seconds per byte) of the line that is off by the least
    factors, by message size.

    Of medians; off by a factor, so that small messages count as large ones do, and half
    as much as twice; the factors' logarithms are added, not squared, so that one size
    that was disturbed does not count. Lines are tried through two of the points, and
    through one and the origin, for no time is negative.
    """
    points = [(size, median(times)) for size, times in sorted(samples.items())]
    lines = [(0.0, seconds / size) for size, seconds in points]
    for (small, quick), (large, slow) in combinations(points, 2):
        slope = (slow - quick) / (large - small)
        if slope > 0 and quick >= small * slope:
            lines.append((quick - small * slope, slope))
    return min(
        lines,
        key=lambda known: sum(
            abs(log((known[0] + size * known[1]) / s)) for size, s in points
        ),
    )


def link(
    there: Mapping[int, Sequence[float]], back: Mapping[int, Sequence[float]]
) -> LinkModel:
    """Latency and seconds per byte each way, from one-way times by message size
    (bytes), see `line`.
    """
    (latency, per_byte), (other, back_per_byte) = line(there), line(back)
    return LinkModel(
        max((latency + other) / 2, LEAST_LATENCY_S),
        per_byte,
        back_s_per_byte=back_per_byte,
    )


def ratio(measured: Iterable[float], predicted: Iterable[float]) -> float:
    """The total of some seconds over that of others."""
    return sum(measured) / max(sum(predicted), 1e-12)


def roofline(measured: Sequence[tuple[float, float]]) -> float:
    """Work per second from (work, seconds) pairs, weighted by seconds: total over total."""
    return ratio((work for work, _ in measured), (seconds for _, seconds in measured))


def backward_ratio(forward: Sequence[float], backward: Sequence[float]) -> float:
    """How much longer backward takes than forward, over all measured operators."""
    return ratio(backward, forward)


UNKNOWN = 1e9  # operations per second, where no layer was measured


def device_model(
    name: DeviceName,
    device: torch.device,
    samples: Samples,
    subjects: Sequence[Subject],
    bandwidth: float,
    resting: float,
) -> DeviceModel:
    """The model of this rank's device from its samples; the roofline is fitted to the
    whole operators among them.

    All as on the device when it is as fast as it mostly was. ``resting``: see `timer.resting`.
    """
    kind: Any = device.type
    pulse_s = usual_pulse(samples.get(s.key, {}) for s in subjects if not s.alone)
    by_themselves = [samples.get(s.key, {}) for s in subjects if s.alone]
    alone_s = (
        pulse_at_rest(pulse_s, resting, by_themselves) if pulse_s is not None else None
    )
    on_parts, alone = (
        _fitted(samples, [s for s in subjects if s.alone is a], device, own_s)
        for a, own_s in ((False, pulse_s), (True, alone_s))
    )
    bare = {
        (s.op, s.dtype): on_parts.bare[s.key]
        for s in subjects
        if isinstance(s, Layer) and s.key in on_parts.bare
    }
    work_of: dict[str, list[tuple[float, float]]] = {}
    for (op, dtype), (forward, _) in bare.items():
        rate = arithmetic(op, dtype) if kind == "cuda" else dtype
        work_of.setdefault(rate, []).append((work(op), forward))
    rates = {rate: roofline(measured) for rate, measured in work_of.items()}
    by_itself = {
        operator_key(s.op, axis, s.dtype): _rested(s, alone, on_parts)
        for s in subjects
        if isinstance(s, Layer) and s.key in alone.layers
        for axis in AXES
    }
    return DeviceModel(
        str(name),
        kind,
        memory_bytes(device),
        rates or {"float32": UNKNOWN},
        bandwidth,
        on_parts.host_s[0],
        backward_ratio(*zip(*bare.values(), strict=True)) if bare else 2.0,
        name.emulated,
        on_parts.layers,
        identity(name),
        conditions(device),
        on_parts.host_s[1],
        on_parts.others,
        Alone(by_itself, alone.others, *alone.host_s, pulse_s=alone_s)
        if by_itself
        else None,
        pulse_s=pulse_s,
    )


class _Fitted(NamedTuple):
    """Of one regime, by key: layers, as calls by the host; their kernels ``bare`` and
    whole; the others.
    """

    host_s: tuple[float, float]
    layers: dict[str, OperatorModel]
    bare: dict[str, tuple[float, float]]
    others: dict[str, OperatorModel]


def _fitted(
    samples: Samples,
    subjects: Sequence[Subject],
    device: torch.device,
    pulse_s: float | None,
) -> _Fitted:
    known, ahead = (
        [subject for subject in subjects if samples.get(subject.key)],
        device.type == "cuda",
    )
    models = {
        s.key: operator(
            at_pulse(samples[s.key], pulse_s), _rising(s), _steps(s, device)
        )
        for s in known
    }
    host_s = next(
        (whole(models[s.key]) for s in known if isinstance(s, Call)), (0.0, 0.0)
    )
    kernels = {s.key: models[s.key] for s in known if isinstance(s, Layer)}
    return _Fitted(
        host_s,
        {key: called(model, host_s, ahead) for key, model in kernels.items()},
        {key: whole(model) for key, model in kernels.items()},
        {f"{s.kind} {s.dtype}": models[s.key] for s in known if isinstance(s, Other)},
    )


def _rising(subject: Subject) -> bool:
    """Whether more of it never takes less: kernels may take whole blocks of filters or
    channels faster than a part.
    """
    return not isinstance(subject, Layer) or subject.axis == "pixels"


def _steps(subject: Subject, device: torch.device) -> Steps | None:
    return subject.steps(device) if isinstance(subject, Layer) else None


def _rested(layer: Layer, alone: _Fitted, on_parts: _Fitted) -> tuple[float, float]:
    """Seconds of the whole layer while others rest: no more than while all are at work,
    unless noise has it so.
    """
    own, beside = (
        whole(alone.layers[layer.key]),
        on_parts.layers.get(operator_key(layer.op, AXES[0], layer.dtype)),
    )
    forward, backward = whole(beside) if beside is not None else own
    return min(own[0], forward), min(own[1], backward)
