"""What whole steps say of models of operators and messages, and what the planner makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hetconv
from hetconv.autotune.measure import calibrate as module
from hetconv.autotune.measure.calibrate import (
    LATENCY_FACTORS,
    MAX_FACTOR,
    Observation,
    calibrate,
    calibrate_devices,
    calibrate_messages,
)
from hetconv.cost.estimator import StepEstimator
from hetconv.planner.candidates import Candidates
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.sharding.split import KINDS, Split, SplitKind
from tests.nets import SuperResolution

PAIR = ClusterProfile.from_devices(["cpu", "cpu@0.5"], link="pcie3-x16")
DEVIATIONS = module.DEVICE_DEVIATION, module.KIND_DEVIATION


@pytest.fixture(autouse=True)
def _steps_far_from_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what plans say is nearly believed, and rounding is not what these tests are about."""
    monkeypatch.setattr(module, "DEVICE_DEVIATION", 0.4)
    monkeypatch.setattr(module, "KIND_DEVIATION", 0.1)


def factors(*plans: tuple[Mapping[str, float], float, float]) -> dict[str, float]:
    """By kind, of a device that was predicted to take seconds by kind, and took others
    with a standard error.
    """
    observations = [Observation({}, 1.0, [took], error) for _, took, error in plans]
    work = [np.array([of.get(kind, 0.0) for kind in KINDS]) for of, _, _ in plans]
    return dict(
        zip(KINDS, module._likeliest_factors(0, observations, work), strict=True)
    )


def near(factor: float) -> Any:
    """A plan is never believed altogether."""
    return pytest.approx(factor, rel=0.01)


def test_kinds_that_no_plan_had_are_corrected_like_the_device() -> None:
    found = factors(({"height": 1.0}, 1.2, 0.0), ({"filter": 2.0}, 2.4, 0.0))
    assert all(factor == pytest.approx(1.2, rel=0.02) for factor in found.values())
    assert 1 < found["width"] < found["height"] < 1.2
    assert found["height"] == pytest.approx(found["filter"])


def test_plans_count_as_much_as_they_have_of_a_kind() -> None:
    found = factors(
        ({"height": 3.0, "filter": 1.0}, 4.4, 0.0), ({"filter": 1.0}, 0.9, 0.0)
    )
    assert found["filter"] < found["width"] < found["height"]
    assert (3 * found["height"] + found["filter"]) / 4.4 == pytest.approx(1, abs=0.04)
    assert found["filter"] == pytest.approx(0.9, abs=0.04)


def test_a_noisy_plan_of_a_kind_moves_it_little_beside_others() -> None:
    quiet = [({"height": 1.0}, 1.0, 0.0)] * 4
    sure, noisy = (({"filter": 1.0}, 1.3, error) for error in (0.0, 0.3))
    by_sure, by_noisy = factors(*quiet, sure), factors(*quiet, noisy)
    assert by_sure["filter"] > 1.2
    assert 1 < by_noisy["filter"] < 1.06
    assert by_noisy["height"] == near(1.0)
    assert factors(*quiet, *[noisy] * 30)["filter"] > 1.15


def test_operators_are_believed_until_several_plans_say_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, deviation in zip(
        ("DEVICE_DEVIATION", "KIND_DEVIATION"), DEVIATIONS, strict=True
    ):
        monkeypatch.setattr(module, name, deviation)
    once, often = (
        factors(*[({"height": 1.0}, 1.3, 0.0)] * times)["height"] for times in (1, 6)
    )
    assert 1.1 < once < 1.22
    assert 1.25 < often < 1.3


def estimator(profile: ClusterProfile = PAIR) -> StepEstimator:
    graph = hetconv.capture(SuperResolution(), torch.zeros(2, 3, 24, 20))
    return StepEstimator(graph, profile, "infer")


def whole_models(of: StepEstimator) -> dict[str, dict[str, Split]]:
    return Candidates(of.graph, of.profile, of.mode).whole_models()


def observation(
    of: StepEstimator, splits: Mapping[str, Split], factor: Sequence[float] = (1.0, 1.0)
) -> Observation:
    """A step in which each device computes so many times as long as is predicted."""
    prediction, costs = of.estimate(splits)
    compute_s = [
        sum(cost.forward_s[rank] for cost in costs.values()) * factor[rank]
        for rank in range(of.profile.world)
    ]
    return Observation(splits, prediction.step_s, compute_s, 0.0)


def test_nothing_is_corrected_by_nothing() -> None:
    assert calibrate(estimator(), []) == PAIR


def test_a_calibrated_profile_predicts_what_was_measured() -> None:
    """Of layers, of plans of one kind, on each device."""
    before = estimator()
    splits = whole_models(before)["uneven height split"]
    seen = observation(before, splits, (1.3, 0.8))
    found = calibrate_devices(before, [seen])
    assert [d.corrections["height"] for d in found.devices] == [near(1.3), near(0.8)]
    again = observation(StepEstimator(before.graph, found, "infer"), splits)
    assert list(again.compute_s) == [near(s) for s in seen.compute_s]


def test_corrections_come_on_top_of_those_that_the_profile_has() -> None:
    corrected = replace(PAIR.devices[0], corrections={"height": 1.5, "width": 1.1})
    before = estimator(replace(PAIR, devices=(corrected, PAIR.devices[1])))
    splits = whole_models(before)["uneven height split"]
    fast, _ = calibrate_devices(
        before, [observation(before, splits, (2 / 3, 1.0))]
    ).devices
    assert fast.corrections["height"] == near(1.0)
    assert fast.corrections["width"] / 1.1 == pytest.approx(2 / 3, rel=0.05)


def test_a_device_with_little_work_says_nothing() -> None:
    graph = hetconv.capture(SuperResolution(), torch.zeros(1, 3, 240, 240))
    before = StepEstimator(graph, PAIR, "infer")
    way = Candidates(graph, PAIR, "infer")
    for weights in ((1.0, 0.0), (0.9, 0.1)):
        seen = observation(before, way.whole("height", weights), (1.2, 1.2))
        fast, slow = calibrate_devices(before, [seen]).devices
        assert fast.corrections
        assert slow == PAIR.devices[1]


@pytest.mark.parametrize("factor", [100.0, 0.001])
def test_a_factor_is_not_believed_beyond_reason(factor: float) -> None:
    before = estimator()
    splits = whole_models(before)["uneven height split"]
    found = calibrate_devices(before, [observation(before, splits, (factor, 1.0))])
    expected = MAX_FACTOR if factor > 1 else 1 / MAX_FACTOR
    assert found.devices[0].corrections["height"] == expected


@pytest.mark.parametrize("kind", ["height", "filter"])
def test_shares_are_balanced_by_corrected_seconds(kind: SplitKind) -> None:
    graph = hetconv.capture(
        nn.Conv2d(256, 96, 3, padding=1), torch.ones(1, 256, 96, 96)
    )
    profile = ClusterProfile.from_devices(["cpu", "cpu"], link="nvlink3")
    slower = replace(profile.devices[1], corrections={kind: 2.0})
    even, uneven = (
        Candidates(graph, replace(profile, devices=(profile.devices[0], d)), "train")
        .balanced(kind)[""]
        .sizes
        for d in (profile.devices[1], slower)
    )
    assert even == (48, 48)
    assert uneven == (64, 32)


def observed(at_work: ClusterProfile, error: float = 0.0) -> list[Observation]:
    """Steps of every kind in which a small net can be cut."""
    of = estimator(at_work)
    return [
        observation(of, splits)._replace(error=error)
        for name, splits in whole_models(estimator()).items()
        if name.startswith("uneven")
    ]


@pytest.mark.parametrize(
    "at_work",
    [
        {},
        {"latency_at_work": 8.0},
        {"bytes_at_work": 2.0},
        {"latency_at_work": 4.0, "bytes_at_work": 2.0},
        {"overlap": 0.0},
    ],
    ids=str,
)
def test_what_messages_take_at_work_is_found_from_what_steps_took(
    at_work: Mapping[str, Any],
) -> None:
    expected = replace(PAIR, **at_work)
    assert calibrate_messages(estimator(), observed(expected)) == expected


def test_noisy_steps_say_less_of_messages() -> None:
    slow = replace(PAIR, latency_at_work=2.0)
    assert calibrate_messages(estimator(), observed(slow, error=0.0)) == slow
    assert calibrate_messages(estimator(), observed(slow, error=1e3)) == PAIR


def test_messages_are_not_believed_to_take_more_than_reason_has() -> None:
    late = [one._replace(step_s=1e9) for one in observed(PAIR)]
    assert calibrate_messages(estimator(), late).latency_at_work == LATENCY_FACTORS[-1]
