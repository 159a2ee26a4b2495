"""A hook around the local computation of every layer.

It can slow a device on purpose, or listen to it. Nothing is installed by default, and the
computations then run as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
P = ParamSpec("P")


class ComputeHook(Protocol):
    """Runs computations in the place of their callers."""

    def once(self, compute: Callable[[], T], device: torch.device) -> T:
        """Runs one computation on ``device``, without a backward pass."""

    def with_backward(
        self, compute: Callable[[], Tensor], device: torch.device
    ) -> Tensor:
        """Runs a computation whose backward pass is one node of autograd, and hooks that too."""


_hook: ComputeHook | None = None


def set_compute_hook(hook: ComputeHook | None) -> None:
    """Installs the hook of this process in the place of the one before; None removes it."""
    global _hook
    _hook = hook


def hooked(
    compute: Callable[Concatenate[Tensor, P], T], /
) -> Callable[Concatenate[Tensor, P], T]:
    """Decorates a computation so that it runs through the hook.

    The computation is on the device of its first argument.
    """

    @wraps(compute)
    def run(x: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if _hook is None:
            return compute(x, *args, **kwargs)
        return _hook.once(lambda: compute(x, *args, **kwargs), x.device)

    return run


def call_layer(function: Callable[..., Tensor], x: Tensor, *args: object) -> Tensor:
    """Calls PyTorch's own function of a layer, which brings its backward pass, through the hook.

    Args:
        function: such as `torch.conv2d` or `torch.nn.functional.linear`.
        x: its input.
        args: what it is given after the input.

    Returns:
        What the function returns.
    """
    if _hook is None:
        return function(x, *args)
    return _hook.with_backward(lambda: function(x, *args), x.device)
