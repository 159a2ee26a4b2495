"""A convolution that waits for what follows it: what can be done as its sums are stored
is folded into it.

Only without autograd, and only for the functions that a plan lists as its sole
followers. Anything else that is done to the result has it computed first, as it stands,
so that the listing is a hint and never decides what comes out.
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
from hetconv.operators.base import name_of, writes_in_place
from hetconv.operators.elementwise import activation_of
from hetconv.operators.norms import BatchNormCall
from hetconv.runtime.gradient_sync import ACTIVE_SYNC
from hetconv.runtime.het_tensor import HetTensor
from hetconv.runtime.inputs import Args, Func, Kwargs, to_layout
from hetconv.sharding.layout import Layout, apportion, spans
from hetconv.torch_internals import write_count

from . import views
from .batch_norm import norm_of, scale_and_shift
from .halo_exchange import ANY, IDENTITY, FusedEpilogue, Geometry, computed

fuse_anywhere = Switch()
"""What is parallelized meanwhile folds also where that does not pay."""


class DeferredConv(NamedTuple):
    """This rank's part of a convolution, put off, with what was folded into it so far.
    A call computes it.

    ``expects``: what may be folded next, in order. ``chunks`` of the batch in which it
    is gathered, where the whole is asked for. ``seen``: tensors that are read then, at
    their versions of now.
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
        after = self.after._replace(residual=residual)
        return self._replace(after=after, seen=self.seen + version(residual))

    def __call__(self) -> Tensor:
        with self._reading():
            return computed(self.x, self.w, self.b, self.geo, self.group, self.after)[0]

    def gathered(self) -> Tensor | None:
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
    """An entry of `DeferredConv.seen`; an inference tensor keeps no count."""
    return () if t.is_inference() else ((t, write_count(t)),)


def fusion_pays(group: RankGroup) -> bool:
    """Whether a model folds on these ranks; alike on all of them, for when halos travel
    goes by it. Collective.

    Only where Triton computes convolutions. ATen does what is folded in passes of its
    own, and Python takes longer to fold it than the one pass takes that is saved: on an
    H100 with cuDNN 2.6 times as long as without.
    """
    return any(all_gather_object(group, fuse_anywhere.on or not kernels.only_aten()))


def may_defer(x: Tensor) -> bool:
    """Within a parallelized model's forward, without autograd, and not where writes to
    ``x`` would go unnoticed.
    """
    if torch.is_grad_enabled() or ACTIVE_SYNC.get() is None:
        return False
    if isinstance(x, HetTensor):
        return x.placement.kind != "replicated" or not x.local.is_inference()
    return not x.is_inference()


def fuse(func: Func, args: Args, kwargs: Kwargs) -> HetTensor | None:
    """The result of a call on a convolution that waits for it, which goes on waiting;
    None if it is another call.
    """
    for i, x in enumerate(args[:2]):
        if x.__class__ is not HetTensor or not isinstance(x.pending, DeferredConv):
            continue
        waiting, name = x.pending, name_of(func)
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
    """With one more thing done after the convolution, if it can be: argument ``i`` of
    the call is what waits.
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
    """The sum lies as the first of both does; the other one is brought there."""
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
    """The whole output, of a ``layout`` cut along channels, channels-last; without
    autograd, collective.

    A chunk is computed by whom the whole batch would be, with the same tile: the same
    bits, but for an ATen that goes by the size of the batch.
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
