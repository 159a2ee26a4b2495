"""Replicas stay replicas: what unequal hardware rounds unequally is brought back to
what the first rank holds.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hetconv.comm import call_tags
from hetconv.comm.consensus import checksum
from hetconv.comm.rank_group import Team
from hetconv.comm.redistribute import from_every_rank, perform, take
from hetconv.sharding.param_shards import Held, Ranks, summed_among

from .parameters import shared_out, team_of_model

log = logging.getLogger("hetconv")


@torch.no_grad()
def sync_replicated(model: nn.Module) -> float:
    """Gives ranks that hold the same parameters or buffers the first one's values,
    where they differ; collective.

    Returns the largest difference of any number on any rank, the same on every rank,
    and logs it on rank 0 unless it is zero. Where all hold the same bytes, which is
    compared first, nothing moves and nothing is written to.
    """
    team = team_of_model(model)
    if team is None or team.size == 1:
        return 0.0
    call_tags.enter("sync_replicated")
    copies = replicated(model, team)
    sums = torch.tensor(
        [checksum(c.local) for c in copies], dtype=torch.int64, device="cpu"
    )
    every = (
        from_every_rank(team, sums.to(copies[0].local.device)) if copies else sums[None]
    )
    apart = [
        c
        for c, told in zip(copies, every.t().tolist(), strict=True)
        if len({told[r] for r in c.holders}) > 1
    ]
    if not apart:
        return 0.0
    before = [c.local.clone() for c in apart]
    alike: dict[tuple[Ranks, torch.dtype, torch.device], list[Copy]] = {}
    for c in apart:
        alike.setdefault((c.holders, c.local.dtype, c.local.device), []).append(c)
    for same in alike.values():
        _spread(team, same)
    drift = _largest(
        team, [(c.local - old).abs() for c, old in zip(apart, before, strict=True)]
    )
    if team.rank == 0:
        log.info(
            "replicas had drifted by up to %.3g in %d tensors; all are the first rank's again",
            drift,
            len(apart),
        )
    return drift


class Copy(NamedTuple):
    """A tensor of so many numbers that each of these ranks holds, the first of them
    first; on others it is empty.
    """

    local: Tensor
    holders: Ranks
    numel: int


def replicated(model: nn.Module, team: Team) -> list[Copy]:
    """What several ranks hold of parameters and buffers; views, without autograd or a
    count of their versions.
    """
    shared, everyone, found = shared_out(model), tuple(range(team.size)), []
    for t in (*model.parameters(), *model.buffers()):
        held = shared.get(id(t))
        if held is None:
            found += [Copy(t.data, everyone, t.numel())] if t.numel() else []
            continue
        own = held.boxes[team.rank]
        for box, holders in held.atoms:
            if len(holders) > 1:
                found.append(
                    Copy(take(t.data, own, own.intersect(box)), holders, box.numel)
                )
    return found


def _spread(team: Team, same: Sequence[Copy]) -> None:
    """Tensors that the same ranks hold, from the first of these to all of them."""
    holders, numel = same[0].holders, sum(c.numel for c in same)
    rounds = summed_among(holders, numel, team.size)
    first = Held.by((numel,), [rank == holders[0] for rank in range(team.size)]).boxes
    rounds = (
        (first, rounds[0][1]),
        *rounds[1:],
    )  # as in a sum to which that one alone gives
    flat = torch.cat([c.local.flatten() for c in same])[: first[team.rank].numel]
    new = perform(team, flat, rounds, first[team.rank], rounds[-1][1][team.rank])
    if team.rank in holders:
        for c, values in zip(same, new.split([c.numel for c in same]), strict=True):
            c.local.copy_(values.view(c.local.shape))


def _largest(team: Team, differences: Sequence[Tensor]) -> float:
    worst = torch.stack(
        [d.max().double() if d.numel() else d.sum().double() for d in differences]
    ).max()
    return float(from_every_rank(team, worst).max())
