"""How fast the devices are from moment to moment, by a fixed product that is timed again and again.

Where it takes longer than usual something else used the device, or its clock was lower:
what was measured then tells little of the device.
"""

from __future__ import annotations

from statistics import mean

import numpy as np
import torch

from hetconv.comm.rank_group import RankGroup, all_gather_object
from hetconv.schemas.provenance import Disturbance

from .barrier import tight_barrier
from .timer import timed

DISTURBED = 1.3  # times as long as usual
PRODUCTS = 9  # a check; about 30 ms on one core
SIZES = {"cpu": 384, "cuda": 2048}
USUAL = 0.25  # the quantile of all checks of a rank


def disturbances(what: str, slower: float) -> tuple[Disturbance, ...]:
    """Returns what a profile keeps of a slowdown: nothing if it is usual.

    Args:
        what: What was measured meanwhile.
        slower: How many times as long as usual one and the same work took.
    """
    return (Disturbance(what, round(slower, 2)),) if slower > DISTURBED else ()


class PaceChecks:
    """Times the same product on all ranks at once, whenever it is asked to.

    Args:
        group: all ranks.
        device: the device of this rank.
    """

    def __init__(self, group: RankGroup, device: torch.device):
        self._group, self._device = group, device
        size = SIZES[device.type]
        self._x = torch.ones(size, size, device=device)
        self._y = torch.empty_like(self._x)
        self._own: list[float] = []
        self._product()  # the first one is slower

    def __len__(self) -> int:
        """Returns the number of checks so far."""
        return len(self._own)

    def _product(self) -> None:
        torch.mm(self._x, self._x, out=self._y)

    def check(self) -> None:
        """Times the product. Collective."""
        tight_barrier(self._group)
        seconds = sorted(timed(self._product, self._device) for _ in range(PRODUCTS))
        # The mean, since who shares a core is slowed for some products only; without one
        # that a moment's interruption hit.
        self._own.append(mean(seconds[:-1]))

    def slowdowns(self) -> list[float]:
        """Returns how many times as long as usual each check took. Collective.

        Returns:
            For every check the slowest rank's.
        """
        own = np.array(self._own)
        usual = np.quantile(own, USUAL) if own.size else 1.0
        of_ranks = all_gather_object(self._group, own / usual)
        return [float(slowest) for slowest in np.max(of_ranks, axis=0)]
