"""A kernel launch as data: decided once per problem, from integers alone, then run on any tensors that lie alike.

A `Recipe` holds everything but addresses, so it is cached, compiled ahead of time and looked at without a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hetconv.errors import KernelError


class Descriptor(NamedTuple):
    """A tiled tensor map over an argument."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]


@dataclass(frozen=True)
class Recipe:
    """One launch. ``tensors`` maps a kernel's parameter to the name of the tensor, or of several, that it is given."""

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
            raise KernelError(f"a grid of {self.grid} programs is more than CUDA launches; give a larger tile")

    def run(self, tensors: Mapping[str, Tensor]) -> None:
        arguments: dict[str, Any] = {
            p: tensors[name] if isinstance(name, str) else tuple(tensors[n] for n in name)
            for p, name in self.tensors.items()
        }
        for p, index in self.slots.items():
            arguments[p] = arguments[p][index]
        for p, d in self.descriptors.items():
            arguments[p] = _descriptor()(arguments[p], list(d.shape), list(d.strides), list(d.block))
        self.kernel[self.grid](
            **arguments, **self.scalars, **self.constants, num_warps=self.warps, num_stages=self.stages
        )


@dataclass(frozen=True)
class Program:
    """Launches in order, and the float32 workspace (elements) that they share under the name ``partial``."""

    recipes: tuple[Recipe, ...]
    workspace: int = 0

    def run(self, **tensors: Tensor) -> None:
        some = next(iter(tensors.values()))
        with on_device(some.device):
            if self.workspace:
                tensors["partial"] = torch.empty(self.workspace, dtype=torch.float32, device=some.device)
            for recipe in self.recipes:
                recipe.run(tensors)


def on_device(device: torch.device) -> Any:
    """Triton launches on the current device; this makes it the tensors' own."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


@dataclass(frozen=True)
class Chip:
    """What a tile is chosen for: compute capability (90 for 9.0), multiprocessors, bytes of shared memory per block."""

    arch: int
    sms: int
    shared: int


CHIPS = {80: Chip(80, 108, 163 << 10), 89: Chip(89, 128, 99 << 10), 90: Chip(90, 132, 227 << 10)}
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
