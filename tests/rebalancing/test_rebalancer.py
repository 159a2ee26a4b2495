"""A rebalancer in a training loop: what it measures is made up, what it moves is real."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetconv
from hetconv.errors import HetConvError
from hetconv.planner.plan_costs import EstimatedCosts
from hetconv.rebalancing.rebalancer import Rebalancer
from hetconv.schemas.plan import Plan
from tests.spawn import on_ranks

PROFILE = hetconv.ClusterProfile.from_devices("2xT4", link="pcie3-x16")
STEPS, SLOW_FROM, SLOW = 60, 10, 2.5


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1)
    )


class Script:
    """Stands in for what is measured: rank 0 is slower than predicted from some step on."""

    def __init__(self, rebalancer: Rebalancer, costs: EstimatedCosts) -> None:
        self._rebalancer, self._costs = rebalancer, costs
        self._rank = torch.distributed.get_rank()

    def last(self, steps: int) -> Tensor:
        end = self._rebalancer.monitor.steps
        return torch.tensor([self._seconds(end - n) for n in reversed(range(steps))])

    def slowdown(self) -> float:
        return self._factors(self._rebalancer.monitor.steps)[self._rank]

    def _seconds(self, step: int) -> tuple[float, float, float]:
        plan, factors = self._rebalancer.plan, self._factors(step)
        busy_s = self._costs.busy_s(plan)[self._rank] * factors[self._rank]
        return self._costs.step_s(plan, factors), busy_s, 0.0

    def _factors(self, step: int) -> tuple[float, float]:
        return (SLOW if step >= SLOW_FROM else 1.0, 1.0)


def trains(record: Path, dry_run: bool) -> tuple[list[float], list[float], int]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    plain = net()
    # Planned for large images, on which rows are worth it; trained on small ones.
    graph = hetconv.capture(copy.deepcopy(plain), torch.zeros(1, 3, 2048, 2048))
    plan = hetconv.make_plan(graph, PROFILE)
    moves, stays = (hetconv.parallelize(copy.deepcopy(plain), plan) for _ in range(2))
    losses: list[list[float]] = []
    decisions = 0
    for model, controlled in ((moves, True), (stays, False)):
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        rebalancer = Rebalancer(
            model, optimizer, plan, graph, PROFILE, dry_run=dry_run, record=record
        )
        script: Any = Script(rebalancer, EstimatedCosts(graph, PROFILE, plan.mode))
        rebalancer._probe, rebalancer.monitor.last = script, script.last
        draw, of_model = torch.Generator().manual_seed(1), []
        for _ in range(STEPS):
            optimizer.zero_grad()
            x: Tensor = torch.rand(1, 3, 16, 12, generator=draw)
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            of_model.append(loss.item())
            if controlled:
                decisions += rebalancer.step() is not None
        losses.append(of_model)
        changed = rebalancer.plan.splits != plan.splits
        assert changed is (controlled and not dry_run)
    return losses[0], losses[1], decisions


@pytest.mark.parametrize("dry_run", [False, True])
def test_training_goes_on_under_the_new_plan(tmp_path: Path, dry_run: bool) -> None:
    record = tmp_path / "new" / "decisions.jsonl"
    for moved, fixed, decisions in on_ranks(2, trains, record, dry_run):
        assert moved == pytest.approx(fixed, abs=1e-10)
        assert decisions >= 1
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert lines[0]["action"] == "move"
    assert lines[0]["dry_run"] is dry_run
    assert lines[0]["factors"][0] == pytest.approx(SLOW)
    assert lines[0]["predicted_step_s"] < lines[0]["step_s"]
    assert lines[0]["measured_gain"] is None
    if not dry_run:
        assert lines[1]["action"] in ("keep", "revert")
        assert lines[1]["measured_gain"] is not None


def refuses() -> None:
    plain = net()
    graph = hetconv.capture(copy.deepcopy(plain), torch.zeros(1, 3, 64, 64))
    shorter = hetconv.capture(plain[0], torch.zeros(1, 3, 64, 64))
    plan: Plan = hetconv.make_plan(graph, PROFILE)
    model = hetconv.parallelize(copy.deepcopy(plain), plan)
    right: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters()),
        "plan": plan,
        "graph": graph,
        "profile": PROFILE,
    }
    other = hetconv.ClusterProfile.from_devices("3xT4", link="pcie3-x16")
    for name, wrong, message in (
        ("profile", other, "the profile has 3 devices, but the model is on 2"),
        ("profile", "cluster.json", "a str was given in place of a ClusterProfile"),
        ("plan", "plan.json", "a str was given in place of a Plan"),
        ("graph", None, "graph is a NoneType; give what hetconv.capture"),
        ("graph", shorter, "the plan splits .*, which the graph does not have"),
        ("model", plain, "has no split layer"),
        ("optimizer", plan, "optimizer is a Plan"),
        ("optimizer", torch.optim.SGD(plain.parameters()), "no parameter of the model"),
        ("log_every", -1, "log_every is -1"),
        ("record", "/", "/ is a folder"),
    ):
        with pytest.raises(HetConvError, match=message):
            Rebalancer(**right | {name: wrong})
    # The ranks still agree; only rank 0 writes, so the others' disks do not matter.
    Rebalancer(**right, record="/" if torch.distributed.get_rank() else None)


def test_what_does_not_fit_is_refused_on_all_ranks_alike() -> None:
    on_ranks(2, refuses)
