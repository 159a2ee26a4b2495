"""How tensors lie in memory, as the kernels see it, and how they are made to lie."""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from hetconv.sharding.conv_spec import ITEMSIZE

Four = tuple[int, int, int, int]
HUGE = 2**30  # elements from which addresses take 64 bits: leaves room for what a last tile reaches beyond


class Memory(NamedTuple):
    """How a 4-D tensor lies in memory: torch's logical order, strides in elements, alignment of its base in bytes."""

    shape: Four
    strides: Four
    dtype: str
    align: int = 16

    @staticmethod
    def of(t: Tensor) -> Memory:
        base = t.data_ptr() if t.device.type != "meta" else t.storage_offset() * t.element_size()
        return _lying(t.shape, t.stride(), t.dtype, base % 16)

    @property
    def unit(self) -> int:
        """The largest power of two, of at most 16 bytes, that every stride but the channels' is a multiple of."""
        most = 16 // ITEMSIZE[self.dtype]
        n, _, h, w = self.strides
        return gcd(most, n, h, w)

    @property
    def spans(self) -> int:
        """Elements from the first to the last, both included."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def tma(self) -> bool:
        """Whether a tensor descriptor can describe it: 16-byte base and strides, channels beside each other."""
        return (
            self.align == 16
            and self.unit * ITEMSIZE[self.dtype] == 16
            and self.strides[1] == 1
            and min(self.strides) > 0
        )

    @property
    def step(self) -> int | None:
        """The stride of all pixels, or None where they lie at several."""
        (N, _, H, W), (n, _, h, w) = self.shape, self.strides
        step = w if W > 1 else h if H > 1 else n
        return step if (H == 1 or h == W * step) and (N == 1 or n == H * W * step) else None

    @property
    def is_one_row(self) -> bool:
        """Whether all pixels lie at one stride, and are few enough to be one row of an image."""
        N, _, H, W = self.shape
        return N * H * W < HUGE and self.step is not None

    def as_one_row(self) -> Memory:
        (N, C, H, W), c, step = self.shape, self.strides[1], self.step
        assert step is not None
        far = N * H * W * step
        return Memory((1, C, 1, N * H * W), (far, c, far, step), self.dtype, self.align)


@lru_cache(4096)  # host time of every launch
def _lying(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, base: int) -> Memory:
    n, c, h, w = shape
    far = -(-c // 16) * 16 * max(h, 1) * max(w, 1)  # a stride that nothing is ever multiplied by
    strides = tuple(s if size > 1 else d for s, size, d in zip(stride, shape, (far, 1, far, far), strict=True))
    return Memory((n, c, h, w), strides, str(dtype)[6:], gcd(base, 16))  # type: ignore[arg-type]


def nhwc(t: Tensor) -> Tensor:
    """The tensor itself if its channels lie beside each other, else a copy in channels_last."""
    return t if t.shape[1] == 1 or t.stride(1) == 1 else t.contiguous(memory_format=torch.channels_last)


def krsc(w: Tensor) -> Tensor:
    """The same of filters, which the kernels address with 32 bits: those strewn further are copied too."""
    w = nhwc(w)
    return w if Memory.of(w).spans < HUGE else torch.empty_like(w, memory_format=torch.channels_last).copy_(w)


def in_rows(t: Tensor) -> Tensor:
    """The tensor itself if its channels lie beside each other and its pixels at one stride, else a copy."""
    t = nhwc(t)
    return t if t.numel() == 0 or Memory.of(t).step is not None else t.contiguous(memory_format=torch.channels_last)


def empty(shape: Four, like: Tensor) -> Tensor:
    """A new tensor in channels_last."""
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)
