"""Kernel launches as data: decided once per problem, run on any tensors of one layout.

A `Launch` holds everything but addresses, so that it can be cached, compiled ahead of
time and inspected without a device.
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
from hetconv.sharding.conv_spec import ITEMSIZE, Ints

# 64-bit addresses from here on: it leaves room for what a last tile reaches beyond.
MIN_ELEMENTS_FOR_INT64 = 2**30
VECTOR_BYTES = 16  # of the widest load of a thread, and of TMA's alignment
Slices = tuple[slice, ...]


class StridedLayout(NamedTuple):
    """Layout of a 4-D tensor in memory.

    Attributes:
        shape: (N, C, H, W), in PyTorch's logical order.
        strides: In elements, in the same order. A dimension of one element has a stride
            that does not limit `unit`.
        dtype: PyTorch's name of the data type.
        alignment: Largest power of two, at most 16, that divides the address, in bytes.
    """

    shape: Ints
    strides: Ints
    dtype: str
    alignment: int = VECTOR_BYTES

    @staticmethod
    def of(t: Tensor) -> StridedLayout:
        """Returns the layout of a tensor."""
        is_meta = t.device.type == "meta"
        address = t.storage_offset() * t.element_size() if is_meta else t.data_ptr()
        return _layout(t.shape, t.stride(), t.dtype, address % VECTOR_BYTES)

    @staticmethod
    def packed(shape: Ints, dtype: str) -> StridedLayout:
        """Returns the layout of a contiguous channels_last tensor."""
        _, C, H, W = shape
        return StridedLayout(shape, (C * H * W, 1, W * C, C), dtype)

    @property
    def unit(self) -> int:
        """Largest power of two, at most 16 bytes, that divides all strides but the channels'."""
        n, _, h, w = self.strides
        return gcd(VECTOR_BYTES // ITEMSIZE[self.dtype], n, h, w)

    @property
    def span(self) -> int:
        """Elements from the first to the last, both included."""
        sides = zip(self.shape, self.strides, strict=True)
        return 1 + sum((size - 1) * stride for size, stride in sides)

    @property
    def supports_tma(self) -> bool:
        """Whether a tensor descriptor can describe it: 16-byte address and strides."""
        aligned = self.unit * ITEMSIZE[self.dtype] == VECTOR_BYTES == self.alignment
        return aligned and self.strides[1] == 1 and min(self.strides) > 0

    @property
    def pixel_stride(self) -> int | None:
        """Stride from pixel to pixel, or None where it differs among them."""
        (N, _, H, W), (n, _, h, w) = self.shape, self.strides
        step = w if W > 1 else h if H > 1 else n
        is_even = (H == 1 or h == W * step) and (N == 1 or n == H * W * step)
        return step if is_even else None

    @property
    def is_one_row(self) -> bool:
        """Whether all pixels have one stride and are few enough for one row of an image."""
        N, _, H, W = self.shape
        return N * H * W < MIN_ELEMENTS_FOR_INT64 and self.pixel_stride is not None

    def as_one_row(self) -> StridedLayout:
        """Returns the layout with all pixels in one row of one image."""
        (N, C, H, W), step = self.shape, self.pixel_stride
        assert step is not None
        pixels = N * H * W
        strides = (pixels * step, self.strides[1], pixels * step, step)
        return self._replace(shape=(1, C, 1, pixels), strides=strides)

    def stride_arguments(self, name: str, dims: str, unit: int = 1) -> dict[str, int]:
        """Returns the strides of samples, rows and columns as a kernel takes them.

        Args:
            name: Letter of the tensor, as x in ``stride_xn``.
            dims: Letters of samples, rows and columns, as n in ``stride_xn``.
            unit: Elements that the strides are counted in.
        """
        n, _, h, w = self.strides
        strides = zip(dims, (n, h, w), strict=True)
        return {f"stride_{name}{dim}": stride // unit for dim, stride in strides}


@lru_cache(4096)  # host time of every launch
def _layout(
    shape: torch.Size, stride: Ints, dtype: torch.dtype, address: int
) -> StridedLayout:
    _, c, h, w = shape
    # Nothing is ever multiplied by the stride of a dimension of one element.
    unused = -(-c // 16) * 16 * max(h, 1) * max(w, 1)
    dims = zip(stride, shape, (unused, 1, unused, unused), strict=True)
    strides = tuple(s if size > 1 else default for s, size, default in dims)
    alignment = gcd(address, VECTOR_BYTES)
    return StridedLayout(tuple(shape), strides, str(dtype)[6:], alignment)


def nhwc(t: Tensor) -> Tensor:
    """Returns the tensor if its channels lie side by side, else a channels_last copy."""
    if t.shape[1] == 1 or t.stride(1) == 1:
        return t
    return t.contiguous(memory_format=torch.channels_last)


def krsc(w: Tensor) -> Tensor:
    """Returns `nhwc` of filters, a copy also where they need 64-bit addresses."""
    w = nhwc(w)
    if StridedLayout.of(w).span < MIN_ELEMENTS_FOR_INT64:
        return w
    return torch.empty_like(w, memory_format=torch.channels_last).copy_(w)


def with_even_pixels(t: Tensor) -> Tensor:
    """Returns `nhwc` of a tensor, a copy also where its pixels have several strides."""
    t = nhwc(t)
    if t.numel() == 0 or StridedLayout.of(t).pixel_stride is not None:
        return t
    return t.contiguous(memory_format=torch.channels_last)


def empty(shape: Ints, like: Tensor) -> Tensor:
    """Returns a new channels_last tensor with the data type and device of ``like``."""
    return torch.empty(
        shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last
    )


class Descriptor(NamedTuple):
    """Tiled TMA descriptor of a tensor: shape, strides in elements, shape of a box."""

    shape: Ints
    strides: Ints
    block: Ints


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    Attributes:
        kernel: The Triton kernel.
        grid: Programs per dimension.
        tensors: Name of the tensor, or of several, for each pointer parameter.
        scalars: Integers, or tuples of them, for each run-time parameter.
        constants: Values of the constexpr parameters.
        warps: Warps per program.
        stages: Stages of software pipelining.
        descriptors: TMA descriptors of those tensors that the kernel reads through one.
        slices: Index of the part of a tensor that the kernel is given.

    Raises:
        KernelError: The grid is larger than CUDA's.
    """

    kernel: Any
    grid: tuple[int, int, int]
    tensors: Mapping[str, str | tuple[str, ...]]
    scalars: Mapping[str, int | Ints]
    constants: Mapping[str, Any]
    warps: int
    stages: int = 1
    descriptors: Mapping[str, Descriptor] = field(default_factory=dict)
    slices: Mapping[str, Slices] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if max(self.grid[1:]) > 65535 or self.grid[0] > 2**31 - 1:
            raise KernelError(
                f"a grid of {self.grid} programs is more than CUDA launches; give a larger tile"
            )

    def run(self, tensors: Mapping[str, Tensor]) -> None:
        """Launches the kernel on tensors, given by name."""
        arguments: dict[str, Any] = {
            p: tensors[name]
            if isinstance(name, str)
            else tuple(tensors[n] for n in name)
            for p, name in self.tensors.items()
        }
        for p, index in self.slices.items():
            arguments[p] = arguments[p][index]
        for p, d in self.descriptors.items():
            arguments[p] = _tensor_descriptor()(arguments[p], *map(list, d))
        self.kernel[self.grid](
            **arguments,
            **self.scalars,
            **self.constants,
            num_warps=self.warps,
            num_stages=self.stages,
        )


@dataclass(frozen=True)
class LaunchSequence:
    """Launches in order, which may share a workspace.

    Attributes:
        launches: What is launched.
        workspace: Elements of a float32 tensor that they share, named ``partial``.
    """

    launches: tuple[Launch, ...]
    workspace: int = 0

    def run(self, **tensors: Tensor) -> None:
        """Launches all kernels on the device of the tensors, given by name."""
        device = next(iter(tensors.values())).device
        with on_device(device):
            if self.workspace:
                tensors["partial"] = torch.empty(
                    self.workspace, dtype=torch.float32, device=device
                )
            for launch in self.launches:
                launch.run(tensors)


def on_device(device: torch.device) -> Any:
    """Returns a context in which a device is current, as Triton's launches need it."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


@lru_cache
def _tensor_descriptor() -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor
