"""How ranks begin together."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hetconv.comm.rank_group import (
    RankGroup,
    all_gather_small,
    translate_backend_errors,
)

_WORD = torch.zeros(1, device="cpu")


def barrier(group: RankGroup) -> None:
    """Returns once all ranks have called it, by the backend's own barrier.

    Raises:
        LostRankError: Another rank is gone.
    """
    translate_backend_errors(group, lambda: dist.barrier(group.process_group))


def tight_barrier(group: RankGroup) -> None:
    """Returns once all ranks have called it, on one host within 0.4 ms of each other.

    A backend's barrier wakes threads of its own, which wait for the core that the rank
    fills: ranks left it up to 4 ms apart, at turns of the system's clock, and steps
    seemed to take a whole number of such turns.
    """
    all_gather_small(group, _WORD)
