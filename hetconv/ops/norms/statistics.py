"""Statistics of shards, combined to those of the whole.

Moments of shards are combined weighted by the shards' sizes (Chan, Golub and LeVeque,
1979, "Updating formulae and a pairwise algorithm for computing sample variances").
"""

from __future__ import annotations

import torch
from torch import Tensor


def exact_of(x: Tensor) -> torch.dtype:
    """Returns the dtype in which the statistics of ``x`` are computed."""
    return x.dtype if x.dtype == torch.float64 else torch.float32


def combined(each: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Returns variance and mean (K) of wholes from those of their parts.

    Args:
        each: (P, 2, K): variances and means of P parts of each whole.
        share: (P, K) or (P, 1): the part's fraction of the whole.
    """
    var, mean = (each * share[:, None]).sum(0)
    apart = each[:, 1] - mean
    return apart.square_().mul_(share).sum(0).add_(var), mean


def empty_result(x: Tensor, *params: Tensor | None) -> Tensor:
    """Returns an empty result where torch refuses an empty input.

    Args:
        x: The empty shard.
        params: Parameters that the autograd graph must still reach.
    """
    # The product saves a tensor, as the norms of other shards do: checkpointing counts
    # saved tensors to know how far to compute again.
    return sum((p.sum() * 0 for p in params if p is not None), x * x.new_ones(()))
