"""Synchronization of replicas that diverged because devices round differently."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hetconv.comm import call_tags
from hetconv.comm.consensus import checksum
from hetconv.comm.exchange_plan import local_slice
from hetconv.comm.rank_group import RankGroup
from hetconv.comm.redistribute import all_gather_tensors, run_rounds
from hetconv.sharding.param_shards import ParamShards, Ranks, all_reduce_among

from .parameters import group_of_model, sharded_parameters

log = logging.getLogger("hetconv")


@torch.no_grad()
def sync_replicated(model: nn.Module) -> float:
    """Makes replicas of parameters and buffers equal; collective.

    Checksums are compared first. A tensor that differs gets the values of the first rank
    that holds it, and rank 0 logs the largest difference.

    Args:
        model: A parallelized model.

    Returns:
        The largest difference of any number on any rank, the same on every rank.
    """
    group = group_of_model(model)
    if group is None or group.size == 1:
        return 0.0
    call_tags.enter("sync_replicated")
    copies = replicas(model, group)
    sums = torch.tensor(
        [checksum(c.local) for c in copies], dtype=torch.int64, device="cpu"
    )
    every = (
        all_gather_tensors(group, sums.to(copies[0].local.device))
        if copies
        else sums[None]
    )
    apart = [
        c
        for c, of_ranks in zip(copies, every.t().tolist(), strict=True)
        if len({of_ranks[r] for r in c.holders}) > 1
    ]
    if not apart:
        return 0.0
    before = [c.local.clone() for c in apart]
    alike: dict[tuple[Ranks, torch.dtype, torch.device], list[Replica]] = {}
    for c in apart:
        alike.setdefault((c.holders, c.local.dtype, c.local.device), []).append(c)
    for same in alike.values():
        _spread(group, same)
    drift = _largest(
        group, [(c.local - old).abs() for c, old in zip(apart, before, strict=True)]
    )
    if group.rank == 0:
        log.info(
            "replicas had drifted by up to %.3g in %d tensors; all are the first rank's again",
            drift,
            len(apart),
        )
    return drift


class Replica(NamedTuple):
    """Tensor that several ranks hold.

    Attributes:
        local: This rank's copy; empty on ranks that do not hold it.
        holders: The ranks that hold it. The others follow the first one.
        numel: Number of its elements.
    """

    local: Tensor
    holders: Ranks
    numel: int


def replicas(model: nn.Module, group: RankGroup) -> list[Replica]:
    """Returns the parts of parameters and buffers that several ranks hold.

    They are views without autograd; writes to them are not counted as versions.

    Args:
        model: A parallelized model.
        group: Its ranks.
    """
    shared, everyone, found = sharded_parameters(model), tuple(range(group.size)), []
    for t in (*model.parameters(), *model.buffers()):
        held = shared.get(id(t))
        if held is None:
            found += [Replica(t.data, everyone, t.numel())] if t.numel() else []
            continue
        own = held.boxes[group.rank]
        for box, holders in held.cells:
            if len(holders) > 1:
                found.append(
                    Replica(
                        local_slice(t.data, own, own.intersect(box)), holders, box.numel
                    )
                )
    return found


def _spread(group: RankGroup, same: Sequence[Replica]) -> None:
    """Broadcasts tensors that the same ranks hold from the first of these ranks."""
    holders, numel = same[0].holders, sum(c.numel for c in same)
    rounds = all_reduce_among(holders, numel, group.size)
    first = ParamShards.on_ranks(
        (numel,), [rank == holders[0] for rank in range(group.size)]
    ).boxes
    # A broadcast is an all-reduce to which one rank alone contributes.
    rounds = ((first, rounds[0][1]), *rounds[1:])
    flat = torch.cat([c.local.flatten() for c in same])[: first[group.rank].numel]
    new = run_rounds(group, flat, rounds, first[group.rank], rounds[-1][1][group.rank])
    if group.rank in holders:
        for c, values in zip(same, new.split([c.numel for c in same]), strict=True):
            c.local.copy_(values.view(c.local.shape))


def _largest(group: RankGroup, differences: Sequence[Tensor]) -> float:
    largest = [(d.max() if d.numel() else d.sum()).double() for d in differences]
    return float(all_gather_tensors(group, torch.stack(largest).max()).max())
