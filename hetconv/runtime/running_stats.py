"""Running statistics of batch norms that are split over channels.

A rank updates those of its own channels. All norms are synchronized at once, when the
model's forward ends: a message for each would take longer than the norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from hetconv.comm import call_tags
from hetconv.comm.rank_group import RankGroup
from hetconv.comm.redistribute import run_rounds
from hetconv.sharding.moves import all_gather_uneven
from hetconv.torch_internals import foreach_copy_

Sizes = tuple[int, ...]  # by rank, how many channels are its own


class _Pending(NamedTuple):
    """Statistics of which every rank has updated its own channels.

    Attributes:
        stats: tensors of shape (C,).
        sizes: channels of each rank.
        exact: dtype in which they are sent without rounding.
    """

    stats: tuple[Tensor, ...]
    sizes: Sizes
    exact: torch.dtype


class RunningStats:
    """Running statistics of a model that ranks have updated, but not yet sent."""

    def __init__(self, group: RankGroup):
        self._group = group
        self._untold: dict[
            int, _Pending
        ] = {}  # by the id of the first of its statistics

    @property
    def pending(self) -> int:
        """Number of norms that are not synchronized; the same on every rank."""
        return len(self._untold)

    def note(self, stats: tuple[Tensor, ...], sizes: Sizes, exact: torch.dtype) -> None:
        """Notes that every rank updates the statistics of its own channels.

        Args:
            stats: tensors of shape (C,).
            sizes: channels of each rank.
            exact: dtype in which they are sent without rounding.
        """
        before = self._untold.get(id(stats[0]))
        if before is not None:  # a norm that is called twice
            exact = torch.promote_types(exact, before.exact)
        self._untold[id(stats[0])] = _Pending(stats, sizes, exact)

    def ensure_synced(self, stat: Tensor, sizes: Sizes = ()) -> None:
        """Synchronizes all statistics before one is used for other channels. Collective.

        Args:
            stat: the statistic.
            sizes: channels of each rank in this use; empty for all channels on every rank.
        """
        untold = self._untold.get(id(stat))
        if untold is not None and untold.sizes != sizes:
            self.sync()

    def sync(self) -> None:
        """Sends every rank the channels of the others. Collective."""
        untold, self._untold = [*self._untold.values()], {}
        if untold:
            call_tags.enter("running statistics")
        with torch.no_grad():
            for dtype in dict.fromkeys(one.exact for one in untold):
                self._tell([one for one in untold if one.exact == dtype], dtype)

    def _tell(self, untold: Sequence[_Pending], dtype: torch.dtype) -> None:
        stats = [stat for one in untold for stat in one.stats]
        cuts = tuple(one.sizes for one in untold for _ in one.stats)
        me = self._group.rank
        own = torch.cat(
            [
                stat.split(sizes)[me].to(dtype)
                for stat, sizes in zip(stats, cuts, strict=True)
            ]
        )
        move = all_gather_uneven(tuple(map(sum, zip(*cuts, strict=True))))
        by_rank = run_rounds(
            self._group, own, move.forward, move.src.boxes[me], move.dst.boxes[me]
        )
        by_stat = by_rank[_in_order(cuts, own.device)]
        # Autograd may keep some of them: their own channels stay as they are, and a
        # norm does not count as a write.
        foreach_copy_([stat.data for stat in stats], by_stat.split([*map(sum, cuts)]))


@lru_cache(maxsize=256)
def _in_order(cuts: tuple[Sizes, ...], device: torch.device) -> Tensor:
    """Returns the position of each channel among the gathered channels of all ranks."""
    by_rank = [
        n for of_rank in zip(*cuts, strict=True) for n in of_rank
    ]  # rank by rank, of each statistic in turn
    starts = list(accumulate(by_rank, initial=0))
    at = (
        starts[rank * len(cuts) + k]
        for k, sizes in enumerate(cuts)
        for rank in range(len(sizes))
    )
    sizes = (n for of_stat in cuts for n in of_stat)
    order = [
        i for start, n in zip(at, sizes, strict=True) for i in range(start, start + n)
    ]
    return torch.tensor(order, device=device)
