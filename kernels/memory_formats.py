"""Memory formats of images and filters."""

from __future__ import annotations

import torch
from torch import Tensor

from hetconv.sharding.conv_spec import MemoryFormat

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Memory format in which convolutions run fastest, by a tensor's number of dimensions."""


def is_channels_last(x: Tensor) -> bool:
    """Returns whether images, or filters, are channels-last.

    The strides show it even for 1x1 kernels, which are contiguous in both formats.
    """
    return x.dim() in CHANNELS_LAST and x.stride(1) == 1 != x.stride(-1)


def in_format(x: Tensor, memory_format: MemoryFormat) -> Tensor:
    """Returns a tensor in a memory format: itself, or a copy.

    Args:
        x: Tensor of any number of dimensions.
        memory_format: Of images and filters.
    """
    last = CHANNELS_LAST if memory_format == "channels_last" else {}
    return x.contiguous(memory_format=last.get(x.dim(), torch.contiguous_format))


def fastest_format(device: torch.device) -> MemoryFormat:
    """Returns the memory format in which models of convolutions are fastest on a device.

    Without AVX-512 PyTorch takes up to twice as long to train them channels-last on a
    CPU: see `is_slow_channels_last` of `hetconv.kernels.aten`.
    """
    return "contiguous_format" if is_narrow_cpu(device) else "channels_last"


def is_narrow_cpu(device: torch.device) -> bool:
    """Returns whether a device is a CPU whose vectors have 256 bits, as PyTorch uses it."""
    return device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"
