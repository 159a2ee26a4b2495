"""Launches by Triton, and then by its compiled kernels without its Python code.

A `triton.JITFunction` binds, types and specializes all of its arguments at each call,
which takes several times as long as the launch. Here that is done once for tensors of
one alignment; further calls go to the function in C that Triton itself ends in.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from .interface import CompiledCall, KernelCall

KNOWN_VERSIONS = ("3.6.", "3.7.")
"""Versions of Triton whose launch is known; under others each call goes through Triton."""


class TritonLauncher:
    """Launches on the current GPU, or in Triton's interpreter."""

    runs_on_cpu = False

    def launch(self, call: KernelCall) -> CompiledCall | None:
        """Makes a call for the first time, see `Launcher.launch`."""
        kernel = call.kernel[call.grid](
            **call.arguments, **call.constants, **call.options
        )
        if kernel is None:  # in the interpreter
            return None
        launcher = type(kernel.run)
        if not _is_known(launcher.__module__, launcher.__name__):
            return None
        run = kernel.run
        if run.global_scratch_size or run.profile_scratch_size:
            return None
        return _CompiledKernel(kernel, call.grid)


class _CompiledKernel:
    """A compiled kernel with a grid, on the device that is current when this is made."""

    def __init__(self, kernel: Any, grid: tuple[int, int, int]):
        from triton import knobs
        from triton.runtime import driver

        run = kernel.run
        launch, self._descriptors = _without_descriptors(run.launch)
        self._kernel, self._grid = kernel, grid
        self._hooks = knobs.runtime
        self._device = driver.active.get_current_device()
        self._current_stream = driver.active.get_current_stream
        modes, no_scratch = (run.launch_cooperative_grid, run.launch_pdl), (None, None)
        self._first: tuple[Any, ...] = modes
        self._last: tuple[Any, ...] = ()
        if hasattr(run, "arg_annotations"):  # since Triton 3.7
            self._last = (*no_scratch, run.arg_annotations, run.kernel_signature)
            self._launch = launch
        else:
            self._first += no_scratch
            self._launch = _with_separate_arguments(launch)

    def expand(self, number: int, descriptor: Any) -> list[Any]:
        """Returns a tensor map, shape and strides."""
        from triton.backends.nvidia.driver import make_tensordesc_arg

        expanded: list[Any] = make_tensordesc_arg(descriptor, self._descriptors[number])
        return expanded

    def launch(self, arguments: list[Any]) -> None:
        """Launches on the current stream, see `CompiledCall.launch`."""
        stream = self._current_stream(self._device)
        enter, leave = self._hooks.launch_enter_hook, self._hooks.launch_exit_hook
        metadata = None
        if enter.calls or leave.calls:  # those of a profiler
            metadata = self._kernel.launch_metadata(self._grid, stream)
        else:
            enter = leave = None
        self._launch(
            *self._grid,
            stream,
            self._kernel.function,
            *self._first,
            self._kernel.packed_metadata,
            metadata,
            enter,
            leave,
            *self._last,
            arguments,
        )


@lru_cache
def _is_known(module: str, name: str) -> bool:
    """Returns whether a compiled kernel's launcher, a class, is one that is known here."""
    import triton

    is_nvidia = (module, name) == ("triton.backends.nvidia.driver", "CudaLauncher")
    return is_nvidia and triton.__version__.startswith(KNOWN_VERSIONS)


def _without_descriptors(launch: Any) -> tuple[Callable[..., None], list[Any]]:
    """Splits Triton's launch into the function in C, and how descriptors are expanded.

    Triton wraps the function of kernels with descriptors in one that expands them.
    """
    code = getattr(launch, "__code__", None)
    if code is None or "tensordesc_meta" not in code.co_freevars:
        return launch, []
    cells = (cell.cell_contents for cell in launch.__closure__)
    found = dict(zip(code.co_freevars, cells, strict=True))
    return found["launcher"], found["tensordesc_meta"]


def _with_separate_arguments(launch: Callable[..., None]) -> Callable[..., None]:
    """Returns a launch that takes the kernel's arguments as one list."""

    def launched(*given: Any) -> None:
        *settings, arguments = given
        launch(*settings, *arguments)

    return launched
