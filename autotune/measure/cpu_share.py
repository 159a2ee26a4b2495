"""By which clock a CPU is timed whose core others use too, and which part of it a rank gets."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch

from hetconv.comm.rank_group import RankGroup
from hetconv.comm.thread_time import MAX_WAITING_PART
from hetconv.runtime.throttle import computes_in_one_thread, slowdown

from .barrier import tight_barrier

SAMPLING_S = 0.2


@cache
def core_share(group: RankGroup) -> float:
    """Measures which part of its core this rank gets while no rank rests. Collective.

    What takes less than a turn of the system's scheduler does not see it.

    Returns:
        The part, in (0, 1]; 1 where nobody else uses the core.
    """
    tight_barrier(group)
    start, worked = time.perf_counter(), time.thread_time()
    while time.perf_counter() < start + SAMPLING_S:
        pass
    share = (time.thread_time() - worked) / (time.perf_counter() - start)
    tight_barrier(group)
    return share if share < 1 - MAX_WAITING_PART else 1.0


def uses_thread_clock(device: torch.device, throttled: bool = True) -> bool:
    """Tells whether what a device computes is timed by the thread's own clock.

    That clock does not count the turns of others on the core, which fall into long
    samples and between short ones; a step has its `core_share` of them.

    Args:
        device: the device of this rank.
        throttled: whether the work is slowed on a device that is slowed on purpose. It
            then sleeps less for others' turns, and takes what the wall clock says.
    """
    return computes_in_one_thread(device) and (not throttled or slowdown() == 1)


def clock_and_factor(
    device: torch.device, group: RankGroup, throttled: bool
) -> tuple[Callable[[], float], float]:
    """Returns the clock for samples, and how many times as long they take in a step.

    Collective. The arguments are those of `core_share` and `uses_thread_clock`.
    """
    share = core_share(group)
    if uses_thread_clock(device, throttled):
        return time.thread_time, 1 / share
    return time.perf_counter, 1.0
