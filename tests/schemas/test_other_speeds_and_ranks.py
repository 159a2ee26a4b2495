"""Profiles of a cluster whose devices are slower than measured, or of which some are gone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hetconv
from hetconv.cost.estimator import StepEstimator
from hetconv.errors import ProfileError
from hetconv.planner.partition import whole_model
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.device_model import Copying, LinkModel
from hetconv.tracing.graph import Graph
from tests.profiles import A0, NEW, profile
from tests.schemas.test_cluster_profile import example


def graph() -> Graph:
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1))
    return hetconv.capture(model, torch.zeros(2, 4, 24, 24))


def directed() -> ClusterProfile:
    """Four devices in two nodes, with links that differ in both directions."""
    found = ClusterProfile.from_devices(
        "A100-SXM4-80GB, 2xT4 / V100-SXM2-32GB",
        link="pcie4-x16",
        between="ethernet-100g",
    )
    links = {
        pair: LinkModel(1e-6 * (n + 1), 1e-9 * (n + 1), back_s_per_byte=1e-8 * (n + 1))
        for n, pair in enumerate(sorted(found.links))
    }
    return replace(found, links=links)


def test_a_device_alone_takes_its_factor_times_as_long() -> None:
    found, model = profile((A0, A0), NEW), graph()
    copying = Copying(1e-9, 2e-9, 3e-9)
    devices = tuple(replace(d, copying=copying) for d in found.devices)
    found = replace(found, devices=devices)
    for mode in ("infer", "train"):
        alone = whole_model(model, "height", (1, 0), ("height",))
        as_is, slow = (
            StepEstimator(model, p, mode).step_s("fastest device alone", alone)
            for p in (found, found.slowed((2.5, 1.0)))
        )
        assert slow == pytest.approx(2.5 * as_is)


def test_slowing_leaves_out_what_whole_steps_said_and_keeps_the_other_devices() -> None:
    found = example()
    slowed = found.slowed((1.0, 2.0))
    assert found.tuned
    assert slowed.tuned == ()
    assert slowed.devices[0] == found.devices[0]
    assert slowed.links == found.links
    key = "conv2d x by pixels"
    as_is, slow = (p.devices[1].operators[key].forward for p in (found, slowed))
    assert slow.at(0.3) == pytest.approx(2 * as_is.at(0.3))


@given(factor=st.floats(0.05, 20))
def test_slowing_can_be_undone(factor: float) -> None:
    device = example().devices[0]
    again = device.slowed(factor).slowed(1 / factor)
    assert again.roofline(1e9, 1e6, "float32", True) == pytest.approx(
        device.roofline(1e9, 1e6, "float32", True)
    )


def test_a_factor_of_one_changes_nothing() -> None:
    found = example()
    assert found.slowed((1.0, 1.0)) is found


@pytest.mark.parametrize(
    "factors", [(1.0,), (1.0, 0.0), (1.0, -2.0), (1, float("nan"))]
)
def test_wrong_factors_are_refused(factors: tuple[float, ...]) -> None:
    with pytest.raises(ProfileError, match="give"):
        example().slowed(factors)


@given(ranks=st.permutations(range(4)), left=st.integers(1, 4))
def test_a_subset_keeps_devices_links_wires_and_nodes(
    ranks: list[int], left: int
) -> None:
    found, ranks = directed(), ranks[:left]
    part = found.subset(ranks)
    assert part.names == tuple(found.names[rank] for rank in ranks)
    for new_a, a in enumerate(ranks):
        for new_b, b in enumerate(ranks):
            if a != b:
                assert part.link(new_a, new_b) == found.link(a, b)
    together = {frozenset(ranks[new] for new in node) for node in part.nodes}
    assert together == {frozenset(n) & {*ranks} for n in found.nodes} - {frozenset()}
    wires = {w.name: {(ranks[a], ranks[b]) for a, b in w.pairs} for w in part.shared}
    inside = {
        w.name: {(a, b) for a, b in w.pairs if {a, b} <= {*ranks}} for w in found.shared
    }
    assert wires == {name: pairs for name, pairs in inside.items() if pairs}


def test_a_plan_for_a_subset_is_made_for_its_devices() -> None:
    part = directed().subset((0, 2))
    plan = hetconv.make_plan(graph(), part)
    assert plan.devices == part.names


def test_a_subset_of_all_ranks_in_order_keeps_what_was_tuned() -> None:
    found = example()
    assert found.subset((0, 1)) is found
    assert found.subset((1, 0)).tuned == ()


@pytest.mark.parametrize("ranks", [(), (0, 0), (0, 2), (-1,)])
def test_ranks_that_are_not_there_are_refused(ranks: tuple[int, ...]) -> None:
    with pytest.raises(ProfileError, match="ranks 0 to 1, each once"):
        example().subset(ranks)
