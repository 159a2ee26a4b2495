"""Memory formats of images and filters."""

from __future__ import annotations

import torch
from torch import Tensor

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Memory format in which convolutions run fastest, by a tensor's number of dimensions."""


def is_channels_last(x: Tensor) -> bool:
    """Returns whether images, or filters, are channels-last.

    The strides show it even for 1x1 kernels, which are contiguous in both formats.
    """
    return x.dim() in CHANNELS_LAST and x.stride(1) == 1 != x.stride(-1)
