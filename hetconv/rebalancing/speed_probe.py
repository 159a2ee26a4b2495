"""A small computation whose time tells the speed of a rank that has little work."""

from __future__ import annotations

import time
from statistics import median

import torch

from hetconv import kernels
from hetconv.comm.consensus import assert_consensus
from hetconv.comm.rank_group import RankGroup

CHANNELS, SIZE, BASELINE_RUNS = 32, 48, 20


class SpeedProbe:
    """Tells how many times as long a device takes as when the probe was made; collective.

    All ranks compute then: devices that share memory or power are slower together, as
    they will be while others work.

    Args:
        group: The ranks.
        device: The device of this rank.
    """

    def __init__(self, group: RankGroup, device: torch.device):
        self._device = device
        self._x = torch.ones(1, CHANNELS, SIZE, SIZE, device=device)
        self._weight = torch.ones(CHANNELS, CHANNELS, 3, 3, device=device)
        self._seconds()  # the first call prepares the kernel
        assert_consensus(group, "SpeedProbe", "made")
        self._baseline_s = median(self._seconds() for _ in range(BASELINE_RUNS))

    def slowdown(self) -> float:
        """Returns the slow-down now; it takes a few milliseconds."""
        return self._seconds() / self._baseline_s

    @torch.no_grad()
    def _seconds(self) -> float:
        self._synchronize()
        start_s = time.perf_counter()
        kernels.conv2d(self._x, self._weight, padding=1)
        self._synchronize()
        return time.perf_counter() - start_s

    def _synchronize(self) -> None:
        # Nobody waits for what a rank without work has still queued.
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
