"""A stand-in for CUDA graphs on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

T = TypeVar("T")


class _Recorder(TorchDispatchMode):
    """Records operators, to run them again on the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, before in self._calls:
            again = func(*tree_map_only(Tensor, Tensor.detach, args), **kwargs)
            pairs = zip(tree_leaves(before), tree_leaves(again), strict=True)
            for old, new in pairs:
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.detach().copy_(new)


class RecordingCapture:
    """Captures and replays as CUDA graphs do, operator by operator.

    Args:
        model: Its buffers are not written to by a capture.
    """

    def __init__(self, model: nn.Module):
        self._buffers: Sequence[Tensor] = [*model.buffers()]
        self.captures = self.replays = 0

    def __call__(self, run: Callable[[], T], /) -> tuple[Callable[[], None], T]:
        self.captures += 1
        before = [b.clone() for b in self._buffers]
        recorder = _Recorder()
        try:
            with recorder:
                result = run()
        finally:
            for buffer, value in zip(self._buffers, before, strict=True):
                buffer.data.copy_(value)

        def replay() -> None:
            self.replays += 1
            recorder.replay()

        return replay, result
