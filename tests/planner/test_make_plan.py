"""make_plan: balance on plain numbers, and the choice among whole-model candidates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import nn

import hetconv
from hetconv.cost.estimator import estimate
from hetconv.planner.candidates import Candidates, group_sizes
from hetconv.planner.make_plan import contenders
from hetconv.planner.partition import whole_model
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.tuning_results import TunedPlan, TunedRatio
from hetconv.sharding.layer_rules import Linear
from hetconv.sharding.split import Split, SplitKind
from tests.nets import IMAGE_KINDS, MobileBlock, ResNet, UNet

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
        assert all(
            isinstance(graph.layers[n], Linear) == (s.kind == "replicate")
            for n, s in plan.splits.items()
        )


def test_layers_of_one_row_are_cut_by_rows_for_a_device_alone_only() -> None:
    graph = hetconv.capture(MobileBlock(), torch.randn(2, 4, 32, 32))
    together = whole_model(graph, "height", (3, 1), ("height",))
    kinds = {name: split.kind for name, split in together.items()}
    of_one_row = {"squeeze": "replicate", "excite": "replicate"}
    assert kinds == dict.fromkeys(graph.layers, "height") | of_one_row
    alone = whole_model(graph, "height", (1, 0), ("height",))
    assert {split.kind for split in alone.values()} == {"height"}


def big_stack() -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1)
    )
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
    plan = hetconv.make_plan(
        graph, far, mode="infer", kinds=("sample", "height", "filter")
    )
    assert plan.chosen == "fastest device alone (0: cpu)"
    assert all(s.sizes[1] == 0 for s in plan.splits.values())
    assert plan.predicted is not None
    assert (
        plan.predicted.step_s == max(plan.predicted.compute_s) < 1.0
    )  # it tells no other what it computed


@pytest.mark.parametrize(
    ("seconds", "sizes"),
    [
        ((1, 2, 2, 5), [1, 3]),  # as 10, 5, 5 and 2 TFLOPS
        ((1, 1, 2, 2, 2, 2, 5, 5), [1, 2, 6]),
        ((1, 1, 1.05, 3, 3, 3.1), [1, 2, 3]),
        ((1, 1, 1, 1, 2, 2, 2, 2), [1, 2, 4]),
        ((1, 2, 2, 2, 2, 2, 2, 2), [1, 2, 4]),
        ((1, 1.01, 1.02, 1.03, 1.04), [1, 2, 4]),
        ((1, 2), [1]),
        ((1,), []),
    ],
)
def test_groups_of_devices_leave_out_slower_kinds(
    seconds: tuple[float, ...], sizes: list[int]
) -> None:
    assert group_sizes(seconds) == sizes


def test_the_chosen_candidate_is_the_fastest_that_fits() -> None:
    graph = hetconv.capture(UNet(), torch.randn(2, 3, 64, 64))
    profile = ClusterProfile.from_devices(PAIR)
    plan = hetconv.make_plan(graph, profile)
    found = Candidates(graph, profile, "train").whole_models()
    assert plan.predicted is not None
    assert plan.alternatives is not None
    assert plan.predicted.step_s <= min(plan.alternatives.values())
    assert plan.predicted.step_s <= min(
        estimate(graph, profile, s, "train")[0].step_s for s in found.values()
    )


@pytest.mark.parametrize(
    "change", [{"graph": "another"}, {"mode": "infer"}, {"weights": (300, 200, 12)}]
)
def test_a_ratio_tuned_on_anything_else_is_not_used(change: dict[str, Any]) -> None:
    model, x = big_stack()
    graph = hetconv.capture(model, x)
    profile = ClusterProfile.from_devices(["cpu", "cpu"], link="nvlink3")
    tuned = TunedRatio(
        graph.digest, "train", "height", (300, 212), 0.9, (256, 256), 1.0, 5
    )
    found = Candidates(
        graph, replace(profile, tuned=(replace(tuned, **change),)), "train"
    ).whole_models()
    assert "tuned height split" not in found


def tuned_plan(
    graph: hetconv.Graph, name: str, splits: Mapping[str, Split], **changed: Any
) -> TunedPlan:
    """Two seconds a step, beside three alone on the second device."""
    alone = "fastest device alone (1: cpu@0.5)"
    return replace(
        TunedPlan(graph.digest, "train", name, splits, 2.0, 1.0, 4, alone, 3.0),
        **changed,
    )


def test_the_plan_that_was_measured_to_be_the_fastest_is_the_plan() -> None:
    graph = hetconv.capture(*big_stack())
    profile = ClusterProfile.from_devices(["cpu", "cpu@0.5"], link="nvlink3")
    splits = dict.fromkeys(graph.layers, Split("width", (100, 412)))
    plan = hetconv.make_plan(
        graph, replace(profile, plans=(tuned_plan(graph, "planned", splits),))
    )
    assert plan.chosen == "tuned plan"
    assert plan.splits == splits
    assert plan.predicted is not None
    assert plan.predicted.step_s == 2.0
    assert plan.alternatives is not None
    assert plan.alternatives["tuned plan"] == 2.0
    assert plan.alternatives["planned"] < 2.0, "what is only predicted does not count"


def test_a_device_that_was_measured_to_be_fastest_alone_is_the_plan() -> None:
    graph = hetconv.capture(*big_stack())
    profile = ClusterProfile.from_devices(["cpu", "cpu@0.5"], link="nvlink3")
    splits, name = (
        dict.fromkeys(graph.layers, Split("sample", (0, 1))),
        "fastest device alone (1: cpu@0.5)",
    )
    plan = hetconv.make_plan(
        graph, replace(profile, plans=(tuned_plan(graph, name, splits, step_s=3.0),))
    )
    assert plan.chosen == name
    assert plan.splits == splits
    assert plan.predicted is not None
    assert plan.predicted.step_s == 3.0


def test_what_the_device_alone_took_is_known_beside_the_plan() -> None:
    graph = hetconv.capture(*big_stack())
    profile = ClusterProfile.from_devices(["cpu@0.1", "cpu@0.5"], link="nvlink3")
    tuned = tuned_plan(
        graph,
        "planned",
        dict.fromkeys(graph.layers, Split("width", (100, 412))),
        alone_s=1e-6,
    )
    plan = hetconv.make_plan(graph, replace(profile, plans=(tuned,)))
    assert plan.alternatives is not None
    assert plan.alternatives["fastest device alone"] == 1e-6


@pytest.mark.parametrize(
    "changed",
    [
        {"graph": "another"},
        {"mode": "infer"},
        {"splits": {}},
        {"splits": {"0": Split("width", (100, 412)), "2": Split("filter", (60, 5))}},
    ],
)
def test_a_plan_measured_on_anything_else_or_that_does_not_fit_is_not_used(
    changed: dict[str, Any],
) -> None:
    graph = hetconv.capture(*big_stack())
    profile = ClusterProfile.from_devices(["cpu", "cpu@0.5"], link="nvlink3")
    tuned = replace(
        tuned_plan(
            graph, "planned", dict.fromkeys(graph.layers, Split("width", (100, 412)))
        ),
        **changed,
    )
    assert (
        hetconv.make_plan(graph, replace(profile, plans=(tuned,))).chosen
        != "tuned plan"
    )


def test_limits_come_before_what_was_measured() -> None:
    graph = hetconv.capture(*big_stack())
    profile = ClusterProfile.from_devices(["cpu", "cpu@0.5"], link="nvlink3")
    splits = dict.fromkeys(graph.layers, Split("width", (1, 511)))
    known = replace(profile, plans=(tuned_plan(graph, "planned", splits),))
    assert hetconv.make_plan(graph, known).chosen == "tuned plan"
    assert (
        hetconv.make_plan(graph, known, kinds=("height", "replicate")).chosen
        != "tuned plan"
    )
    most = max(hetconv.make_plan(graph, known).predicted.memory_bytes)  # type: ignore[union-attr]
    assert (
        hetconv.make_plan(graph, known, memory_limit=0.9 * most).chosen != "tuned plan"
    )


def test_contenders_are_the_plan_and_then_the_fastest_none_twice() -> None:
    graph = hetconv.capture(*big_stack())
    profile = ClusterProfile.from_devices(["cpu", "cpu@0.5"], link="nvlink3")
    found = contenders(graph, profile, mode="infer")
    plan = hetconv.make_plan(graph, profile, mode="infer")
    assert (found[0].name, found[0].splits) == (plan.chosen, plan.splits)
    seconds = [c.predicted.step_s for c in found]
    assert seconds[1:] == sorted(seconds[1:])
    assert {"fastest device alone (0: cpu)", "fastest device alone (1: cpu@0.5)"} < {
        c.name for c in found
    }
    assert all(a.splits != b.splits for a, b in combinations(found, 2))


def test_bad_arguments_are_refused() -> None:
    graph = hetconv.capture(ResNet(), torch.randn(2, 3, 32, 32))
    profile = ClusterProfile.from_devices(PAIR)
    with pytest.raises(hetconv.SplitError, match="'rows' is not known"):
        hetconv.make_plan(graph, profile, kinds=("rows",))  # type: ignore[arg-type]
    with pytest.raises(hetconv.PlanError, match="no convolution or linear"):
        hetconv.make_plan(hetconv.capture(nn.ReLU(), torch.randn(1, 3)), profile)
