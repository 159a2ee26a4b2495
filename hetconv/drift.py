"""Replicas stay replicas: what unequal hardware rounds unequally is brought back to rank 0's."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from .agreement import checksum
from .modules import sliced_parameters, team_of_model
from .movement import from_every_rank
from .transport import Team, broadcast

log = logging.getLogger("hetconv")


@torch.no_grad()
def sync_replicated(model: nn.Module) -> float:
    """Gives every rank rank 0's replicated parameters and buffers, where they differ; collective.

    Returns the largest difference of any number on any rank, the same on every rank, and logs it on rank 0 unless it is
    zero. Where all ranks hold the same bytes, which is compared first, nothing moves and nothing is written to.
    """
    team = team_of_model(model)
    if team is None or team.size == 1:
        return 0.0
    replicas = replicated(model)
    sums = torch.tensor([checksum(t) for t in replicas], dtype=torch.int64)
    every = from_every_rank(team, sums.to(replicas[0].device)) if replicas else sums[None]
    apart = [t for t, differs in zip(replicas, (every != every[0]).any(0).tolist(), strict=True) if differs]
    if not apart:
        return 0.0
    before = [t.clone() for t in apart]
    broadcast(team, apart)
    drift = _largest(team, [(a - b).abs().max() for a, b in zip(apart, before, strict=True)])
    if team.rank == 0:
        log.info("replicas had drifted by up to %.3g in %d tensors; all have rank 0's again", drift, len(apart))
    return drift


def replicated(model: nn.Module) -> list[Tensor]:
    """The parameters and buffers of which every rank has the whole, without autograd or a count of their versions."""
    cut = sliced_parameters(model)
    return [t.data for t in (*model.parameters(), *model.buffers()) if id(t) not in cut and t.numel()]


def _largest(team: Team, differences: list[Tensor]) -> float:
    worst = torch.stack([d.double() for d in differences]).max()
    return float(from_every_rank(team, worst).max())
