"""Launches that are recorded and not made, to be checked or timed without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .interface import CompiledCall, KernelCall


class RecordedDescriptor(NamedTuple):
    """Tensor descriptor of a recorded launch.

    Attributes:
        address: Address of the tensor.
        dtype: Data type of the tensor.
        shape: Sizes, as are the other attributes one per dimension.
        strides: In elements.
        block: Sizes of a box that is copied at once.
    """

    address: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]


class RecordedLaunch(NamedTuple):
    """One launch that was not made.

    Attributes:
        kernel: The Triton kernel.
        grid: Programs per dimension.
        arguments: Value of each run-time parameter: an address, a tuple of addresses, a
            `RecordedDescriptor`, an integer or a tuple of integers.
        constants: Values of the constexpr parameters.
        options: Options of the compiler, such as num_warps.
    """

    kernel: Any
    grid: tuple[int, int, int]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    options: dict[str, int]


@dataclass(eq=False)
class RecordingLauncher:
    """Records launches; tensors on the CPU stand in for CUDA's.

    Results are as `torch.empty` makes them, as nothing is computed.

    Examples:
        >>> launcher = RecordingLauncher()
        >>> with launching_by(launcher):
        ...     y = kernels.conv2d(x, w, backend="triton")
        >>> [launch.grid for launch in launcher.launches]
        [(8, 1, 1)]
    """

    runs_on_cpu: bool = field(default=True, init=False)
    _calls: list[tuple[KernelCall, list[Any]]] = field(default_factory=list, init=False)

    @property
    def launches(self) -> list[RecordedLaunch]:
        """The launches since the last call of `clear`, in order."""
        return [_recorded(call, arguments) for call, arguments in self._calls]

    def clear(self) -> None:
        """Forgets the launches."""
        self._calls.clear()

    def launch(self, call: KernelCall) -> CompiledCall:
        """Records a call, see `Launcher.launch`."""
        names: list[str] = call.kernel.arg_names
        given = {**call.constants, **call.arguments}
        arguments = [_without_tensors(given[name]) for name in names]
        # Further calls keep no tensors of this one.
        call = replace(call, arguments=dict.fromkeys(call.arguments))
        self._calls.append((call, arguments))
        return _RecordedCall(call, self._calls)


@dataclass(frozen=True)
class _RecordedCall:
    call: KernelCall
    calls: list[tuple[KernelCall, list[Any]]]

    def expand(self, number: int, descriptor: Any) -> list[Any]:
        return [_without_tensors(descriptor)]

    def launch(self, arguments: list[Any]) -> None:
        self.calls.append((self.call, arguments))


def _recorded(call: KernelCall, arguments: list[Any]) -> RecordedLaunch:
    values = dict(zip(call.kernel.arg_names, arguments, strict=True))
    at_run_time = {name: values[name] for name in call.arguments}
    constants, options = dict(call.constants), dict(call.options)
    return RecordedLaunch(call.kernel, call.grid, at_run_time, constants, options)


def _without_tensors(value: Any) -> Any:
    """An argument with addresses in the place of tensors."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, tuple):
        return tuple(map(_without_tensors, value))
    if hasattr(value, "block_shape"):  # a descriptor
        base = value.base
        sizes = map(tuple, (value.shape, value.strides, value.block_shape))
        return RecordedDescriptor(base.data_ptr(), base.dtype, *sizes)
    return value
