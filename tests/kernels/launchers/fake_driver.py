"""Triton's CUDA driver without a GPU: kernels are compiled, and their launches are kept."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as cuda
from triton.compiler.compiler import LazyDict
from triton.knobs import HookChain
from triton.runtime import driver

Arguments = tuple[Any, ...]


class FakeUtils:
    """What Triton implements in C, as far as launches need it."""

    def __init__(self) -> None:
        self.launched: list[Arguments] = []
        self._functions: dict[bytes, int] = {}

    def load_binary(
        self, name: str, kernel: bytes, shared: int, device: int
    ) -> Arguments:
        function = self._functions.setdefault(kernel, len(self._functions) + 1)
        return function, function, 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10}

    def fill_tma_descriptor_tiled(self, *arguments: Any) -> Arguments:
        return ("tensor map", *map(_plain, arguments))

    fill_tma_descriptor = fill_tma_descriptor_tiled  # its name in Triton 3.6

    def build_signature_metadata(self, signature: Sequence[str]) -> Arguments:
        return tuple(signature)

    def launch(self, *arguments: Any) -> None:
        self.launched.append(tuple(map(_plain, arguments)))


def activate() -> FakeUtils:
    """Makes Triton launch on a Hopper GPU that is not there."""
    utils = FakeUtils()
    module: Any = cuda
    module.PyKernelArg = lambda nested_tuple, type: (nested_tuple, type)
    module.ARG_CONSTEXPR, module.ARG_KERNEL, module.ARG_TUPLE = range(3)
    # Triton 3.6 compiles a launcher for each signature.
    module.library_dirs = list
    module.compile_module_from_src = lambda **_: SimpleNamespace(launch=utils.launch)
    fake = SimpleNamespace(
        utils=utils,
        launcher_cls=cuda.CudaLauncher,
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 7,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    driver.set_active(fake)
    return utils


def _plain(value: Any) -> Any:
    """An argument with addresses in the place of tensors, and tuples in that of lists.

    Hooks are what they call, and None if that is nothing; what they are given is None.
    """
    if isinstance(value, HookChain):
        return tuple(value.calls) or None
    if isinstance(value, LazyDict):
        return None
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return value
