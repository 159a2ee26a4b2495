"""Training programs whose plan changes: nothing else of them changes."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import hetconv
from tests.rebalancing.test_migrate import Net, plan_of, splits
from tests.spawn import on_ranks

STEPS, ACCUMULATED = 8, 2


def program(model: nn.Module, moves: bool, folder: Path) -> list[float]:
    """AMP with a scaler, a scheduler, accumulated gradients, clipping and a checkpoint."""
    world = torch.distributed.get_world_size()
    plans = [plan_of(Net(), world, chosen) for chosen in splits(world)]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    scaler = hetconv.GradScaler(model, "cpu", init_scale=2.0**4, growth_interval=2)
    draw, losses = torch.Generator().manual_seed(0), []
    for step in range(STEPS):
        for _ in range(ACCUMULATED):
            x = torch.rand(4, 3, 12, 10, generator=draw)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().square().mean() / ACCUMULATED
            scaler.scale(loss).backward()
            if moves and step == 3:  # with half of the gradients accumulated
                hetconv.apply_plan(model, optimizer, plans[2])
        scaler.unscale_(optimizer)
        hetconv.clip_grad_norm_(model, 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if moves and step in (1, 5):
            hetconv.apply_plan(model, optimizer, plans[1 + step % 3])
            hetconv.save_checkpoint(folder / str(step), model, optimizer)
            hetconv.load_checkpoint(folder / str(step), model, optimizer)
    return losses


def compares(folder: Path) -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    plain = Net()
    world = torch.distributed.get_world_size()
    moved, fixed = (
        program(
            hetconv.parallelize(
                copy.deepcopy(plain), plan_of(Net(), world, splits(world)[0])
            ),
            moves,
            folder,
        )
        for moves in (True, False)
    )
    return moved, fixed


@pytest.mark.parametrize("world", [2, 3])
def test_scaler_scheduler_accumulation_and_checkpoints(
    tmp_path: Path, world: int
) -> None:
    for moved, fixed in on_ranks(world, compares, tmp_path):
        assert len(moved) == STEPS
        # bf16 rounds sums of other splits otherwise.
        assert moved == pytest.approx(fixed, rel=2e-2)
