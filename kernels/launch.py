"""Kernel launches as data: decided once per problem, run on any tensors of one layout.

A `Launch` holds everything but addresses, so that it can be cached, compiled ahead of
time and inspected without a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import gcd
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from hetconv.errors import KernelError
from hetconv.sharding.conv_spec import ITEMSIZE, Ints

from .launchers.by_triton import TritonLauncher
from .launchers.decisions import forget_decisions
from .launchers.interface import KernelCall, Launcher
from .launchers.repeat import Repeat

# 64-bit addresses from here on: it leaves room for what a last tile reaches beyond.
MIN_ELEMENTS_FOR_INT64 = 2**30
VECTOR_BYTES = 16  # of the widest load of a thread, and of TMA's alignment
Slices = tuple[slice, ...]
T = TypeVar("T")


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
    _repeats: dict[tuple[Any, ...], Repeat] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if max(self.grid[1:]) > 65535 or self.grid[0] > 2**31 - 1:
            raise KernelError(
                f"a grid of {self.grid} programs is more than CUDA launches; give a larger tile"
            )

    def run(self, tensors: Mapping[str, Tensor]) -> Repeat | None:
        """Launches the kernel.

        Arguments are prepared once for each device, data type and alignment; further
        calls only put addresses in.

        Args:
            tensors: Tensors by name; there may be more than the kernel takes.

        Returns:
            What makes the same launch at other addresses, or None if nothing does.
        """
        given = [tensors[name] for name in self.names]
        addresses = [t.data_ptr() for t in given]
        key = (
            _launcher,
            given[0].device,
            *[t.dtype for t in given],
            *[address % VECTOR_BYTES for address in addresses],
        )
        repeat = self._repeats.get(key)
        if repeat is not None:
            repeat(addresses)
            return repeat
        call = self._call(tensors)
        compiled = _launcher.launch(call)
        if compiled is not None:
            repeat = Repeat(call, compiled, given, self._sources())
            self._repeats[key] = repeat
        return repeat

    def _sources(self) -> dict[str, int | tuple[int, ...]]:
        """Position among `names` of what each pointer parameter is given."""
        index = {name: i for i, name in enumerate(self.names)}
        return {
            p: index[name] if isinstance(name, str) else tuple(index[n] for n in name)
            for p, name in self.tensors.items()
        }

    def _call(self, tensors: Mapping[str, Tensor]) -> KernelCall:
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
        arguments |= dict(self.scalars)
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return KernelCall(self.kernel, self.grid, arguments, self.constants, options)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors that the launch is given, each once."""
        names: dict[str, None] = {}
        for name in self.tensors.values():
            names |= dict.fromkeys((name,) if isinstance(name, str) else name)
        return tuple(names)


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
        self._with_workspace(tensors, self._launch)

    def run_first(
        self, tensors: dict[str, Tensor]
    ) -> Callable[[dict[str, Tensor]], None]:
        """Launches all kernels.

        Args:
            tensors: Tensors by name.

        Returns:
            A function that does the same, sooner, on tensors with the same data types,
            device and alignments.
        """
        repeats = self._with_workspace(tensors, self._launch)
        prepared = [
            (launch.names, repeat)
            for launch, repeat in zip(self.launches, repeats, strict=True)
            if repeat is not None
        ]
        if len(prepared) < len(repeats):
            return lambda tensors: self.run(**tensors)

        def repeat_all(tensors: dict[str, Tensor]) -> None:
            for names, repeat in prepared:
                repeat([tensors[name].data_ptr() for name in names])

        return lambda tensors: self._with_workspace(tensors, repeat_all)

    def _launch(self, tensors: dict[str, Tensor]) -> list[Repeat | None]:
        return [launch.run(tensors) for launch in self.launches]

    def _with_workspace(
        self, tensors: dict[str, Tensor], launch: Callable[[dict[str, Tensor]], T]
    ) -> T:
        like = next(iter(tensors.values()))
        if self.workspace:
            workspace = torch.empty(
                self.workspace, dtype=torch.float32, device=like.device
            )
            tensors = {**tensors, "partial": workspace}
        # Triton launches on the current device.
        if like.is_cuda and like.get_device() != torch.cuda.current_device():
            with torch.cuda.device(like.device):
                return launch(tensors)
        return launch(tensors)


_launcher: Launcher = TritonLauncher()


@contextmanager
def launching_by(launcher: Launcher) -> Iterator[None]:
    """Makes a launcher make all launches within, in the place of Triton.

    It is the one place in which kernels are launched. A
    `launchers.recording.RecordingLauncher` tells, without a GPU, what would be
    launched.

    Args:
        launcher: What is given the launches.
    """
    global _launcher
    before, _launcher = _launcher, launcher
    forget_decisions()
    try:
        yield
    finally:
        _launcher = before
        forget_decisions()


def launches_on_cpu() -> bool:
    """Returns whether tensors on the CPU stand in for CUDA's, as launches are recorded."""
    return _launcher.runs_on_cpu


@lru_cache
def _tensor_descriptor() -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor
