"""What torch.compile leaves to Python."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from torch._compile import _disable_dynamo

F = TypeVar("F", bound=Callable[..., Any])


def eager(fn: F) -> F:
    """The same, with all that it calls, as one break of a compiled graph. Dynamo is imported by who compiles only."""
    disabled = _disable_dynamo(fn)

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (disabled if "torch._dynamo" in sys.modules else fn)(*args, **kwargs)

    return run  # type: ignore[return-value]


class EagerForward:
    """A module's forward, eager, to stand in its place. A copy of the module gets one of its own."""

    def __init__(self, module: nn.Module):
        functools.update_wrapper(self, module.forward)
        self._forward = module.forward

    @eager
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)
