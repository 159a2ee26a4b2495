"""How ranks begin together, and which part of its core each gets then."""

from __future__ import annotations

import time
from functools import cache
from typing import NamedTuple

import torch

from hetconv.comm.cpu_time import SHARED
from hetconv.comm.rank_group import RankGroup, all_gather_small

HERE = torch.zeros(1, device="cpu")
CORE_S = 0.2  # for which it is watched whether a rank waits for its core


def meet(group: RankGroup) -> None:
    """Returns once all ranks have called it: on one host within 0.4 ms of each other, mostly 0.2.

    A backend's barrier wakes threads of its own, which wait for the core that the rank
    fills: ranks left it up to 4 ms apart, at turns of the system's clock, and steps
    seemed to take a whole number of such turns.
    """
    all_gather_small(group, HERE)


class Parts(NamedTuple):
    """Of its core, that a rank which never rests gets while all do so, and while all
    others rest.
    """

    together: float
    alone: float


@cache
def parts_of_core(group: RankGroup) -> Parts:
    """Collective. Less than 1 where others use the core too, and nobody sees it in what
    takes less than their turn.
    """

    def part() -> float:
        began, worked = time.perf_counter(), time.thread_time()
        while time.perf_counter() < began + CORE_S:
            pass
        found = (time.thread_time() - worked) / (time.perf_counter() - began)
        return found if found < 1 - SHARED else 1.0

    meet(group)
    together, alone = part(), 1.0
    for rank in range(group.size):
        meet(group)
        if rank == group.rank:
            alone = part()
    meet(group)
    return Parts(together, alone)
