"""Replicas that unequal arithmetic pulls apart are brought back to rank 0's, and found
alike they are left alone.
"""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hetconv
from hetconv import kernels
from hetconv.comm.rank_group import rank_group_of
from hetconv.comm.redistribute import all_gather_tensors
from hetconv.nn.replica_sync import replicas
from tests.nets import plan_of, splits_of
from tests.spawn import on_ranks

STEPS = 200


def spread(model: nn.Module) -> float:
    """The largest difference of any replicated number from rank 0's."""
    worst = 0.0
    for t, *_ in replicas(model, rank_group_of()):
        every = all_gather_tensors(rank_group_of(), t)
        worst = max(worst, float((every - every[0]).abs().max()))
    return worst


def trained(sync_every: int) -> float:
    """How far replicas are apart after training in which rank 1 computes a millionth too much."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 2, 3, padding=1),
    )
    cut = hetconv.parallelize(
        model,
        plan_of(model, splits_of(model, ("height",), (2, 1)), 2),
        sync_every=sync_every,
    )
    optimizer = torch.optim.SGD(cut.parameters(), 0.05, momentum=0.9)
    forward = kernels.conv_forward
    if dist.get_rank() == 1:
        kernels.conv_forward = lambda *args, **rest: forward(*args, **rest) * (1 + 1e-6)  # type: ignore[assignment]
        norm = torch.Tensor.mul_
        for p in cut.parameters():
            p.register_hook(lambda g: norm(g.clone(), 1 + 1e-6))
    try:
        generator = torch.Generator().manual_seed(0)
        for _ in range(STEPS):
            optimizer.zero_grad()
            x = torch.randn(2, 3, 6, 6, generator=generator)
            (cut(x) - x[:, :2]).square().mean().backward()
            optimizer.step()
    finally:
        kernels.conv_forward = forward  # type: ignore[assignment]
    return spread(cut)


def test_replicas_stay_together() -> None:
    free, held = on_ranks(2, trained, 0), on_ranks(2, trained, 10)
    assert free[0] > 3e-7
    assert held[0] < free[0] / 5


def synced() -> tuple[list[float], list[float], list[str], list[int]]:
    """Drifts found, spreads afterwards, what was logged, and versions of parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
    splits = splits_of(model, ("filter", "height"), (3, 1))
    cut = hetconv.parallelize(model, plan_of(model, splits, 2))
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("hetconv")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        drifts, spreads = [hetconv.sync_replicated(cut)], [spread(cut)]
        if dist.get_rank() == 1:
            with torch.no_grad():
                cut[2].weight[0, 0] += 0.25
                cut[1].running_var[1] -= 0.5
        versions = [p._version for p in cut.parameters()]
        own = cut[0].weight.detach().clone()
        drifts.append(hetconv.sync_replicated(cut))
        spreads.append(spread(cut))
        assert cut[0].weight.equal(own), "a slice is no replica"
        changed = [
            p._version - v for p, v in zip(cut.parameters(), versions, strict=True)
        ]
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    return drifts, spreads, said, changed


def test_what_differs_is_brought_back_told_and_logged_once() -> None:
    for rank, (drifts, spreads, said, changed) in enumerate(on_ranks(2, synced)):
        assert drifts == [0.0, pytest.approx(0.5)]
        assert spreads == [0.0, 0.0]
        assert len(said) == (rank == 0)
        assert all("0.5 in 2 tensors" in line for line in said)
        assert not any(changed), (
            "a graph that was built before would refuse its backward"
        )


def test_a_plain_model_has_no_replicas() -> None:
    assert hetconv.sync_replicated(nn.Conv2d(1, 1, 1)) == 0.0
