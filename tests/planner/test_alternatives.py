"""Costs of other splits of one layer, from the tables, against whole estimates."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hetconv
from hetconv.cost.estimator import StepEstimator
from hetconv.planner.cost_tables import CostTables
from hetconv.planner.search import alternatives
from hetconv.planner.table_builder import build_tables
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.device_model import LinkModel
from hetconv.schemas.plan import Alternative, Mode
from hetconv.sharding.layer_rules import Conv, Linear
from hetconv.sharding.split import KINDS, REPLICATE, Split
from hetconv.tracing.graph import Graph
from tests.nets import NETS, OTHER_RANKS, split_of

CLUSTER = ClusterProfile.from_devices(["A100-SXM4-80GB", "V100-SXM2-32GB", "T4"])
RATIOS = (4, 2, 1), (1, 1, 1), (0, 1, 0)
FREE = replace(
    CLUSTER, links=dict.fromkeys(CLUSTER.links, LinkModel(0.0, 0.0)), shared=()
)
Choices = dict[str, tuple[Split, ...]]


class Joins(nn.Module):
    """A sum of sums of what was concatenated of three: how a layer is split may decide
    how all of them lie.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Conv2d(4, n, 1) for n in (3, 4, 5, 12))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([self.a(x), self.b(x), self.c(x)], 1)
        z = self.d(x)
        return (y + z) * (y - torch.relu(z))


MODELS = NETS | OTHER_RANKS | {"joins": (Joins, (2, 4, 9, 8))}


def splits_of_layer(op: Conv | Linear) -> tuple[Split, ...]:
    kinds = [
        k for k in KINDS[1:] if op.dim(k) is not None or k in ("filter", "channel")
    ]
    return tuple(
        dict.fromkeys(
            [
                REPLICATE,
                *(split_of(op, kind, ratio) for kind in kinds for ratio in RATIOS),
            ]
        )
    )


def problem(name: str, mode: Mode) -> tuple[Graph, Choices, CostTables]:
    make, shape = MODELS[name]
    with torch.set_grad_enabled(mode == "train"):
        graph = hetconv.capture(make().train(mode == "train"), torch.zeros(shape))
    choices = {layer: splits_of_layer(op) for layer, op in graph.layers.items()}
    return graph, choices, build_tables(graph, CLUSTER, choices, mode)


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("name", MODELS)
def test_each_is_slower_by_what_the_whole_plan_is(name: str, mode: Mode) -> None:
    graph, choices, cost_tables = problem(name, mode)
    estimator, free, draw = (
        StepEstimator(graph, CLUSTER, mode),
        StepEstimator(graph, FREE, mode),
        random.Random(0),
    )
    for _ in range(3):
        chosen = {
            layer: draw.randrange(len(splits)) for layer, splits in choices.items()
        }
        plan = {layer: splits[chosen[layer]] for layer, splits in choices.items()}
        planned, computing = (
            p.estimate(plan)[0].operator_sum_s for p in (estimator, free)
        )
        for layer, found in alternatives(cost_tables, choices, chosen).items():
            assert {c.split for c in found} == set(choices[layer])
            assert [c.slower_by_s for c in found] == sorted(
                c.slower_by_s for c in found
            )
            own = next(c for c in found if c.split == plan[layer])
            assert own.slower_by_s == 0
            for c in draw.sample(found, 5):
                slower = (
                    estimator.estimate({**plan, layer: c.split})[0].operator_sum_s
                    - planned
                )
                assert c.slower_by_s == pytest.approx(
                    slower, rel=1e-3, abs=1e-9 * planned
                )
                longer = (
                    free.estimate({**plan, layer: c.split})[0].operator_sum_s
                    - computing
                )
                assert c.compute_s - own.compute_s == pytest.approx(
                    longer, abs=1e-3 * c.compute_s
                )
                moves_longer = c.communication_s - own.communication_s
                assert moves_longer == pytest.approx(
                    slower - longer,
                    abs=1e-3 * (c.communication_s + own.communication_s),
                )


def test_a_layer_alone_computes_as_its_slowest_device_and_moves_its_result() -> None:
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1)).eval()
    graph = hetconv.capture(model, torch.zeros(1, 64, 64, 64))
    choices = {"0": (REPLICATE, Split("height", (2, 1, 1)))}
    found = alternatives(
        build_tables(graph, CLUSTER, choices, "infer"), choices, {"0": 0}
    )["0"]
    for c in found:
        prediction, layers = StepEstimator(graph, CLUSTER, "infer").estimate(
            {"0": c.split}
        )
        assert c.compute_s == pytest.approx(max(layers["0"].forward_s), rel=1e-3)
        assert c.compute_s + c.communication_s == pytest.approx(
            prediction.operator_sum_s, rel=1e-3
        )
        assert (c.communication_s > 0) is (c.split.kind == "height")


def test_what_is_forbidden_is_left_out_and_what_is_equal_comes_after_what_was_chosen() -> (
    None
):
    splits = tuple(Split("height", (n, 1)) for n in range(4))
    cost_tables = CostTables(
        unary={"a": np.array([0.6, 0.1 + 0.2, np.inf, 0.3])},
        compute={"a": np.array([0.2, 0.1, 0, 0.25])},
    )
    assert alternatives(cost_tables, {"a": splits}, {"a": 3})["a"] == (
        Alternative(splits[3], 0.25, 0.05, 0.0),
        Alternative(splits[1], 0.1, 0.2, 0.0),
        Alternative(splits[0], 0.2, 0.4, 0.3),
    )
