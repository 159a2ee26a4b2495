"""What whole steps teach of the models that were fitted to operators one by one. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from math import exp, hypot, log, sqrt
from typing import NamedTuple

import numpy as np

from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.device_model import DeviceModel
from hetconv.sharding.split import KINDS

MOST = 2.0  # a factor that is believed, up and down
# of what the busiest device computes: who has less shows what calls take, more than
# layers
HARDLY = 0.5
LATENCIES = (
    1.0,
    2.0,
    4.0,
    8.0,
    16.0,
    32.0,
    64.0,
)  # that messages may have, of links' at rest; or between two of these
BYTES = (
    1.0,
    0.6,
    1.5,
    2.0,
    3.0,
    5.0,
    8.0,
    12.0,
)  # times that their bytes may take, of what they take at rest; 1 first
OVERLAPS = (0.0, 0.25, 0.5, 0.75, 1.0)  # parts of halos that may be hidden
# How much better, in the sum of logarithms, steps must be predicted for each e-fold by
# which messages leave their rest, and for halos of which no more than one layer has
# shown is hidden, but all, or the other way round:
UNLIKELY_LATENCY, UNLIKELY_BYTES = (
    0.02,
    0.05,
)  # what hardly changes those that ran may change others out of reason
UNLIKELY_OVERLAP = 0.05
# In logarithms, how far whole steps are from what layers took one by one: on a device,
# and for a kind of split there; and how far a plan is from both.
OF_DEVICE, OF_KIND, MISFIT = 0.07, 0.03, 0.05
Seconds = Mapping[str, float]  # by kind of split


class Observed(NamedTuple):
    """A plan's step: by rank, the seconds of layers as predicted, by kind of split, and
    all together as measured.

    ``noise``: the standard errors of the latter, in logarithms.
    """

    predicted: Sequence[Seconds]
    measured: Sequence[float]
    noise: Sequence[float]


class AtWork(NamedTuple):
    """How many times the latency of links, and the time of bytes, messages have between
    devices that work.

    ``overlap``: the part of halos that is hidden, if that is not what one layer has shown.
    """

    latency: float = 1.0
    of_bytes: float = 1.0
    overlap: float | None = None


class Learnt(NamedTuple):
    """``corrections`` of each device, what it and messages take ``at_work``, and the
    slowness of devices ``alone``.
    """

    corrections: list[dict[str, float]]
    at_work: AtWork = AtWork()
    alone: float = 1.0


def with_learnt(profile: ClusterProfile, learnt: Learnt) -> ClusterProfile:
    """Every device alone is as slow as the one that was measured, so that none is
    preferred for not having been.
    """
    latency, of_bytes, overlap = learnt.at_work
    devices = []
    for device, factors in zip(profile.devices, learnt.corrections, strict=True):
        alone = (
            replace(device.alone, slowness=learnt.alone)
            if device.alone is not None
            else None
        )
        devices.append(replace(device, corrections=factors, alone=alone))
    overlap = profile.overlap if overlap is None else overlap
    return replace(
        profile,
        devices=tuple(devices),
        latency_at_work=latency,
        bytes_at_work=of_bytes,
        overlap=overlap,
    )


def corrected(
    devices: Sequence[DeviceModel], observed: Sequence[Observed]
) -> list[dict[str, float]]:
    """Each device's `DeviceModel.corrections` by which it would have been predicted
    what was measured, as far as known.

    What a plan took on a device, of what was predicted, is a factor of the device,
    times one of each kind for the part of its work that is of this kind, times noise:
    of these, in logarithms, what is likeliest (Gaussian, with `OF_DEVICE` and `OF_KIND`
    beforehand). So kinds that no plan had are corrected like the device, and one noisy
    plan of a kind moves it little. Plans where a device had `HARDLY` a part do not
    count; a device of which nothing else was observed stays as it was.
    """
    found = []
    for rank, device in enumerate(devices):
        seen = [
            plan
            for plan in observed
            if plan.measured[rank] > 0 and _work(plan, rank) > HARDLY * _most(plan)
        ]
        found.append(
            _likeliest(device, rank, seen) if seen else dict(device.corrections)
        )
    return found


def _work(plan: Observed, rank: int) -> float:
    return sum(plan.predicted[rank].values())


def _most(plan: Observed) -> float:
    return max(_work(plan, rank) for rank in range(len(plan.predicted)))


def _likeliest(
    device: DeviceModel, rank: int, seen: Sequence[Observed]
) -> dict[str, float]:
    shares = np.array(
        [
            [plan.predicted[rank].get(kind, 0.0) / _work(plan, rank) for kind in KINDS]
            for plan in seen
        ]
    )
    factors = np.array([log(plan.measured[rank] / _work(plan, rank)) for plan in seen])
    noise = np.diag([MISFIT**2 + plan.noise[rank] ** 2 for plan in seen])
    plans = (
        OF_DEVICE**2 + OF_KIND**2 * shares @ shares.T + noise
    )  # covariances with each other
    kinds = OF_DEVICE**2 + OF_KIND**2 * shares.T  # and of kinds with plans
    learnt, was = kinds @ np.linalg.solve(plans, factors), device.corrections
    return {
        kind: believed(was.get(kind, 1.0) * exp(by))
        for kind, by in zip(KINDS, learnt.tolist(), strict=True)
    }


def believed(factor: float) -> float:
    return min(max(factor, 1 / MOST), MOST)


def at_work(
    predicted: Callable[[AtWork], Sequence[float]],
    measured: Sequence[float],
    noise: Sequence[float],
    overlap: float = 1.0,
) -> AtWork:
    """With which of `LATENCIES`, `BYTES` and `OVERLAPS` the plans' steps would have
    been predicted best: off by the least factor.

    ``predicted``: the steps when it is so. ``noise`` of what was measured, in
    logarithms: the more, the less it counts. The nearer to ones, and to the ``overlap``
    that one layer has shown, the likelier a way is by itself: plans that send next to
    nothing tell nothing of bytes, but noise would.
    """
    weights = [MISFIT / hypot(MISFIT, of_plan) for of_plan in noise]

    @cache
    def off(way: AtWork) -> float:
        by_itself = UNLIKELY_LATENCY * abs(log(way.latency)) + UNLIKELY_BYTES * abs(
            log(way.of_bytes)
        )
        by_itself += (
            UNLIKELY_OVERLAP * abs(way.overlap - overlap)
            if way.overlap is not None
            else 0.0
        )
        return by_itself + sum(
            w * abs(log(p / m))
            for w, p, m in zip(weights, predicted(way), measured, strict=True)
        )

    likely = min(
        (AtWork(*way) for way in product(LATENCIES, BYTES, (None, *OVERLAPS[::2]))),
        key=off,
    )
    between = [
        x
        for x in (likely.latency / sqrt(2), likely.latency * sqrt(2))
        if LATENCIES[0] <= x <= LATENCIES[-1]
    ]
    ways = (likely._replace(latency=x, of_bytes=y) for x, y in product(between, BYTES))
    likely = min((likely, *ways), key=off)
    return min(
        (likely, *(likely._replace(overlap=part) for part in (None, *OVERLAPS))),
        key=off,
    )
