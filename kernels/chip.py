"""Properties of a GPU that kernels and tiles are chosen for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True)
class Chip:
    """Properties of a GPU that tiles are chosen for.

    Attributes:
        arch: Compute capability, 90 for 9.0.
        sms: Number of multiprocessors.
        shared: Bytes of shared memory per block.
        clock_hz: Highest clock of the multiprocessors.
        memory_bytes_per_s: Peak bandwidth of the memory.
        l2_bytes: Bytes of the level-2 cache.
    """

    arch: int
    sms: int
    shared: int
    clock_hz: float
    memory_bytes_per_s: float
    l2_bytes: int


CHIPS = {
    80: Chip(80, 108, 163 << 10, 1.41e9, 2.04e12, 40 << 20),
    89: Chip(89, 128, 99 << 10, 2.52e9, 1.01e12, 72 << 20),
    90: Chip(90, 132, 227 << 10, 1.98e9, 3.35e12, 50 << 20),
}
"""An A100, an RTX 4090 and an H100, by their data sheets: what kernels are compiled for
where none is at hand."""


def chip_of(device: torch.device) -> Chip:
    """Returns the chip of a device; an H100 stands in for Triton's interpreter on CPUs."""
    return _cuda_chip(device.index) if device.type == "cuda" else CHIPS[90]


@lru_cache
def _cuda_chip(index: int) -> Chip:
    p = torch.cuda.get_device_properties(index)
    from triton.runtime import driver

    found = driver.active.utils.get_device_properties(index)
    # Clocks are in kHz; memory moves a bit per line of its bus on both edges.
    memory_bytes_per_s = found["mem_clock_rate"] * 1e3 * 2 * found["mem_bus_width"] / 8
    return Chip(
        p.major * 10 + p.minor,
        p.multi_processor_count,
        found["max_shared_mem"],
        found["sm_clock_rate"] * 1e3,
        memory_bytes_per_s,
        p.L2_cache_size,
    )
