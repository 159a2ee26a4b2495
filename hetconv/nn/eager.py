"""What torch.compile leaves to Python."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from hetconv.torch_internals import disable_dynamo, dynamo_is_loaded

F = TypeVar("F", bound=Callable[..., Any])


def eager(fn: F) -> F:
    """The same, with all that it calls, as one break of a compiled graph. Dynamo is imported by who compiles only."""
    disabled = disable_dynamo(fn)

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (disabled if dynamo_is_loaded() else fn)(*args, **kwargs)

    return run  # type: ignore[return-value]
