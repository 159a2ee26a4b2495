"""HetTensor: this rank's part of a tensor, with the interface of an ordinary tensor.

It acts through ``__torch_function__``; `ops.dispatch` registers what it does there.
Autograd runs on the local parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from hetconv.comm.exchange_plan import local_slice
from hetconv.comm.rank_group import RankGroup
from hetconv.comm.redistribute import clone_if_aliased, redistribute_local
from hetconv.errors import HetConvError, LayoutError
from hetconv.kernels import CHANNELS_LAST
from hetconv.sharding.layout import Box, Layout
from hetconv.torch_internals import make_wrapper, no_torch_function, storage_id

from .gradient_sync import ACTIVE_SYNC


class Deferred(Protocol):
    """A local part that is computed when it is called.

    The call is collective where halos are exchanged for it.
    """

    def __call__(self) -> Tensor:
        """Computes the local part."""

    def gathered(self) -> Tensor | None:
        """Returns the whole on every rank, or None to compute the local part first. Collective."""

    @property
    def is_local(self) -> bool:
        """Whether the call needs no other rank."""

    def reads(self, memory: int) -> bool:
        """Returns whether the call reads the storage with this id."""


def register_dispatcher(dispatch: Callable[..., Any]) -> None:
    """Registers the function that runs torch functions on HetTensors.

    Args:
        dispatch: has the arguments of ``__torch_function__``.
    """
    HetTensor.__torch_function__ = classmethod(dispatch)  # type: ignore[method-assign,assignment]


class HetTensor(Tensor):
    """A tensor of which every rank holds a part. Make one with `HetTensor.wrap`.

    An operator with a sharding rule runs on the parts; any other gathers its arguments
    first.

    Attributes:
        shape: the global shape.
        placement: the layout.
        local: this rank's part, with the shape of ``placement.boxes[rank]``.
        group: the ranks.
    """

    pending: Deferred | None
    """What computes the local part, where that was put off."""
    placement: Layout
    group: RankGroup
    _local: Tensor

    @staticmethod
    def wrap(local: Tensor, layout: Layout, group: RankGroup) -> HetTensor:
        """Makes a HetTensor of this rank's part.

        Args:
            local: this rank's part.
            layout: the layout of the whole.
            group: the ranks.

        Raises:
            LayoutError: ``local`` has not the shape of its box.
        """
        if local.shape != layout.boxes[group.rank].shape:
            raise LayoutError(
                f"the local part has shape {tuple(local.shape)}, but rank {group.rank}'s box of "
                "the layout has "
                f"{layout.boxes[group.rank].shape}"
            )
        return HetTensor.made(local, layout, group)

    @staticmethod
    def made(local: Tensor, layout: Layout, group: RankGroup) -> HetTensor:
        """Makes a HetTensor as `wrap` does, without its check."""
        x: HetTensor = make_wrapper(
            HetTensor, layout.shape, dtype=local.dtype, device=local.device
        )
        x.placement, x.group, x.pending, x._local = layout, group, None, local
        return x

    @staticmethod
    def deferred(
        later: Deferred,
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device,
        group: RankGroup,
    ) -> HetTensor:
        """Makes a HetTensor whose local part is computed when it is first used.

        Args:
            later: computes the local part.
            layout: the layout of the whole.
            dtype: of the local part.
            device: of the local part.
            group: the ranks.
        """
        x: HetTensor = make_wrapper(HetTensor, layout.shape, dtype=dtype, device=device)
        x.placement, x.group, x.pending = layout, group, later
        _waiting[id(x)] = x
        return x

    @property
    def local(self) -> Tensor:
        """This rank's part."""
        if self.pending is not None:
            self.local = self.pending()
        return self._local

    @local.setter
    def local(self, part: Tensor) -> None:
        self._local, self.pending = part, None
        _forget(self)

    def whole(self) -> Tensor:
        """Returns the value on every rank. Collective and differentiable."""
        shape, group = self.placement.shape, self.group
        if self.pending is not None and (whole := self.pending.gathered()) is not None:
            self.local = local_slice(
                whole, Box.whole(shape), self.placement.boxes[group.rank]
            )
            return whole
        return redistribute_local(
            group, self.local, self.placement, Layout.replicated(shape, group.size)
        )

    def superseded_by(self, later: Deferred) -> HetTensor:
        """Returns a HetTensor with this layout and another deferred local part.

        This one is expected to be used no more, but still can be.
        """
        assert self.pending is not None
        self.leave_deferred()
        return HetTensor.deferred(
            later, self.placement, self.dtype, self.device, self.group
        )

    def leave_deferred(self) -> None:
        """Notes that the value was used without the local part, which may stay deferred."""
        _forget(self)
        _superseded[id(self)] = self

    def become(self, other: HetTensor) -> None:
        """Takes the value of another HetTensor, as after a call in place.

        The other one has the same dtype and device.
        """
        self.placement = other.placement
        if other.pending is None:
            self.local = other.local
        else:
            self.pending = other.pending
            _forget(self)
            _forget(other)
            _waiting[id(self)] = self

    def become_whole(self, whole: Tensor) -> None:
        """Becomes replicated, with this value on every rank; the shape may change."""
        if (shape := tuple(whole.shape)) != self.placement.shape:
            with no_torch_function():
                self.data = make_wrapper(
                    HetTensor, shape, dtype=self.dtype, device=self.device
                )
        self.local, self.placement = whole, Layout.replicated(shape, self.group.size)

    # What models ask for most; through __torch_function__ each takes some microseconds.

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The global shape."""
        return torch.Size(self.placement.shape)

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """Number of dimensions."""
        return len(self.placement.shape)

    def dim(self) -> int:
        """Returns the number of dimensions."""
        return len(self.placement.shape)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise HetConvError(
            "nothing is registered that runs torch functions on a HetTensor; import "
            "hetconv.ops first"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        raise HetConvError(
            f"{func} reached a HetTensor below torch's Python functions, where its parts "
            "cannot be seen; call "
            f"hetconv.gather(x) on it first"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with no_torch_function():
            own = self.placement.boxes[self.group.rank].shape
            return f"HetTensor(shape={self.placement.shape}, {self.placement.kind}, local={own})"


_waiting: dict[
    int, HetTensor
] = {}  # by id, in the order in which they were put off: the same on every rank
_superseded: WeakValueDictionary[int, HetTensor] = (
    WeakValueDictionary()
)  # what became part of another one that waits


def _forget(x: HetTensor) -> None:
    _waiting.pop(id(x), None)
    _superseded.pop(id(x), None)


def compute_deferred(target: HetTensor | None = None) -> None:
    """Computes every deferred part, before a write that it must not see. Collective.

    What was used already, and can be computed without other ranks, is computed only if it
    reads the memory that is written to.

    Args:
        target: what is written to; None if that is not known.
    """
    if not (_waiting or _superseded):
        return
    for x in list(_waiting.values()):
        _ = x.local
    memory = storage_id(target.local) if target is not None else None
    for x in list(_superseded.values()):
        if x.pending is None:
            continue
        if not x.pending.is_local:
            x.pending = _TooLate()
            _forget(x)
        elif memory is None or x.pending.reads(memory):
            _ = x.local
    _waiting.clear()


def discard_deferred() -> None:
    """Drops every deferred part."""
    _waiting.clear()
    _superseded.clear()


class _TooLate:
    def __call__(self) -> Tensor:
        raise HetConvError(
            "the result of a convolution is used again after what follows it was computed "
            "with it, and after the "
            "forward ended or something was written in place; call parallelize without fuse=True"
        )

    def gathered(self) -> None: ...

    def reads(self, memory: int) -> bool:
        return False

    is_local = False


def gather(x: Tensor, *, images: bool = False) -> Tensor:
    """Returns a HetTensor's value on every rank. Collective and differentiable.

    A plain tensor is returned as it is.

    Args:
        x: a tensor.
        images: whether ``x`` are images of a model whose inputs are channels-last. The
            result then is channels-last too, as it is sent. Otherwise it is contiguous, as on
            one device: views of it, and random numbers drawn over it, depend on that.
    """
    if not isinstance(x, HetTensor):
        return x
    if x.placement.kind == "replicated":
        return x.local
    whole, scope, lies = x.whole(), ACTIVE_SYNC.get(), torch.contiguous_format
    if images and scope is not None and scope.channels_last:
        lies = CHANNELS_LAST.get(whole.dim(), lies)
    return clone_if_aliased(whole.contiguous(memory_format=lies), x.local)
