"""From samples to models: plain numbers in, frozen models out. No clock, no tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from math import log
from statistics import median, quantiles

from hetconv.schemas.cluster_profile import Curve, LinkModel, OperatorModel

from .sampling import Passes, Steps

LEAST_LATENCY_S = 1e-7


def stepped(known: Curve, steps: Steps) -> Curve:
    """Where nothing was measured within a grain, any part of it takes what the whole grain does."""
    points = dict(zip(known.shares, known.seconds, strict=True))
    for lo, hi in steps.grains:
        first, end = (lo + 1) / steps.extent, hi / steps.extent
        if not any(first <= share < end for share in known.shares):
            points |= {first: known.at(end), end: known.at(end)}
    return Curve(tuple(sorted(points)), tuple(points[share] for share in sorted(points)))


def curve(samples: Mapping[float, Sequence[float]], rising: bool = True) -> Curve:
    """A piecewise-linear curve through the medians of the seconds at each share.

    Of what must be ``rising``: where a larger share was measured faster (noise), neighbours are pooled to their mean
    (isotonic regression).
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


def operator(samples: Mapping[float, Passes], rising: bool = True, steps: Steps | None = None) -> OperatorModel:
    """Of an operator that was measured at some shares, all at one speed of its device, see `at_pulse` and `curve`.

    Backward at some of these, one at least. In ``steps``, if it is computed so, see `stepped`.
    """
    forward = {x: p.forward for x, p in samples.items()}
    backward = {x: p.backward for x, p in samples.items() if p.backward}
    ahead, back = curve(forward, rising), curve(backward, rising)
    return OperatorModel(stepped(ahead, steps), stepped(back, steps)) if steps else OperatorModel(ahead, back)


def at_pulse(samples: Mapping[float, Passes], pulse_s: float | None) -> Mapping[float, Passes]:
    """As they would be on the device when a pulse takes it ``pulse_s``; as they are, if that is not known."""
    return samples if pulse_s is None else {at: passes.at(pulse_s) for at, passes in samples.items()}


def usual_pulse(found: Iterable[Mapping[float, Passes]]) -> float | None:
    """The median of pulses while all these were measured, if anything was."""
    pulses = _pulses(found)
    return median(pulses) if pulses else None


def pulse_at_rest(usual_s: float, resting: float, alone: Iterable[Mapping[float, Passes]]) -> float:
    """What a pulse takes while all others rest, if that is ``resting`` times what it usually takes while they work.

    No longer than that; and neither shorter nor longer than in most of what was measured ``alone``, but for a tenth at
    either end: cores may be in each other's way for some seconds, hyperthreads of one core above all, and take
    twice as long together then.
    """
    pulses = _pulses(alone)
    if len(pulses) < 2:
        return min(usual_s * resting, usual_s)
    tenths = quantiles(pulses, n=10, method="inclusive")
    return min(max(usual_s * resting, tenths[0]), tenths[-1], usual_s)


def slow_phases(found: Iterable[Mapping[float, Passes]]) -> float:
    """How many times as long as usually a pulse took in the slowest tenth of all that was measured."""
    pulses = _pulses(found)
    return ninetieth(pulses) / median(pulses) if pulses else 1.0


def _pulses(found: Iterable[Mapping[float, Passes]]) -> list[float]:
    return [passes.pulse_s for samples in found for passes in samples.values()]


def ninetieth(seconds: Sequence[float]) -> float:
    """The 90 % quantile."""
    return quantiles(seconds, n=10, method="inclusive")[-1] if len(seconds) > 1 else seconds[0]


def called(kernels: OperatorModel, host_s: tuple[float, float], ahead: bool) -> OperatorModel:
    """With the host's seconds of a call, forward and backward: added, unless it goes ``ahead`` while kernels run."""

    def both(computing: Curve, host: float) -> Curve:
        return replace(computing, seconds=tuple(max(s, host) if ahead else s + host for s in computing.seconds))

    return replace(kernels, forward=both(kernels.forward, host_s[0]), backward=both(kernels.backward, host_s[1]))


def whole(model: OperatorModel) -> tuple[float, float]:
    """Seconds of both passes at the full share."""
    return model.forward.at(1.0), model.backward.at(1.0)


def line(samples: Mapping[int, Sequence[float]]) -> tuple[float, float]:
    """(seconds of nothing, seconds per byte) of the line that is off by the least factors, by message size.

    Of medians; off by a factor, so that small messages count as large ones do, and half as much as twice; the factors'
    logarithms are added, not squared, so that one size that was disturbed does not count. Lines are tried through two
    of the points, and through one and the origin, for no time is negative.
    """
    points = [(size, median(times)) for size, times in sorted(samples.items())]
    lines = [(0.0, seconds / size) for size, seconds in points]
    for (small, quick), (large, slow) in combinations(points, 2):
        slope = (slow - quick) / (large - small)
        if slope > 0 and quick >= small * slope:
            lines.append((quick - small * slope, slope))
    return min(lines, key=lambda known: sum(abs(log((known[0] + size * known[1]) / s)) for size, s in points))


def link(there: Mapping[int, Sequence[float]], back: Mapping[int, Sequence[float]]) -> LinkModel:
    """Latency and seconds per byte each way, from one-way times by message size (bytes), see `line`."""
    (latency, per_byte), (other, back_per_byte) = line(there), line(back)
    return LinkModel(max((latency + other) / 2, LEAST_LATENCY_S), per_byte, back_s_per_byte=back_per_byte)


def ratio(measured: Iterable[float], predicted: Iterable[float]) -> float:
    """The total of some seconds over that of others."""
    return sum(measured) / max(sum(predicted), 1e-12)


def roofline(measured: Sequence[tuple[float, float]]) -> float:
    """Work per second from (work, seconds) pairs, weighted by seconds: total over total."""
    return ratio((work for work, _ in measured), (seconds for _, seconds in measured))


def backward_ratio(forward: Sequence[float], backward: Sequence[float]) -> float:
    """How much longer backward takes than forward, over all measured operators."""
    return ratio(backward, forward)
