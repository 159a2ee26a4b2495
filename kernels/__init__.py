"""Local convolutions on plain tensors: no rank, no plan. Letters as in `hetconv.spec`."""

from .aten import conv2d, conv2d_backward

__all__ = ["conv2d", "conv2d_backward"]
