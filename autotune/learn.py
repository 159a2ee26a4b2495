"""What whole steps teach of the models that were fitted to operators one by one. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import log
from typing import NamedTuple

from hetconv.performance import DeviceModel
from hetconv.profile import ClusterProfile

MOST = 2.0  # a factor that is believed, up and down
HARDLY = 0.5  # of what the busiest device computes: who has less shows what calls take, more than layers
LATENCIES = (1.0, 2.0, 4.0, 8.0, 16.0)  # that messages may have, of what links have at rest
BYTES = (1.0, 0.6, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0)  # times that their bytes may take, of what they take at rest; 1 first
# How much better, in the sum of logarithms, steps must be predicted for each e-fold by which messages leave their rest:
UNLIKELY_LATENCY, UNLIKELY_BYTES = (
    0.02,
    0.05,
)  # what hardly changes the plans that ran would change others out of reason
Seconds = Mapping[str, float]  # by kind of split


class Observed(NamedTuple):
    """A plan's step: by rank, the seconds of layers as predicted, by kind of split, and all together as measured."""

    predicted: Sequence[Seconds]
    measured: Sequence[float]


class AtWork(NamedTuple):
    """How many times the latency of links, and the time of bytes, messages have between devices that work."""

    latency: float = 1.0
    of_bytes: float = 1.0


class Learnt(NamedTuple):
    """``corrections`` of each device, what messages take ``at_work``, and the ``slowness`` of devices alone."""

    corrections: list[dict[str, float]]
    at_work: AtWork = AtWork()
    slowness: float = 1.0


def with_learnt(profile: ClusterProfile, learnt: Learnt) -> ClusterProfile:
    """Every device alone is as slow as the one that was measured, so that none is preferred for not having been."""
    devices = []
    for device, factors in zip(profile.devices, learnt.corrections, strict=True):
        alone = replace(device.alone, slowness=learnt.slowness) if device.alone is not None else None
        devices.append(replace(device, corrections=factors, alone=alone))
    latency, of_bytes = learnt.at_work
    return replace(profile, devices=tuple(devices), latency_at_work=latency, bytes_at_work=of_bytes)


def corrected(devices: Sequence[DeviceModel], observed: Sequence[Observed]) -> list[dict[str, float]]:
    """Each device's `DeviceModel.corrections` by which it would have been predicted what was measured.

    What a plan took on a device, of what was predicted, counts for every kind that the plan has there, as much as was
    predicted for that kind; not where a device had `HARDLY` a part. Kinds of which nothing was observed stay as they
    were.
    """
    found = []
    for rank, device in enumerate(devices):
        weights: dict[str, float] = {}
        weighted: dict[str, float] = {}
        for plan in observed:
            work = [sum(of_device.values()) for of_device in plan.predicted]
            total = work[rank]
            if total > HARDLY * max(work) and plan.measured[rank] > 0:
                for kind, seconds in plan.predicted[rank].items():
                    weights[kind] = weights.get(kind, 0.0) + seconds
                    weighted[kind] = weighted.get(kind, 0.0) + seconds * plan.measured[rank] / total
        learnt = {kind: weighted[kind] / weight for kind, weight in weights.items() if weight > 0}
        was = device.corrections
        found.append({**was, **{k: believed(was.get(k, 1.0) * f) for k, f in learnt.items()}})
    return found


def believed(factor: float) -> float:
    return min(max(factor, 1 / MOST), MOST)


def at_work(predicted: Callable[[AtWork], Sequence[float]], measured: Sequence[float]) -> AtWork:
    """With which of `LATENCIES` and `BYTES` the plans' steps would have been predicted best: off by the least factor.

    ``predicted``: the steps with messages that are so many times as long under way. The nearer to ones, the likelier a
    way is by itself: plans that send next to nothing tell nothing of bytes, but noise would.
    """

    def off(way: AtWork) -> float:
        by_itself = UNLIKELY_LATENCY * abs(log(way.latency)) + UNLIKELY_BYTES * abs(log(way.of_bytes))
        return by_itself + sum(abs(log(p / m)) for p, m in zip(predicted(way), measured, strict=True))

    return min((AtWork(latency, of_bytes) for latency in LATENCIES for of_bytes in BYTES), key=off)
