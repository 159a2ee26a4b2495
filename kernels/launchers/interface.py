"""Interface between launches as data and what makes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class KernelCall:
    """One call of a Triton kernel with all that it is given.

    Attributes:
        kernel: The Triton kernel.
        grid: Programs per dimension.
        arguments: Value of each run-time parameter: a tensor, a tuple of tensors, a
            `triton.tools.tensor_descriptor.TensorDescriptor`, an integer or a tuple of
            integers.
        constants: Values of the constexpr parameters.
        options: Options of the compiler, such as num_warps.
    """

    kernel: Any
    grid: tuple[int, int, int]
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any]
    options: Mapping[str, int]


class CompiledCall(Protocol):
    """A kernel that is compiled and loaded for calls that differ in addresses alone."""

    def expand(self, number: int, descriptor: Any) -> list[Any]:
        """Returns the arguments that stand for a tensor descriptor in a launch.

        Args:
            number: Position of the parameter among the descriptors of the kernel.
            descriptor: The descriptor. Only the first argument may depend on its
                tensor's address.
        """

    def launch(self, arguments: list[Any]) -> None:
        """Launches the kernel on the device that it was compiled on.

        Args:
            arguments: Values of all parameters, constants included, in the kernel's
                order: addresses in the place of tensors, and descriptors expanded.
        """


class Launcher(Protocol):
    """Makes the launches of a process.

    Attributes:
        runs_on_cpu: Whether tensors on the CPU may stand in for CUDA's.
    """

    runs_on_cpu: bool

    def launch(self, call: KernelCall) -> CompiledCall | None:
        """Makes a call for the first time.

        Args:
            call: The call.

        Returns:
            What makes further calls at other addresses of the same alignment, or None
            if each is to be made by this method.
        """
