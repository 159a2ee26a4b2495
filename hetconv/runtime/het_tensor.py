"""HetTensor: this rank's part of a tensor and its layout, in the shape of an ordinary tensor.

It acts through ``__torch_function__``; `ops.dispatch` registers what it does there.
Autograd runs on the local parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from hetconv.comm.rank_group import RankGroup
from hetconv.comm.redistribute import clone_if_aliased, local_slice, redistribute_local
from hetconv.errors import HetConvError, LayoutError
from hetconv.kernels import CHANNELS_LAST
from hetconv.sharding.layout import Box, Layout
from hetconv.torch_internals import make_wrapper, no_torch_function

from .gradient_sync import ACTIVE_SYNC


class Deferred(Protocol):
    """A part that is put off. A call computes it, which is collective where halos are
    exchanged for it.
    """

    def __call__(self) -> Tensor: ...

    def gathered(self) -> Tensor | None:
        """The whole on every rank, where that is not computed as this part first and
        gathered then; collective.
        """


def register_dispatcher(dispatch: Callable[..., Any]) -> None:
    """Registers what runs torch functions on HetTensors, in the place of
    ``HetTensor.__torch_function__``.
    """
    HetTensor.__torch_function__ = classmethod(dispatch)  # type: ignore[method-assign,assignment]


class HetTensor(Tensor):
    """A part per rank. ``shape`` is the global shape, ``local`` this rank's part, that
    of ``placement.boxes[rank]``.

    An operator with a rule runs on the parts; any other gathers its arguments first.
    Make one with `HetTensor.wrap`.
    """

    pending: Deferred | None
    """What computes the local part, where that was put off."""
    placement: Layout
    group: RankGroup
    _local: Tensor

    @staticmethod
    def wrap(local: Tensor, layout: Layout, group: RankGroup) -> HetTensor:
        """Raises `LayoutError` if the local part does not have the shape of its box."""
        if local.shape != layout.boxes[group.rank].shape:
            raise LayoutError(
                f"the local part has shape {tuple(local.shape)}, but rank {group.rank}'s box of "
                "the layout has "
                f"{layout.boxes[group.rank].shape}"
            )
        return HetTensor.made(local, layout, group)

    @staticmethod
    def made(local: Tensor, layout: Layout, group: RankGroup) -> HetTensor:
        """`wrap` without its check, for a local part that is known to fit."""
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
        """One whose local part, of this dtype and on this device, ``later`` computes
        when it is first asked for.
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
        """The value on every rank; collective, differentiable."""
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
        """One like this, which was put off; this one is expected to be used no more,
        and still can be.
        """
        assert self.pending is not None
        _forget(self)
        _superseded[id(self)] = self
        return HetTensor.deferred(
            later, self.placement, self.dtype, self.device, self.group
        )

    def become(self, other: HetTensor) -> None:
        """Takes the value of another one, of the same dtype and device, as after a call
        in place.
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
        """Is replicated from now on, with this value on every rank; its shape may be
        another one than before.
        """
        if (shape := tuple(whole.shape)) != self.placement.shape:
            with no_torch_function():
                self.data = make_wrapper(
                    HetTensor, shape, dtype=self.dtype, device=self.device
                )
        self.local, self.placement = whole, Layout.replicated(shape, self.group.size)

    # What models ask for most; through __torch_function__ each takes some microseconds.

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size(self.placement.shape)

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self.placement.shape)

    def dim(self) -> int:
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


def compute_deferred() -> None:
    """Computes every part that was put off, before something is written that it may
    read; collective.
    """
    if not (_waiting or _superseded):
        return
    for x in list(_waiting.values()):
        _ = x.local
    for x in list(_superseded.values()):
        x.pending = _TooLate()
    discard_deferred()


def discard_deferred() -> None:
    """Forgets every part that was put off."""
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


def gather(x: Tensor, *, images: bool = False) -> Tensor:
    """The whole of a HetTensor, a plain tensor, on every rank; collective, differentiable.

    A plain tensor is returned as is. What travels is channels-last, but whoever takes
    views of the whole, or draws random numbers over it, counts on the memory order that
    a model on one device has: it is contiguous, unless these are known to be
    ``images``, of a model whose inputs are channels-last.
    """
    if not isinstance(x, HetTensor):
        return x
    if x.placement.kind == "replicated":
        return x.local
    whole, scope, lies = x.whole(), ACTIVE_SYNC.get(), torch.contiguous_format
    if images and scope is not None and scope.channels_last:
        lies = CHANNELS_LAST.get(whole.dim(), lies)
    return clone_if_aliased(whole.contiguous(memory_format=lies), x.local)
