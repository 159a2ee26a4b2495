"""HetTensor: this rank's part of a tensor and its layout, in the shape of an ordinary tensor.

It acts through ``__torch_function__``; `ops` installs what it does there. Autograd runs on the local parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .errors import HetConvError, LayoutError
from .layout import Layout
from .movement import moved, unshared
from .transport import Team

Dispatch = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
_dispatch: list[Dispatch] = []


def install_dispatch(dispatch: Dispatch) -> None:
    """`ops` says here how a torch function runs on parts."""
    _dispatch[:] = [dispatch]


class HetTensor(Tensor):
    """A part per rank. ``shape`` is the global shape, ``local`` this rank's part, that of ``placement.boxes[rank]``.

    An operator with a rule runs on the parts; any other gathers its arguments first. Make one with `HetTensor.wrap`.
    """

    local: Tensor
    placement: Layout
    team: Team

    @staticmethod
    def wrap(local: Tensor, layout: Layout, team: Team) -> HetTensor:
        """Raises `LayoutError` if the local part does not have the shape of its box."""
        if tuple(local.shape) != layout.boxes[team.rank].shape:
            raise LayoutError(
                f"the local part has shape {tuple(local.shape)}, but rank {team.rank}'s box of the layout has "
                f"{layout.boxes[team.rank].shape}"
            )
        x: HetTensor = Tensor._make_wrapper_subclass(
            HetTensor, layout.shape, dtype=local.dtype, device=local.device, requires_grad=False
        )
        x.local, x.placement, x.team = local, layout, team
        return x

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not _dispatch:  # this room alone was imported
            import_module(".ops", __package__)
        return _dispatch[0](func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        raise HetConvError(
            f"{func} reached a HetTensor below torch's Python functions, where its parts cannot be seen; call "
            f"hetconv.gather(x) on it first"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"HetTensor(shape={self.placement.shape}, {self.placement.kind}, local={tuple(self.local.shape)})"


def gather(x: Tensor) -> Tensor:
    """The whole of a HetTensor, a plain contiguous tensor, on every rank; collective, differentiable.

    A plain tensor is returned as is. What travels is channels-last, but whoever takes views of the whole, or draws
    random numbers over it, counts on the memory order that a model on one device has.
    """
    if not isinstance(x, HetTensor):
        return x
    if x.placement.kind == "replicated":
        return x.local
    whole = moved(x.team, x.local, x.placement, Layout.replicated(x.placement.shape, x.team.size))
    return unshared(whole.contiguous(), x.local)
