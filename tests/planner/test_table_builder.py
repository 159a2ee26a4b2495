"""Cost tables add up to what `StepEstimator` predicts, for any choice of splits."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hetconv
from hetconv.cost import estimator
from hetconv.cost.estimator import StepEstimator
from hetconv.cost.memory import MemoryUse
from hetconv.cost.memory_timeline import memory_timeline
from hetconv.planner.cost_tables import CostTables
from hetconv.planner.partition import aligned, split_of, with_whole_sum
from hetconv.planner.table_builder import build_tables
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.device_model import Curve, OperatorModel
from hetconv.schemas.plan import Mode
from hetconv.schemas.provenance import MeasurementConditions
from hetconv.sharding.layer_rules import Conv, Linear
from hetconv.sharding.split import KINDS, KINDS_WITHIN_NODES, REPLICATE, Split
from hetconv.solver.elimination import solve
from hetconv.tracing.graph import Graph
from tests.nets import Chain, MobileBlock, ResNet, Twice, UNet, Volumes, Waves
from tests.random_tables import minimize, minimize_milp

SHEETS = ClusterProfile.from_devices(
    "A100-SXM4-80GB, V100-SXM2-32GB, T4", link="pcie3-x16"
)
RELU = {
    "elementwise float32": OperatorModel(
        Curve((1e4, 1e6), (1e-5, 1e-3)), Curve((1e4, 1e6), (2e-5, 3e-3))
    )
}
FIRST, *REST = SHEETS.devices
MEASURED = replace(
    FIRST, measured=MeasurementConditions("", ""), backward_overhead_s=1e-4, others=RELU
)
PROFILE = replace(SHEETS, devices=(MEASURED, *REST), overlap=0.7, sum_s_per_byte=1e-11)
RATIOS = (1.0, 1.0, 1.0), (5.0, 2.0, 1.0), (0.0, 1.0, 3.0), (1.0, 0.0, 0.0)
NODES = ((2, 3.0), (1, 1.0)), ((1, 2.0), (2, 2.0))


class Dense(nn.Module):
    """Every convolution reads the channels of all before it; sums of sums after them."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(c, 8, 3, padding=1) for c in (3, 8, 16, 24)
        )
        self.norm, self.end = nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.convs[0](x))
        b = self.norm(self.convs[1](a))
        c = F.relu(self.convs[2](torch.cat([a, b], 1)))
        d = self.convs[3](torch.cat([a, b, c], 1))
        y = (a + b) + (c + d)
        return self.end(F.adaptive_avg_pool2d(F.max_pool2d(y, 2), 1).flatten(1))


class InPlace(nn.Module):
    """Writes to what others made, to what is read again later, and to a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (
            nn.Conv2d(c, 8, 3, padding=1) for c in (3, 8, 8)
        )
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.first(x), inplace=True)
        b = self.norm(self.second(a)).add_(a)
        c = self.third(b.relu_()).mul_(2.0)
        c[:, :4].neg_()
        return (c + b).sub_(a).relu_()


class Attends(nn.Module):
    """Views of views, some of which no cut passes; products of what follows different layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 8)
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

    def heads(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], -1, 2, 4).transpose(1, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        y = x.flatten(2).transpose(1, 2)
        q, k, v = (
            self.heads(self.query(y)),
            self.heads(self.key(y)),
            self.heads(self.value(y)),
        )
        z = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        z = F.scaled_dot_product_attention(z, k, v).transpose(1, 2).reshape(y.shape)
        z = self.last(z)
        return z.transpose(1, 2).reshape(x.shape) + x, y.transpose(1, 2) @ z


class WritesViews(nn.Module):
    """In place on views, of a copy among them, and what shares their memory read again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (
            nn.Conv2d(c, 8, 3, padding=1) for c in (3, 8, 8)
        )

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        turned = a.transpose(2, 3)
        turned.mul_(2.0)
        flat = self.second(a * 1.0).reshape(x.shape[0], 8, -1)
        flat.add_(1.0)
        b = self.third(a + flat.reshape(a.shape))
        b.transpose(1, 2).reshape(x.shape[0], -1)[:, ::2].neg_()
        return b + a


class Shares(nn.Module):
    """One slope and one norm after layers that may be split differently; the weight of
    a layer used once more.
    """

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(c, 8, 3, padding=1) for c in (3, 8, 8))
        self.slope, self.norm = nn.PReLU(8), nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = self.norm(self.slope(conv(x)))
        return x + x * self.convs[1].bias.view(1, 8, 1, 1) * self.convs[1].bias.view(
            1, 8, 1, 1
        )


class Tiled(nn.Module):
    """Images side by side, along dimensions that each may be cut along."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, 4, 3, padding=1) for _ in range(3))
        self.last = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = (conv(x) for conv in self.convs)
        rows = torch.cat([a, F.relu(b), c], 2)
        return self.last(rows)[:, :, : a.shape[2]] + torch.cat([b[:1], c[1:]], 0)


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "dense": (Dense, (4, 3, 16, 16)),
    "attention": (Attends, (2, 3, 8, 8)),
    "shared parameters": (Shares, (4, 3, 12, 10)),
    "tiled": (Tiled, (4, 3, 12, 10)),
    "views in place": (WritesViews, (4, 3, 12, 10)),
    "in place": (InPlace, (4, 3, 12, 10)),
    "residual": (ResNet, (4, 3, 45, 40)),
    "U-Net": (UNet, (2, 3, 20, 24)),
    "depthwise": (MobileBlock, (3, 4, 16, 12)),
    "chain": (Chain, (2, 4, 16, 16)),
    "one module twice": (Twice, (2, 4, 16, 12)),
    "volumes": (Volumes, (2, 2, 12, 10, 8)),
    "sequences": (Waves, (3, 2, 38)),
}


def choices_of(graph: Graph) -> dict[str, tuple[Split, ...]]:
    """Every kind in every ratio, and within nodes: of equal operators the same object."""
    known: dict[Conv | Linear, tuple[Split, ...]] = {}
    for op in graph.layers.values():
        if op not in known:
            grids = [
                (kind, aligned(graph, kind, ratio))
                for kind in KINDS
                if kind != "replicate"
                for ratio in RATIOS
            ]
            splits = [split_of(op, kind, grid, KINDS) for kind, grid in grids]
            splits += [
                split_of(op, kind, RATIOS[1], KINDS, nodes)
                for kind in KINDS_WITHIN_NODES
                for nodes in NODES
            ]
            known[op] = tuple(
                dict.fromkeys((REPLICATE, *splits, *map(with_whole_sum, splits)))
            )
    return {name: known[op] for name, op in graph.layers.items()}


def least(known: CostTables, picked: Mapping[str, int]) -> tuple[dict[str, int], float]:
    """The states of joins, and the seconds, where the layers' choices are ``picked``."""

    def at(name: str) -> slice:
        return slice(picked[name], picked[name] + 1) if name in picked else slice(None)

    unary = {name: table[at(name)] for name, table in known.unary.items()}
    pairwise = {(u, v): table[at(u), at(v)] for (u, v), table in known.pairwise.items()}
    found, cost = minimize(unary, pairwise)
    return found | dict(picked), known.constant + cost


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("net", NETS)
def test_tables_add_up_to_the_priced_sum(net: str, mode: Mode) -> None:
    make, shape = NETS[net]
    with torch.set_grad_enabled(mode == "train"):
        graph = hetconv.capture(make().train(mode == "train"), torch.randn(shape))
    choices, step_estimator = choices_of(graph), StepEstimator(graph, PROFILE, mode)
    known = build_tables(graph, PROFILE, choices, mode)
    draw = random.Random(0)
    for _ in range(12):
        picked = {name: draw.randrange(len(splits)) for name, splits in choices.items()}
        prediction, _ = step_estimator.estimate(
            {name: choices[name][k] for name, k in picked.items()}
        )
        assert least(known, picked)[1] == pytest.approx(
            prediction.operator_sum_s, rel=1e-9
        )
        if mode == "infer":  # gradients' sums may take longer than they count
            assert prediction.step_s <= prediction.operator_sum_s * (1 + 1e-9)


@pytest.mark.parametrize("net", NETS)
def test_tables_hold_the_priced_bytes_of_training(
    net: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the begin of the backward pass, without what passes and inner results."""
    make, shape = NETS[net]
    graph = hetconv.capture(make(), torch.randn(shape))
    graph = replace(graph, lifetimes=None)

    def at_turn(_: Graph, uses: Sequence[MemoryUse], *rest: Any) -> tuple[int, ...]:
        kept = [one._replace(transient=0 * one.transient, joins=False) for one in uses]
        found = memory_timeline(graph, kept, *rest)
        return tuple(found[len(uses) - 1].tolist())

    monkeypatch.setattr(estimator, "memory_bytes", at_turn)
    choices, step_estimator = choices_of(graph), StepEstimator(graph, PROFILE, "train")
    known = build_tables(graph, PROFILE, choices, "train")
    draw = random.Random(1)
    for _ in range(4):
        picked = {name: draw.randrange(len(splits)) for name, splits in choices.items()}
        states, _ = least(known, picked)
        held = sum(
            table[tuple(states[name] for name in scope)]
            for scope, table in known.all_bytes().items()
        )
        memory = step_estimator.estimate(
            {name: choices[name][k] for name, k in picked.items()}
        )[0].memory_bytes
        assert held == pytest.approx(memory, abs=1)


class DenseBlock(nn.Module):
    """As DenseNets have them: every layer reads the results of all before it."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Conv2d(4 * k, 4, 3, padding=1) for k in range(1, depth + 1)
        )
        self.first, self.last = (
            nn.Conv2d(3, 4, 3, padding=1),
            nn.Conv2d(4 * (depth + 1), 4, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        found = [self.first(x)]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        y: Tensor = self.last(torch.cat(found, 1))
        return y


def dense_block(depth: int) -> tuple[Graph, dict[str, tuple[Split, ...]]]:
    graph = hetconv.capture(DenseBlock(depth), torch.randn(4, 3, 16, 16))
    return graph, choices_of(graph)


def test_a_dense_block_is_planned_as_by_highs() -> None:
    graph, choices = dense_block(3)
    few = {name: splits[:: 1 + len(splits) // 5] for name, splits in choices.items()}
    known = build_tables(graph, PROFILE, few, "train")
    _, cost, _ = minimize_milp(known.unary, known.pairwise)
    assert solve(
        known.unary, known.pairwise, memory_bytes=100_000
    ).cost == pytest.approx(cost, rel=1e-6)


def test_deep_dense_blocks_are_eliminated_and_add_up() -> None:
    graph, choices = dense_block(14)
    known = build_tables(graph, PROFILE, choices, "train")
    found = solve(known.unary, known.pairwise)
    assert found.method == "elimination"
    prediction, _ = StepEstimator(graph, PROFILE, "train").estimate(
        {name: choices[name][found.choice[name]] for name in choices}
    )
    assert known.constant + found.cost == pytest.approx(
        prediction.operator_sum_s, rel=1e-9
    )


def test_layers_without_choices_are_replicated() -> None:
    graph = hetconv.capture(Dense(), torch.randn(4, 3, 16, 16))
    known = build_tables(graph, PROFILE, {}, "train")
    assert known.constant == pytest.approx(
        StepEstimator(graph, PROFILE, "train").estimate({})[0].operator_sum_s, rel=1e-9
    )
    assert not known.unary
