"""Convolutions that are deferred, to compute what follows them in their epilogue.

This happens only without autograd, and only for the functions that a plan lists as the
sole users of a convolution's result. Anything else that is done to the result computes
the convolution first, so that the list is a hint and never changes a result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hetconv import kernels
from hetconv.comm.exchange import PendingExchange
from hetconv.comm.rank_group import RankGroup, Switch, all_gather_object
from hetconv.comm.redistribute import start_exchange
from hetconv.errors import HetConvError
from hetconv.operators import read_call
from hetconv.operators.base import function_name, writes_in_place
from hetconv.operators.elementwise import activation_of
from hetconv.operators.norms import BatchNormCall
from hetconv.runtime.gradient_sync import ACTIVE_SYNC
from hetconv.runtime.het_tensor import HetTensor
from hetconv.runtime.inputs import Args, Func, Kwargs, to_layout
from hetconv.sharding.conv_geometry import Geometry
from hetconv.sharding.layout import Layout, apportion, spans
from hetconv.torch_internals import write_count

from . import views
from .halo_exchange import ANY, IDENTITY, FusedEpilogue, computed
from .local_batch_norm import norm_of, scale_and_shift

fuse_anywhere = Switch()
"""What is parallelized meanwhile folds also where that does not pay."""


class DeferredConv(NamedTuple):
    """This rank's part of a convolution that is not computed yet. A call computes it.

    Attributes:
        x: this rank's input.
        w: its filters.
        b: their bias.
        geo: geometry of the computation.
        layout: of the output.
        group: the ranks.
        expects: the functions that may be fused next, in order.
        chunks: in which the batch is gathered, where the whole is asked for.
        after: the epilogue so far.
        seen: tensors that will be read, with their versions of now.
    """

    x: Tensor
    w: Tensor
    b: Tensor | None
    geo: Geometry
    layout: Layout
    group: RankGroup
    expects: tuple[str, ...]
    chunks: int = 1
    after: FusedEpilogue = IDENTITY
    seen: tuple[tuple[Tensor, int], ...] = ()

    def with_residual(self, residual: Tensor) -> DeferredConv:
        """Returns the convolution with a residual added in its epilogue."""
        after = self.after._replace(residual=residual)
        return self._replace(after=after, seen=self.seen + version(residual))

    def __call__(self) -> Tensor:
        """Computes the convolution with its epilogue."""
        with self._reading():
            return computed(self.x, self.w, self.b, self.geo, self.group, self.after)[0]

    def gathered(self) -> Tensor | None:
        """Returns the whole output, gathered in chunks; None for a single chunk."""
        if min(self.chunks, self.layout.shape[0]) < 2 or self.layout.dim != 1:
            return None
        with self._reading():
            return gathered_in_chunks(
                self.x,
                self.w,
                self.b,
                self.geo,
                self.group,
                self.after,
                self.layout,
                self.chunks,
            )

    @contextmanager
    def _reading(self) -> Iterator[None]:
        if any(write_count(t) != version for t, version in self.seen):
            raise HetConvError(
                "the input of a convolution was written to in place before what follows the "
                "convolution was called; "
                "write to a copy, or call parallelize without fuse=True"
            )
        with torch.no_grad(), torch.autocast(self.x.device.type, enabled=False):
            yield


def version(t: Tensor) -> tuple[tuple[Tensor, int], ...]:
    """Returns an entry of `DeferredConv.seen`. An inference tensor counts no versions."""
    return () if t.is_inference() else ((t, write_count(t)),)


def fusion_pays(group: RankGroup) -> bool:
    """Returns whether a model fuses on these ranks, alike on all of them. Collective.

    Only Triton computes an epilogue. ATen would compute it in passes of its own, and Python
    takes longer to fuse than the pass that is saved: on an H100 with cuDNN 2.6 times as long
    as without.
    """
    return any(all_gather_object(group, fuse_anywhere.on or not kernels.only_aten()))


def may_defer(x: Tensor) -> bool:
    """Returns whether a convolution of ``x`` may be deferred.

    It may within a parallelized model's forward, without autograd, and where writes to ``x``
    are noticed.
    """
    if torch.is_grad_enabled() or ACTIVE_SYNC.get() is None:
        return False
    if isinstance(x, HetTensor):
        return x.placement.kind != "replicated" or not x.local.is_inference()
    return not x.is_inference()


def fuse(func: Func, args: Args, kwargs: Kwargs) -> HetTensor | None:
    """Fuses a call into the deferred convolution that it is made on.

    Returns:
        The result, which is deferred too; None if the call cannot be fused.
    """
    for i, x in enumerate(args[:2]):
        if x.__class__ is not HetTensor or not isinstance(x.pending, DeferredConv):
            continue
        waiting, name = x.pending, function_name(func)
        if (
            waiting.expects[:1] != (name,) or torch.is_grad_enabled()
        ):  # for autograd nothing waits
            continue
        in_place = writes_in_place(func, kwargs)
        if in_place and (i or not views.may_write(x, x.placement)):
            continue
        further = _further(waiting, x, i, name, func, args, kwargs)
        if further is not None:
            folded = x.superseded_by(further._replace(expects=waiting.expects[1:]))
            if not in_place:
                return folded
            x.become(folded)
            return x
    return None


def _further(
    waiting: DeferredConv,
    x: HetTensor,
    i: int,
    name: str,
    func: Func,
    args: Args,
    kwargs: Kwargs,
) -> DeferredConv | None:
    """Returns the convolution with one more function fused, if it can be.

    Args:
        waiting: the convolution.
        x: its result.
        i: index of ``x`` among the arguments.
        name: of the function.
        func: the function.
        args: its arguments.
        kwargs: its keyword arguments.
    """
    after = waiting.after
    if name == "batch_norm":
        call = read_call(func, args, kwargs) if after is IDENTITY else None
        norm = norm_of(call) if isinstance(call, BatchNormCall) else None
        if norm is None or norm.training:
            return None
        return waiting._replace(
            after=FusedEpilogue(
                *scale_and_shift(norm, waiting.x.dtype, x.placement, waiting.group)
            )
        )
    if after.activation is not None:
        return None
    if name == "add":
        return _with_residual(waiting, x, i, args, kwargs)
    activation = activation_of(name, args, kwargs)
    if activation is None:
        return None
    return waiting._replace(
        after=after._replace(activation=activation[0], slope=activation[1])
    )


def _with_residual(
    waiting: DeferredConv, x: HetTensor, i: int, args: Args, kwargs: Kwargs
) -> DeferredConv | None:
    """Fuses an addition. The sum has the layout of the first of the two."""
    if (
        waiting.after.residual is not None
        or len(args) != 2
        or kwargs.get("alpha", 1) != 1
    ):
        return None
    other = args[1 - i]
    if (
        not isinstance(other, Tensor)
        or other is x
        or other.shape != x.shape
        or other.dtype != x.dtype
    ):
        return None
    alike = isinstance(other, HetTensor) and other.placement == x.placement
    if (i and not alike) or not may_defer(other):
        return None
    return waiting.with_residual(to_layout(other, x.placement, waiting.group))


def gathered_in_chunks(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    geo: Geometry,
    group: RankGroup,
    after: FusedEpilogue,
    layout: Layout,
    chunks: int,
) -> Tensor:
    """Returns the whole output, channels-last. Collective, without autograd.

    A chunk is computed by the rank that computes it of the whole batch, with the same tile:
    the bits are the same, unless ATen's choice depends on the batch size.

    Args:
        x: this rank's input.
        w: its filters.
        b: their bias.
        geo: geometry of the computation.
        group: the ranks.
        after: the epilogue.
        layout: of the output; it is sharded over channels.
        chunks: number of chunks of the batch.
    """
    N, *image = layout.shape
    s, route = geo.op.spec, ANY
    if geo.own is not None and x.dim() == 4 and x.numel() and w.numel():
        geometry: Any = (s.stride, geo.padding(geo.own), s.dilation, geo.groups)
        route = kernels.route(x, w, *geometry)
    under_way: list[tuple[int, int, Tensor, PendingExchange]] = []
    for lo, hi in spans(apportion(N, (1,) * min(chunks, N))):
        own = replace(geo, y_shape=(hi - lo, *geo.y_shape[1:]))
        residual = after.residual[lo:hi] if after.residual is not None else None
        part, _ = computed(
            x[lo:hi], w, b, own, group, after._replace(residual=residual), route
        )
        some = Layout.sharded((hi - lo, *image), 1, layout.sizes)
        whole = Layout.replicated(some.shape, group.size)
        under_way.append(
            (lo, hi, part, start_exchange(group, part, some.boxes, whole.boxes))
        )
    memory = kernels.CHANNELS_LAST.get(x.dim(), torch.contiguous_format)
    y = torch.empty(layout.shape, dtype=x.dtype, device=x.device, memory_format=memory)
    for lo, hi, part, round_ in under_way:
        places = y[lo:hi].split(layout.sizes, 1)
        with round_ as came:
            got = came | {group.rank: part}
            kernels.unpack([*got.values()], [places[r] for r in got])
    return y
