"""Calibration of a profile by measured whole steps.

Models of devices and links are fitted to operators and messages one by one. In whole
steps both take other times; here their models are corrected by what steps took. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import exp, hypot, log
from typing import NamedTuple

import numpy as np

from hetconv.cost.estimator import StepEstimator
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.sharding.split import KINDS, Split

MAX_FACTOR = 2.0  # by which a device is corrected, up and down
# A device with less than this part of the busiest one's work shows what calls take, more
# than layers.
MIN_PART_OF_BUSIEST = 0.5
# How many times the latency of links at rest, and the time of bytes, messages may have.
LATENCY_FACTORS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
BYTES_FACTORS = (1.0, 0.6, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0)
OVERLAPS = (0.0, 0.25, 0.5, 0.75, 1.0)
# How much better, in the sum of logarithms, steps must be predicted for each e-fold by
# which messages leave their rest, and for all of the halos being hidden in place of
# none. Plans that send next to nothing say nothing of messages, but noise would.
LATENCY_PENALTY, BYTES_PENALTY, OVERLAP_PENALTY = 0.02, 0.05, 0.05
# Standard deviations, in logarithms, of whole steps from what layers took one by one: on
# a device, for a kind of split there, and of a plan from both.
DEVICE_DEVIATION, KIND_DEVIATION, PLAN_DEVIATION = 0.07, 0.03, 0.05


class Observation(NamedTuple):
    """A plan's step as measured.

    Attributes:
        splits: the plan, by layer.
        step_s: seconds of the whole step.
        compute_s: seconds in which each rank computed layers.
        error: standard error of the seconds, in logarithms.
    """

    splits: Mapping[str, Split]
    step_s: float
    compute_s: Sequence[float]
    error: float


def calibrate(
    estimator: StepEstimator, observations: Sequence[Observation]
) -> ClusterProfile:
    """Corrects devices first, then messages by what is left.

    Args:
        estimator: predicts steps of the model from the profile to correct.
        observations: measured steps of several plans.

    Returns:
        The profile with corrected devices, latency, bandwidth and overlap.
    """
    corrected = calibrate_devices(estimator, observations)
    return calibrate_messages(
        StepEstimator(estimator.graph, corrected, estimator.mode), observations
    )


def calibrate_devices(
    estimator: StepEstimator, observations: Sequence[Observation]
) -> ClusterProfile:
    """Corrects what layers take on each device.

    What a plan took on a device, of what was predicted, is a factor of the device,
    times one of each kind of split for the part of its work that is of this kind, times
    noise: of these, in logarithms, the likeliest (Gaussian, with deviations as above
    beforehand). So kinds that no plan had are corrected like the device, and one noisy
    plan of a kind moves it little.

    Args:
        estimator: predicts steps from the profile to correct.
        observations: measured steps; one in which a device had little work says
            nothing of it, and a device of which nothing else is known stays as it was.
    """
    predicted = [_compute_by_kind(estimator, one.splits) for one in observations]
    devices = []
    for rank, device in enumerate(estimator.profile.devices):
        telling = [
            (one, work[rank])
            for one, work in zip(observations, predicted, strict=True)
            if one.compute_s[rank] > 0
            and work[rank].sum() > MIN_PART_OF_BUSIEST * work.sum(axis=1).max()
        ]
        if telling:
            factors = _likeliest_factors(rank, *zip(*telling, strict=True))
            corrections: dict[str, float] = {
                kind: clamped(device.corrections.get(kind, 1.0) * factor)
                for kind, factor in zip(KINDS, factors, strict=True)
            }
            device = replace(device, corrections=corrections)
        devices.append(device)
    return replace(estimator.profile, devices=tuple(devices))


def _compute_by_kind(
    estimator: StepEstimator, splits: Mapping[str, Split]
) -> np.ndarray:
    """Predicts seconds of layers: (ranks, `KINDS`)."""
    seconds = np.zeros((estimator.profile.world, len(KINDS)))
    for name, cost in estimator.estimate(splits)[1].items():
        for by_rank in filter(None, (cost.forward_s, cost.backward_s)):
            seconds[:, KINDS.index(splits[name].kind)] += by_rank
    return seconds


def _likeliest_factors(
    rank: int, observations: Sequence[Observation], work: Sequence[np.ndarray]
) -> list[float]:
    """Returns a factor for each of `KINDS` on one device.

    ``work``: (`KINDS`,) predicted seconds of each observation there.
    """
    seconds = np.array([of_plan.sum() for of_plan in work])
    parts = np.array(work) / seconds[:, None]
    measured = np.array([one.compute_s[rank] for one in observations])
    noise = np.diag([PLAN_DEVIATION**2 + one.error**2 for one in observations])
    between_plans = DEVICE_DEVIATION**2 + KIND_DEVIATION**2 * parts @ parts.T + noise
    kinds_with_plans = DEVICE_DEVIATION**2 + KIND_DEVIATION**2 * parts.T
    log_factors = kinds_with_plans @ np.linalg.solve(
        between_plans, np.log(measured / seconds)
    )
    return [exp(factor) for factor in log_factors.tolist()]


def clamped(factor: float) -> float:
    """Returns a factor within `MAX_FACTOR`."""
    return min(max(factor, 1 / MAX_FACTOR), MAX_FACTOR)


def calibrate_messages(
    estimator: StepEstimator, observations: Sequence[Observation]
) -> ClusterProfile:
    """Chooses what messages take between devices that work.

    Args:
        estimator: predicts steps from the profile to correct.
        observations: measured steps of several plans.

    Returns:
        The profile with those latency, bandwidth and part of halos that is hidden with
        which the steps are off by the least factors.
    """
    profile = estimator.profile
    walked = [estimator.walk(one.splits) for one in observations]
    weights = [
        PLAN_DEVIATION / hypot(PLAN_DEVIATION, one.error) for one in observations
    ]

    def loss(tried: ClusterProfile) -> float:
        trial = estimator.over(tried)
        total = LATENCY_PENALTY * abs(log(tried.latency_at_work))
        total += BYTES_PENALTY * abs(log(tried.bytes_at_work))
        total += OVERLAP_PENALTY * abs(tried.overlap - profile.overlap)
        for of_plan, weight, one in zip(walked, weights, observations, strict=True):
            total += weight * abs(log(trial.walked_s(of_plan) / one.step_s))
        return total

    at_work = [
        replace(profile, latency_at_work=latency, bytes_at_work=of_bytes)
        for latency, of_bytes in product(LATENCY_FACTORS, BYTES_FACTORS)
    ]
    likeliest = min(at_work, key=loss)
    overlapping = [replace(likeliest, overlap=part) for part in OVERLAPS]
    return min((likeliest, *overlapping), key=loss)
