"""Statistics of shards, combined to those of the whole.

Moments of shards are combined weighted by the shards' sizes (Chan, Golub and LeVeque,
1979, "Updating formulae and a pairwise algorithm for computing sample variances").
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from hetconv.comm.exchange_plan import exchange_plan
from hetconv.comm.packed_exchange import Part, exchange_together
from hetconv.comm.rank_group import RankGroup
from hetconv.comm.redistribute import run_rounds
from hetconv.sharding.moves import Exchange, Move


def exact_of(x: Tensor) -> torch.dtype:
    """Returns the dtype in which the statistics of ``x`` are computed."""
    return x.dtype if x.dtype == torch.float64 else torch.float32


def gathered(own: Tensor, move: Move, group: RankGroup) -> Tensor:
    """Returns (P, 2, K): the moments that a rank and its peers hold.

    Args:
        own: (1, 2, K): this rank's moments.
        move: The all-gather of moments.
        group: The ranks.
    """
    if len(move.forward) != 1:
        held, wanted = move.src.boxes[group.rank], move.dst.boxes[group.rank]
        return run_rounds(group, own, move.forward, held, wanted)
    (received,) = exchange_together(group, [Part(own, *move.forward[0])])
    return of_peers(own, received, move.forward[0], group.rank)


def of_peers(
    own: Tensor, received: Mapping[int, Tensor], of_all: Exchange, rank: int
) -> Tensor:
    """Returns (P, 2, K): moments of a rank and its peers, from what it received.

    Args:
        own: (1, 2, K): this rank's moments.
        received: The peers' moments, by rank.
        of_all: The exchange of moments.
        rank: This rank.
    """
    peers = exchange_plan(*of_all, rank).parts
    if not peers:  # of a shard without samples
        return own.new_zeros(of_all[1][rank].shape)
    return torch.cat([received.get(peer, own) for peer in peers])


Shares = tuple[float, ...] | Tensor
"""The fraction of each whole that each part holds: of all wholes alike, or (P, K)."""


def combined(each: Tensor, shares: Shares) -> Tensor:
    """Returns (2, K): variance and mean of wholes from those of their parts.

    Args:
        each: (P, 2, K): variances and means of P parts of each whole.
        shares: The parts' fractions of the wholes.
    """
    if isinstance(shares, Tensor):
        shares = as_tensor(shares, each)
        total = (each * shares[:, None]).sum(0)
        apart = each[:, 1] - total[1]
        total[0] += apart.square_().mul_(shares).sum(0)
        return total
    total, held = each[0], shares[0]
    for part, share in zip(each[1:], shares[1:], strict=True):
        held += share
        if not share:
            continue
        weight = share / held
        apart = part[1] - total[1]
        total = torch.lerp(total, part, weight)
        total[0].addcmul_(apart, apart, value=weight * (1 - weight))
    return total


def as_tensor(shares: Shares, like: Tensor) -> Tensor:
    """Returns shares as (P, K) or (P, 1), with the data type and device of a tensor."""
    if isinstance(shares, Tensor):
        return shares.to(like)
    return like.new_tensor(shares)[:, None]


@lru_cache(maxsize=256)
def shares_tensor(
    of_parts: tuple[tuple[float, ...], ...],
    samples: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Returns (P, n G) shares from a cache: a host that copies them waits for the GPU.

    Args:
        of_parts: (P, G): the fraction of each group of a sample that each part holds.
        samples: n.
        dtype: Of the result.
        device: Of the result.
    """
    with torch.inference_mode(False):  # autograd may save it later
        shares = torch.tensor(of_parts, dtype=torch.float64, device="cpu")
        return shares.repeat(1, samples).to(device, dtype)


def bias_like(
    x: Tensor, channels: int, dtype: torch.dtype | None, wanted: bool
) -> Tensor:
    """Returns zeros in the place of a bias that was not saved: only its gradient counts.

    Args:
        x: The input of the norm.
        channels: Number of channels of the bias.
        dtype: Data type of the bias; that of ``x`` if there was none.
        wanted: Whether its gradient is needed.
    """
    bias = x.new_zeros(channels, dtype=dtype or x.dtype)
    return bias.requires_grad_(wanted)


def empty_result(x: Tensor, *params: Tensor | None) -> Tensor:
    """Returns an empty result where torch refuses an empty input.

    Args:
        x: The empty shard.
        params: Parameters that the autograd graph must still reach.
    """
    # The product saves a tensor, as the norms of other shards do: checkpointing counts
    # saved tensors to know how far to compute again.
    return sum((p.sum() * 0 for p in params if p is not None), x * x.new_ones(()))
