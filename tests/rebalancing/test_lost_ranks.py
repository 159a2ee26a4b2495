"""A rank is killed while a plan changes: the others raise, and have one plan each."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path

import torch
import torch.distributed as dist

import hetconv
from hetconv.errors import LostRankError
from hetconv.nn.split_layer import SplitLayer
from tests.rebalancing.test_migrate import Net, plan_of, splits, train
from tests.spawn import on_ranks, outcomes

WORLD, KILLS, LONGEST_S = 3, 10, 0.3


def is_killed(checkpoint: Path, victim: int, after_s: float) -> str:
    """Changes between plans until a rank is killed; returns what this one raises."""
    plain = Net()
    plans = [plan_of(plain, WORLD, chosen) for chosen in splits(WORLD)]
    model = hetconv.parallelize(plain, plans[0])
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    train(model, optimizer, 1, 0)
    hetconv.save_checkpoint(checkpoint, model, optimizer)
    if dist.get_rank() == victim:
        pid = os.getpid()
        threading.Timer(after_s, lambda: os.kill(pid, signal.SIGKILL)).start()
    error, followed = "", 0
    try:
        while True:
            for plan in plans[1:] + plans[:1]:
                hetconv.apply_plan(model, optimizer, plan)
                followed += 1
    except LostRankError as e:
        error = str(e)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, SplitLayer)}
    # It may have been lost before or after all agreed to switch.
    assert any(
        all(layer.follows(plan.layers[name]) for name, layer in layers.items())
        for plan in (plans[followed % 4], plans[(followed + 1) % 4])
    )
    assert all(layer.misfit() is None for layer in layers.values())
    for p in model.parameters():
        for kept in optimizer.state[p].values():
            assert not kept.dim() or kept.shape == p.shape
    return error


def loads(checkpoint: Path) -> list[float]:
    plain = Net()
    model = hetconv.parallelize(plain, plan_of(plain, 2, splits(2)[0]))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    hetconv.load_checkpoint(checkpoint, model, optimizer)
    return train(model, optimizer, 1, 1)


def test_killed_at_random_moments(tmp_path: Path) -> None:
    draw = random.Random(0)
    for n in range(KILLS):
        checkpoint, victim = tmp_path / str(n), draw.randrange(WORLD)
        came = outcomes(
            WORLD, is_killed, checkpoint, victim, draw.uniform(0, LONGEST_S)
        )
        for rank, (ok, said) in enumerate(came):
            if rank != victim:
                assert ok, said
                assert "got no answer from another rank" in said
        assert not came[victim][0]
        first, second = on_ranks(2, loads, checkpoint)
        assert first == second
