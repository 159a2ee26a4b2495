"""A model in training changes its plan: nothing of it changes but where it lies."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import hetconv
from hetconv.errors import PlanError
from hetconv.schemas.plan import Plan
from hetconv.sharding.split import Split
from tests.equivalence import OPTIMIZERS
from tests.spawn import on_ranks

Splits = dict[str, Split]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.b = nn.Conv2d(8, 8, 3, padding=1, stride=2)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(torch.relu(self.norm(self.a(x))))
        return self.head(y.mean((2, 3)))  # type: ignore[no-any-return]


def splits(world: int) -> list[Splits]:
    """Plans of every kind, with ranks that hold nothing."""
    rows = (3, 1, 2)[:world]
    of_8, idle = (6, 2) if world == 2 else (5, 2, 1), (8, *(0,) * (world - 1))
    last = (*(0,) * (world - 1), 4)
    return [
        {
            "a": Split("height", rows),
            "b": Split("filter", of_8),
            "head": Split("replicate"),
        },
        {
            "a": Split("filter", of_8),
            "b": Split("channel", of_8),
            "head": Split("filter", last),
        },
        {
            "a": Split("filter", idle),
            "b": Split("height", rows[::-1]),
            "head": Split("channel", of_8[::-1]),
        },
        {
            "a": Split("replicate"),
            "b": Split("filter", of_8[::-1]),
            "head": Split("sample", rows),
        },
    ]


def plan_of(model: nn.Module, world: int, chosen: Splits) -> Plan:
    profile = hetconv.ClusterProfile.from_devices(["cpu"] * world, link="host")
    graph = hetconv.capture(model, torch.zeros(4, 3, 12, 10))
    return hetconv.make_plan(graph, profile).with_splits(chosen)


def train(model: nn.Module, optimizer: Any, steps: int, seed: int) -> list[float]:
    draw, losses = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        loss = model(torch.rand(4, 3, 12, 10, generator=draw)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def states(model: nn.Module, optimizer: Any) -> list[Any]:
    return tree_leaves(
        [
            hetconv.full_state_dict(model),
            hetconv.full_optim_state_dict(model, optimizer),
        ]
    )


def assert_same_bits(before: list[Any], after: list[Any]) -> None:
    for x, y in zip(before, after, strict=True):
        assert torch.equal(x, y) if isinstance(x, Tensor) else x == y


def migrates(world: int, optimizer_name: str) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    plain = Net()
    plans = [plan_of(plain, world, chosen) for chosen in splits(world)]
    stays, moves = (
        hetconv.parallelize(copy.deepcopy(plain), plans[0]) for _ in range(2)
    )
    fixed, moved = (
        OPTIMIZERS[optimizer_name](model.parameters()) for model in (stays, moves)
    )
    params = [id(p) for p in moves.parameters()]
    for n, plan in enumerate([*plans[1:], *plans[::-1]]):
        expected = train(stays, fixed, 2, n)
        assert train(moves, moved, 2, n) == pytest.approx(expected, abs=1e-10)
        before = states(moves, moved)
        hetconv.apply_plan(moves, moved, plan)
        assert_same_bits(before, states(moves, moved))
        assert [id(p) for p in moves.parameters()] == params
        for p in moves.parameters():
            assert p.grad is None or p.grad.shape == p.shape
    assert train(moves, moved, 2, 9) == pytest.approx(
        train(stays, fixed, 2, 9), abs=1e-10
    )


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("world", [2, 3])
def test_bits_stay_and_training_goes_on(world: int, optimizer: str) -> None:
    on_ranks(world, migrates, world, optimizer)


def refuses() -> str:
    plain = Net()
    plan = plan_of(plain, 2, splits(2)[0])
    model = hetconv.parallelize(plain, plan)
    other = plan_of(nn.Sequential(nn.Conv2d(3, 8, 3)), 2, {"0": Split("replicate")})
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(PlanError, match="does not fit the split layers") as e:
        hetconv.apply_plan(model, None, other)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    return str(e.value)


def test_a_plan_of_another_model_is_refused_on_all_ranks() -> None:
    assert "missing ['a', 'b', 'head'], unknown ['0']" in on_ranks(2, refuses)[0]
