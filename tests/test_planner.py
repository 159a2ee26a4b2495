"""make_plan: balance on plain numbers, and the choice among whole-model candidates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import hetconv
from hetconv.candidates import Candidates
from hetconv.pricing import price
from hetconv.profile import ClusterProfile, TunedRatio
from hetconv.rules import Linear, Split, SplitKind

from .nets import IMAGE_KINDS, MobileBlock, ResNet, UNet

PAIR = ("A100-SXM4-80GB", "V100-SXM2-32GB")


@pytest.mark.parametrize("kind", IMAGE_KINDS)
@pytest.mark.parametrize("make", [ResNet, UNet, MobileBlock])
def test_kinds_are_the_only_ones_used(make: type[nn.Module], kind: SplitKind) -> None:
    x = torch.randn(2, 4 if make is MobileBlock else 3, 32, 32)
    graph = hetconv.capture(make(), x)
    plan = hetconv.make_plan(graph, ClusterProfile.from_devices(PAIR), kinds=(kind,))
    assert {s.kind for s in plan.splits.values()} <= {kind, "replicate"}
    assert plan.splits.keys() == graph.layers.keys()
    if kind == "height":
        assert all(isinstance(graph.layers[n], Linear) == (s.kind == "replicate") for n, s in plan.splits.items())


def big_stack() -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1))
    return model, torch.randn(1, 64, 512, 512)


def test_large_maps_are_cut_over_space_by_speed() -> None:
    model, x = big_stack()
    profile = ClusterProfile.from_devices(["cpu", "cpu@0.5"], link="pcie4-x16")
    plan = hetconv.make_plan(hetconv.capture(model, x), profile, mode="infer")
    (split,) = set(plan.splits.values())
    assert split.kind in ("height", "width")
    assert sum(split.sizes) == 512
    assert split.sizes[0] / 512 == pytest.approx(2 / 3, abs=0.01)
    assert plan.alternatives is not None
    assert plan.predicted is not None
    assert plan.predicted.step_s == min(plan.alternatives.values())
    assert plan.estimated


def test_where_one_device_is_fastest_the_plan_says_so_and_uses_it_alone() -> None:
    graph = hetconv.capture(*big_stack())
    far = replace(ClusterProfile.from_devices(["cpu", "cpu@0.1"], link="host"))
    far = replace(far, links={"0-1": replace(far.links["0-1"], latency_s=1.0)})
    plan = hetconv.make_plan(graph, far, mode="infer", kinds=("sample", "height", "filter"))
    assert plan.chosen == "fastest device alone (0: cpu)"
    assert all(s.sizes[1] == 0 for s in plan.splits.values())


def test_the_chosen_candidate_is_the_fastest_that_fits() -> None:
    graph = hetconv.capture(UNet(), torch.randn(2, 3, 64, 64))
    profile = ClusterProfile.from_devices(PAIR)
    plan = hetconv.make_plan(graph, profile)
    found = Candidates(graph, profile, "train").whole_models()
    assert plan.predicted is not None
    assert plan.alternatives is not None
    assert plan.predicted.step_s <= min(plan.alternatives.values())
    assert plan.predicted.step_s <= min(price(graph, profile, s, "train")[0].step_s for s in found.values())


def test_memory_limits_hold_or_are_refused() -> None:
    model, x = big_stack()
    graph, profile = hetconv.capture(model, x), ClusterProfile.from_devices(["cpu", "cpu"], link="nvlink3")
    free = hetconv.make_plan(graph, profile)
    assert free.predicted is not None
    tight = max(free.predicted.memory_bytes) * 1.01
    held = hetconv.make_plan(graph, profile, memory_limit=tight)
    assert held.predicted is not None
    assert max(held.predicted.memory_bytes) <= tight
    with pytest.raises(hetconv.PlanError, match="no split fits: the leanest needs"):
        hetconv.make_plan(graph, profile, memory_limit=1e6)
    with pytest.raises(hetconv.PlanError, match="3 memory limits were given for 2 devices"):
        hetconv.make_plan(graph, profile, memory_limit=(1e9, 1e9, 1e9))


def test_a_ratio_tuned_on_this_model_corrects_the_prediction_by_what_was_measured() -> None:
    model, x = big_stack()
    graph = hetconv.capture(model, x)
    profile = ClusterProfile.from_devices(["cpu", "cpu"], link="nvlink3")
    plain = hetconv.make_plan(graph, profile)
    tuned = TunedRatio(graph.digest, "train", "height", (300, 212), 0.9, (256, 256), 1.0, 5)
    plan = hetconv.make_plan(graph, replace(profile, tuned=(tuned,)))
    assert plan.chosen == "tuned height split"
    assert set(plan.splits.values()) == {Split("height", (300, 212))}
    assert plan.predicted is not None
    assert plain.predicted is not None
    assert plan.predicted.step_s == pytest.approx(0.9 * plain.predicted.step_s, rel=1e-3)


@pytest.mark.parametrize("change", [{"graph": "another"}, {"mode": "infer"}, {"weights": (300, 200, 12)}])
def test_a_ratio_tuned_on_anything_else_is_not_used(change: dict[str, Any]) -> None:
    model, x = big_stack()
    graph = hetconv.capture(model, x)
    profile = ClusterProfile.from_devices(["cpu", "cpu"], link="nvlink3")
    tuned = TunedRatio(graph.digest, "train", "height", (300, 212), 0.9, (256, 256), 1.0, 5)
    found = Candidates(graph, replace(profile, tuned=(replace(tuned, **change),)), "train").whole_models()
    assert "tuned height split" not in found


def test_bad_arguments_are_refused() -> None:
    graph = hetconv.capture(ResNet(), torch.randn(2, 3, 32, 32))
    profile = ClusterProfile.from_devices(PAIR)
    with pytest.raises(hetconv.SplitError, match="'rows' is not known"):
        hetconv.make_plan(graph, profile, kinds=("rows",))  # type: ignore[arg-type]
    with pytest.raises(hetconv.PlanError, match="no convolution or linear"):
        hetconv.make_plan(hetconv.capture(nn.ReLU(), torch.randn(1, 3)), profile)
