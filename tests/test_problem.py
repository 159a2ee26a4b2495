"""Tables add up to what `Pricer` says of the same splits: exactly, for any choice of every layer."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hetconv
from hetconv.candidates import aligned, split_of
from hetconv.elimination import minimize
from hetconv.graph import Graph
from hetconv.ledger import Tables
from hetconv.plan import Mode
from hetconv.pricing import Pricer
from hetconv.problem import tables
from hetconv.profile import ClusterProfile
from hetconv.rules import KINDS, REPLICATE, Conv, Linear, Split

from .nets import Chain, MobileBlock, ResNet, Twice, UNet, Volumes, Waves

PROFILE = ClusterProfile.from_devices("A100-SXM4-80GB, V100-SXM2-32GB, T4", link="pcie3-x16")
RATIOS = (1.0, 1.0, 1.0), (5.0, 2.0, 1.0), (0.0, 1.0, 3.0), (1.0, 0.0, 0.0)


class Dense(nn.Module):
    """Every convolution reads the channels of all before it; sums of sums after them."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(c, 8, 3, padding=1) for c in (3, 8, 16, 24))
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
        self.first, self.second, self.third = (nn.Conv2d(c, 8, 3, padding=1) for c in (3, 8, 8))
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.first(x), inplace=True)
        b = self.norm(self.second(a)).add_(a)
        c = self.third(b.relu_()).mul_(2.0)
        c[:, :4].neg_()
        return (c + b).sub_(a).relu_()


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "dense": (Dense, (4, 3, 16, 16)),
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
    """Every kind in every ratio: of equal operators the same object."""
    known: dict[Conv | Linear, tuple[Split, ...]] = {}
    for op in graph.layers.values():
        if op not in known:
            grids = [(kind, aligned(graph, kind, ratio)) for kind in KINDS if kind != "replicate" for ratio in RATIOS]
            known[op] = tuple(dict.fromkeys((REPLICATE, *(split_of(op, kind, grid, KINDS) for kind, grid in grids))))
    return {name: known[op] for name, op in graph.layers.items()}


def least(known: Tables, picked: Mapping[str, int]) -> tuple[dict[str, int], float]:
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
    choices, pricer = choices_of(graph), Pricer(graph, PROFILE, mode)
    known = tables(graph, PROFILE, choices, mode)
    draw = random.Random(0)
    for _ in range(12):
        picked = {name: draw.randrange(len(splits)) for name, splits in choices.items()}
        priced, _ = pricer.price({name: choices[name][k] for name, k in picked.items()})
        assert least(known, picked)[1] == pytest.approx(priced.summed_s, rel=1e-9)
        if mode == "infer":  # gradients' sums may take longer than they count
            assert priced.step_s <= priced.summed_s * (1 + 1e-9)


@pytest.mark.parametrize("net", NETS)
def test_tables_hold_the_priced_bytes_of_training(net: str) -> None:
    make, shape = NETS[net]
    graph = hetconv.capture(make(), torch.randn(shape))
    choices, pricer = choices_of(graph), Pricer(graph, PROFILE, "train")
    known = tables(graph, PROFILE, choices, "train")
    draw = random.Random(1)
    for _ in range(4):
        picked = {name: draw.randrange(len(splits)) for name, splits in choices.items()}
        states, _ = least(known, picked)
        held = sum(table[states[name] if name is not None else 0] for name, table in known.held.items())
        memory = pricer.price({name: choices[name][k] for name, k in picked.items()})[0].memory_bytes
        assert held == pytest.approx(memory, abs=1)


def test_layers_without_choices_are_replicated() -> None:
    graph = hetconv.capture(Dense(), torch.randn(4, 3, 16, 16))
    known = tables(graph, PROFILE, {}, "train")
    assert known.constant == pytest.approx(Pricer(graph, PROFILE, "train").price({})[0].summed_s, rel=1e-9)
    assert not known.unary
