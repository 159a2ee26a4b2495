"""Capture of CUDA graphs, and what a graph cannot repeat.

The latter is found operator by operator while a graph is captured, so that it has a name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from hetconv.comm import call_tags
from hetconv.errors import HetConvError
from hetconv.torch_internals import DispatchMode, storage_id, tree_iter

T = TypeVar("T")
Replay = Callable[[], None]
COPIES = {"aten::_to_copy", "aten::copy_", "aten::_foreach_copy_"}
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_"}
MASKS = (torch.bool, torch.uint8)


class Capture(Protocol):
    """Records what a function launches; all functions of one object share memory."""

    def __call__(self, run: Callable[[], T], /) -> tuple[Replay, T]:
        """Returns what launches it again, and the function's result."""


class CudaCapture:
    """Captures the functions of one step into CUDA graphs.

    Args:
        device: The GPU that they run on.
    """

    def __init__(self, device: torch.device):
        self._device, self._pool = device, torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], T], /) -> tuple[Replay, T]:
        """Returns what launches the function's kernels again, and its result."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            # Entered again so that a capture that fails leaves this stream current.
            stream = torch.cuda.stream(torch.cuda.current_stream())
            # NCCL's watchdog may ask for events from its own thread meanwhile.
            capturing = torch.cuda.graph(
                graph, pool=self._pool, capture_error_mode="thread_local"
            )
            with stream, capturing:
                result = run()
        return graph.replay, result


@contextmanager
def no_autocast_cache() -> Iterator[None]:
    """Context in which parameters are cast anew: a cached cast would stay as it is."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def aliased_parameters(
    module: nn.Module, parameters: Sequence[nn.Parameter]
) -> Iterator[list[nn.Parameter]]:
    """Context in which a module has other parameters with the same memory.

    Autograd's node of a parameter belongs to the stream of the step that made it, which
    may be an eager one; a capture must not depend on that stream. Nor do hooks of the
    parameter run in the capture: they run at each replay.

    Args:
        module: The module.
        parameters: Those of its parameters that are replaced.
    """
    aliases = {id(p): nn.Parameter(p.detach()) for p in parameters}
    places = [
        (m._parameters, name, p)
        for m in module.modules()
        for name, p in dict.items(m._parameters)
        if id(p) in aliases
    ]
    try:
        for own, name, p in places:
            own[name] = aliases[id(p)]
        yield [aliases[id(p)] for p in parameters]
    finally:
        for own, name, p in places:
            own[name] = p


class NotCapturableError(HetConvError):
    """A step does something that a graph cannot repeat."""


def obstacle(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], device: torch.device
) -> str | None:
    """Returns why a graph cannot repeat a call of an operator; None if it can.

    Args:
        func: The operator, as a dispatch mode sees it.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        device: The device whose work is captured.
    """
    tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
    places = {x.device.type for x in tensors}
    if kwargs.get("device") is not None:
        places.add(torch.device(kwargs["device"]).type)
    name = func.name().partition(".")[0]
    if torch.Tag.data_dependent_output in func.tags:
        return "the host waits for its result"
    if name in INDEXING:
        counted = torch.Tag.dynamic_output_shape in func.tags or args[2].numel() > 1
        if counted and any(i is not None and i.dtype in MASKS for i in args[1]):
            return "the host waits for the number of places in a mask"
    elif torch.Tag.dynamic_output_shape in func.tags:
        return "the host waits for the shape of its result"
    if name in COPIES and len(places) > 1:
        return f"it copies between {' and '.join(sorted(places))}"
    if name == "aten::lift_fresh" and places == {device.type} != {"cpu"}:
        return f"it copies Python's numbers to {device.type}"
    if torch.Tag.nondeterministic_seeded in func.tags and places != {device.type}:
        return "it draws random numbers on the CPU"
    return None


class CaptureGuard(DispatchMode):  # type: ignore[misc]
    """Refuses by name what a graph cannot repeat, before it spoils the capture.

    Attributes:
        read: Memory from outside that the operators read, by `storage_id`. A graph reads
            it at its address, so that it must stay.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self._device = device
        self._made: set[int] = set()
        self.read: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Runs an operator unless there is an `obstacle`."""
        kwargs = kwargs or {}
        reason = obstacle(func, args, kwargs, self._device)
        if reason is not None:
            raise NotCapturableError(
                f"{func.name()}: {reason} ({call_tags.user_code()})"
            )
        for x in tree_iter((args, kwargs)):
            if isinstance(x, Tensor) and storage_id(x) not in self._made:
                self.read.setdefault(storage_id(x), x.untyped_storage())
        result = func(*args, **kwargs)
        outputs = (y for y in tree_iter(result) if isinstance(y, Tensor))
        self._made.update(
            storage_id(y) for y in outputs if storage_id(y) not in self.read
        )
        return result
