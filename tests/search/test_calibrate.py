"""What whole steps teach of models of operators: plain numbers, and what the planner
makes of it.
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any

import pytest
import torch
from optuna.trial import create_trial
from torch import nn

import hetconv
from hetconv.autotune.measure.statistics import log_error_of_median
from hetconv.autotune.search import calibrate
from hetconv.autotune.search.calibrate import (
    BYTES,
    LATENCIES,
    MOST,
    AtWork,
    Observed,
    at_work,
    corrected,
)
from hetconv.autotune.search.plan_search import observed
from hetconv.cost.estimator import LayerCost, estimate
from hetconv.planner.candidates import Candidates
from hetconv.planner.make_plan import Contender, contenders
from hetconv.schemas.cluster_profile import ClusterProfile, DeviceModel
from hetconv.schemas.plan import Mode
from hetconv.sharding.layer_rules import SplitKind
from hetconv.sharding.split import KINDS
from tests.nets import SuperResolution

FAST, SLOW = ClusterProfile.from_devices(["cpu", "cpu@0.5"], link="nvlink3").devices


NOISE = 0.3
USUAL = calibrate.OF_DEVICE, calibrate.OF_KIND


@pytest.fixture(autouse=True)
def _steps_far_from_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what plans say is nearly believed, and rounding is not what these tests are about."""
    monkeypatch.setattr(calibrate, "OF_DEVICE", 0.4)
    monkeypatch.setattr(calibrate, "OF_KIND", 0.1)


def taught(
    device: DeviceModel, *plans: tuple[dict[str, float], float]
) -> dict[str, float]:
    return corrected(
        [device],
        [Observed([predicted], [measured], [0.0]) for predicted, measured in plans],
    )[0]


def near(factor: float) -> Any:
    """A plan is never believed altogether."""
    return pytest.approx(factor, rel=0.01)


def test_nothing_is_learnt_from_nothing() -> None:
    assert corrected([FAST, SLOW], []) == [{}, {}]
    assert (
        taught(FAST, ({}, 1.0))
        == taught(FAST, ({"height": 0.0}, 1.0))
        == taught(FAST, ({"height": 1.0}, 0.0))
        == {}
    )


def test_a_kind_is_corrected_by_what_it_took_on_each_device_for_itself() -> None:
    one = Observed([{"height": 1.5}, {"height": 2.0}], [1.8, 1.8], [0.0] * 2)
    fast, slow = corrected([FAST, SLOW], [one])
    assert (fast["height"], slow["height"]) == (near(1.2), near(0.9))


def test_kinds_that_no_plan_had_are_corrected_like_the_device() -> None:
    found = taught(FAST, ({"height": 1.0}, 1.2), ({"filter": 2.0}, 2.4))
    assert {*found} == {*KINDS}
    assert all(factor == pytest.approx(1.2, rel=0.02) for factor in found.values())
    assert 1 < found["width"] < found["height"] == found["filter"] < 1.2


def test_plans_count_as_much_as_they_have_of_a_kind() -> None:
    found = taught(FAST, ({"height": 3.0, "filter": 1.0}, 4.4), ({"filter": 1.0}, 0.9))
    assert found["filter"] < found["width"] < found["height"]
    assert (3 * found["height"] + found["filter"]) / 4.4 == pytest.approx(1, abs=0.04)
    assert found["filter"] == pytest.approx(0.9, abs=0.04)


def test_what_is_learnt_again_comes_on_top() -> None:
    known = replace(FAST, corrections={"height": 1.5, "width": 1.1})
    found = taught(known, ({"height": 3.0}, 2.0))
    assert found["height"] == near(1.0)
    assert found["width"] / 1.1 == pytest.approx(2 / 3, rel=0.05)
    assert taught(known) == known.corrections


def test_a_noisy_plan_of_a_kind_moves_it_little_beside_others() -> None:
    quiet = [Observed([{"height": 1.0}], [1.0], [0.0])] * 4
    sure, noisy = (
        Observed([{"filter": 1.0}], [1.3], [noise]) for noise in (0.0, NOISE)
    )
    (by_sure,), (by_noisy,) = (
        corrected([FAST], [*quiet, one]) for one in (sure, noisy)
    )
    assert by_sure["filter"] > 1.2
    assert 1 < by_noisy["filter"] < 1.06
    assert by_noisy["height"] == near(1.0)
    (often,) = corrected([FAST], [*quiet, *[noisy] * 30])
    assert often["filter"] > 1.15


def test_operators_are_believed_until_several_plans_say_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, usual in zip(("OF_DEVICE", "OF_KIND"), USUAL, strict=True):
        monkeypatch.setattr(calibrate, name, usual)
    once, often = (
        taught(FAST, *[({"height": 1.0}, 1.3)] * times)["height"] for times in (1, 6)
    )
    assert 1.1 < once < 1.22
    assert 1.25 < often < 1.3


def test_noise_is_that_of_the_median_of_rounds() -> None:
    assert (
        log_error_of_median([0.1])
        > log_error_of_median([0.1, 0.11])
        > log_error_of_median([0.1, 0.11] * 8)
        > log_error_of_median([0.1] * 9)
        == 0
    )
    assert log_error_of_median([0.0] * 5) == log_error_of_median([0.1])
    assert log_error_of_median([1.0, 1.2] * 32) == pytest.approx(
        log_error_of_median([1.0, 1.2] * 8) / 2, rel=0.05
    )


def test_a_device_with_hardly_a_part_teaches_nothing() -> None:
    seen = [
        Observed([{"filter": 10.0}, {"filter": part}], [12.0, took], [0.0] * 2)
        for part, took in ((4.9, 15.0), (6.0, 12.0))
    ]
    little, both = (corrected([FAST, SLOW], plans) for plans in (seen[:1], seen))
    assert little[0]["filter"] == near(1.2)
    assert little[1] == {}
    assert (both[0]["filter"], both[1]["filter"]) == (near(1.2), near(2.0))


@pytest.mark.parametrize(("measured", "factor"), [(100.0, MOST), (0.001, 1 / MOST)])
def test_a_factor_is_not_believed_beyond_reason(measured: float, factor: float) -> None:
    assert taught(FAST, ({"height": 1.0}, measured))["height"] == factor


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_a_corrected_profile_predicts_what_was_measured(mode: Mode) -> None:
    """Of layers, of plans of one kind, on each device."""
    profile = ClusterProfile(
        (FAST, SLOW), {"0-1": ClusterProfile.from_devices(["T4", "T4"]).links["0-1"]}
    )
    graph = hetconv.capture(SuperResolution(), torch.ones(1, 3, 64, 64))
    plan = next(
        c
        for c in contenders(graph, profile, mode=mode)
        if c.name == "uneven height split"
    )
    kinds = {split.kind for split in plan.splits.values()}
    world, factors = range(2), (1.3, 0.8)
    before = [
        sum(s for c in plan.costs.values() for s in _of(c, rank)) for rank in world
    ]
    seen = Observed(
        _observed(plan), [before[rank] * factors[rank] for rank in world], [0.0] * 2
    )
    devices = [
        replace(d, corrections=c)
        for d, c in zip(
            profile.devices, corrected(profile.devices, [seen]), strict=True
        )
    ]
    assert [[d.corrections[kind] for kind in kinds] for d in devices] == [
        [near(f)] * len(kinds) for f in factors
    ]
    _, costs = estimate(
        graph, replace(profile, devices=tuple(devices)), plan.splits, mode
    )
    after = [sum(s for c in costs.values() for s in _of(c, rank)) for rank in world]
    assert after == [near(before[rank] * factors[rank]) for rank in world]


def _of(cost: LayerCost, rank: int) -> tuple[float, ...]:
    return tuple(
        by_rank[rank] for by_rank in (cost.forward_s, cost.backward_s) if by_rank
    )


def _observed(plan: Contender) -> list[dict[str, float]]:
    trial = create_trial(
        value=1.0, user_attrs={"computing": [1.0, 1.0], "computing_noise": [0.0, 0.0]}
    )
    return [dict(predicted) for predicted in observed(plan, trial).predicted]


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


def steps_with(profile: ClusterProfile, way: AtWork) -> list[float]:
    """Of the kinds in which a small net can be cut."""
    graph = hetconv.capture(SuperResolution(), torch.zeros(2, 3, 24, 20))
    whole = Candidates(graph, profile, "infer").whole_models()
    cut = [splits for name, splits in whole.items() if name.startswith("uneven")]
    working = calibrate.with_learnt(
        profile, calibrate.Learnt([{}] * profile.world, way)
    )
    return [estimate(graph, working, splits, "infer")[0].step_s for splits in cut]


@pytest.mark.parametrize(
    "way",
    [
        AtWork(),
        AtWork(8.0),
        AtWork(1.0, 2.0),
        AtWork(4 * sqrt(2), 2.0),
        AtWork(16.0, 1.0, 0.25),
        AtWork(overlap=0.0),
    ],
    ids=str,
)
def test_what_messages_take_at_work_is_learnt_from_what_steps_took(way: AtWork) -> None:
    profile = ClusterProfile.from_devices(["cpu", "cpu@0.5"], link="pcie3-x16")
    measured = steps_with(profile, way)
    found = at_work(
        lambda tried: steps_with(profile, tried),
        measured,
        [0.0] * len(measured),
        profile.overlap,
    )
    assert found == way


def test_messages_at_work_are_those_at_rest_where_nothing_says_more() -> None:
    assert at_work(lambda _: [], [], []) == AtWork()
    assert (
        at_work(lambda _: [1.0], [2.0], [0.0]) == AtWork()
    )  # where it makes no difference
    little = at_work(
        lambda way: [1.0 + 0.001 * way.of_bytes, 1.0], [1.011, 1.0], [0.0] * 2
    )  # a percent, maybe noise
    assert little == AtWork()
    slow = at_work(
        lambda way: [way.latency, way.of_bytes, 1.0], [1e9, 1e9, 1.0], [0.0] * 3
    )
    assert slow == AtWork(LATENCIES[-1], BYTES[-1])


def test_halos_are_hidden_as_one_layer_has_shown_where_steps_say_nearly_the_same() -> (
    None
):
    def halos(way: AtWork) -> list[float]:
        return [2.0 - (0.3 if way.overlap is None else way.overlap)]

    found = [at_work(halos, [took], [0.0], 0.3) for took in (1.72, 1.26, 1.0)]
    assert found == [AtWork(), AtWork(overlap=0.75), AtWork(overlap=1.0)]


def test_noisy_steps_say_less_of_messages() -> None:
    found = [
        at_work(lambda way: [1 + 0.1 * way.of_bytes], [1.2], [noise])
        for noise in (0.0, 2.0)
    ]
    assert found == [AtWork(1.0, 2.0), AtWork()]
