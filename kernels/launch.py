"""A kernel launch as data: decided once per problem, from integers alone, then run on
any tensors that lie alike.

A `Recipe` holds everything but addresses, so it is cached, compiled ahead of time and
looked at without a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hetconv.errors import KernelError
from hetconv.sharding.conv_spec import ITEMSIZE

Four = tuple[int, int, int, int]
HUGE = (
    2**30
)  # elements from which addresses take 64 bits: leaves room for what a last tile reaches beyond


class Memory(NamedTuple):
    """How a 4-D tensor lies in memory: torch's logical order, strides in elements,
    alignment of its base in bytes.
    """

    shape: Four
    strides: Four
    dtype: str
    align: int = 16

    @staticmethod
    def of(t: Tensor) -> Memory:
        base = (
            t.data_ptr()
            if t.device.type != "meta"
            else t.storage_offset() * t.element_size()
        )
        return _lying(t.shape, t.stride(), t.dtype, base % 16)

    @property
    def unit(self) -> int:
        """The largest power of two, of at most 16 bytes, that every stride but the
        channels' is a multiple of.
        """
        most = 16 // ITEMSIZE[self.dtype]
        n, _, h, w = self.strides
        return gcd(most, n, h, w)

    @property
    def spans(self) -> int:
        """Elements from the first to the last, both included."""
        return 1 + sum(
            (size - 1) * stride
            for size, stride in zip(self.shape, self.strides, strict=True)
        )

    @property
    def tma(self) -> bool:
        """Whether a tensor descriptor can describe it: 16-byte base and strides,
        channels beside each other.
        """
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
        return (
            step
            if (H == 1 or h == W * step) and (N == 1 or n == H * W * step)
            else None
        )

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
def _lying(
    shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, base: int
) -> Memory:
    n, c, h, w = shape
    far = (
        -(-c // 16) * 16 * max(h, 1) * max(w, 1)
    )  # a stride that nothing is ever multiplied by
    strides = tuple(
        s if size > 1 else d
        for s, size, d in zip(stride, shape, (far, 1, far, far), strict=True)
    )
    return Memory((n, c, h, w), strides, str(dtype)[6:], gcd(base, 16))  # type: ignore[arg-type]


def nhwc(t: Tensor) -> Tensor:
    """The tensor itself if its channels lie beside each other, else a copy in channels_last."""
    return (
        t
        if t.shape[1] == 1 or t.stride(1) == 1
        else t.contiguous(memory_format=torch.channels_last)
    )


def krsc(w: Tensor) -> Tensor:
    """The same of filters, which the kernels address with 32 bits: those strewn further
    are copied too.
    """
    w = nhwc(w)
    return (
        w
        if Memory.of(w).spans < HUGE
        else torch.empty_like(w, memory_format=torch.channels_last).copy_(w)
    )


def in_rows(t: Tensor) -> Tensor:
    """The tensor itself if its channels lie beside each other and its pixels at one
    stride, else a copy.
    """
    t = nhwc(t)
    return (
        t
        if t.numel() == 0 or Memory.of(t).step is not None
        else t.contiguous(memory_format=torch.channels_last)
    )


def empty(shape: Four, like: Tensor) -> Tensor:
    """A new tensor in channels_last."""
    return torch.empty(
        shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last
    )


class Descriptor(NamedTuple):
    """A tiled tensor map over an argument."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]


@dataclass(frozen=True)
class Recipe:
    """One launch. ``tensors`` maps a kernel's parameter to the name of the tensor, or
    of several, that it is given.
    """

    kernel: Any
    grid: tuple[int, int, int]
    tensors: Mapping[str, str | tuple[str, ...]]
    scalars: Mapping[str, int | tuple[int, ...]]
    constants: Mapping[str, Any]
    warps: int
    stages: int
    descriptors: Mapping[str, Descriptor] = field(default_factory=dict)
    slots: Mapping[str, tuple[slice, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if max(self.grid[1:]) > 65535 or self.grid[0] > 2**31 - 1:
            raise KernelError(
                f"a grid of {self.grid} programs is more than CUDA launches; give a larger tile"
            )

    def run(self, tensors: Mapping[str, Tensor]) -> None:
        arguments: dict[str, Any] = {
            p: tensors[name]
            if isinstance(name, str)
            else tuple(tensors[n] for n in name)
            for p, name in self.tensors.items()
        }
        for p, index in self.slots.items():
            arguments[p] = arguments[p][index]
        for p, d in self.descriptors.items():
            arguments[p] = _descriptor()(
                arguments[p], list(d.shape), list(d.strides), list(d.block)
            )
        self.kernel[self.grid](
            **arguments,
            **self.scalars,
            **self.constants,
            num_warps=self.warps,
            num_stages=self.stages,
        )


@dataclass(frozen=True)
class Program:
    """Launches in order, and the float32 workspace (elements) that they share under the
    name ``partial``.
    """

    recipes: tuple[Recipe, ...]
    workspace: int = 0

    def run(self, **tensors: Tensor) -> None:
        some = next(iter(tensors.values()))
        with on_device(some.device):
            if self.workspace:
                tensors["partial"] = torch.empty(
                    self.workspace, dtype=torch.float32, device=some.device
                )
            for recipe in self.recipes:
                recipe.run(tensors)


def on_device(device: torch.device) -> Any:
    """Triton launches on the current device; this makes it the tensors' own."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


@dataclass(frozen=True)
class Chip:
    """What a tile is chosen for: compute capability (90 for 9.0), multiprocessors,
    bytes of shared memory per block.
    """

    arch: int
    sms: int
    shared: int


CHIPS = {
    80: Chip(80, 108, 163 << 10),
    89: Chip(89, 128, 99 << 10),
    90: Chip(90, 132, 227 << 10),
}
"""An A100, an RTX 4090 and an H100: what kernels are compiled for where none is at hand."""


def chip_of(device: torch.device) -> Chip:
    """The chip behind a device; an H100 stands in where Triton's interpreter runs on the CPU."""
    return _cuda_chip(device.index) if device.type == "cuda" else CHIPS[90]


@lru_cache
def _cuda_chip(index: int) -> Chip:
    p = torch.cuda.get_device_properties(index)
    from triton.runtime import driver

    shared = driver.active.utils.get_device_properties(index)["max_shared_mem"]
    return Chip(p.major * 10 + p.minor, p.multi_processor_count, shared)


@lru_cache
def _descriptor() -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor
