"""A model of the workers, as the calling process sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from hetconv.errors import HetConvError
from hetconv.schemas.plan import Plan
from hetconv.torch_internals import disable_dynamo

Run = Callable[["RemoteModule", tuple[Any, ...], dict[str, Any]], Any]


class RemoteModule(nn.Module):
    """A model that runs in worker processes. It has no parameters here.

    Args:
        model: The model, whose mode it has.
        key: Number of the model.
        run: Calls it.

    Attributes:
        key: Number of the model.
        plan: How it is split; None until it is planned.
    """

    plan: Plan | None = None

    def __init__(self, model: nn.Module, key: int, run: Run):
        super().__init__()
        self.key, self._name, self._run = key, type(model).__name__, run
        self.train(model.training)

    @disable_dynamo
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model in the workers, without gradients."""
        return self._run(self, args, kwargs)

    def extra_repr(self) -> str:
        """The class of the model, for `repr`."""
        return f"{self._name} in worker processes"

    def __reduce__(self) -> Any:
        raise HetConvError(
            f"a {self._name} that runs in workers can be neither pickled nor copied; save the "
            "model that was given to parallelize"
        )
