"""Deferred convolutions, into which the operators that follow are fused as an epilogue.

A convolution is deferred only without autograd, and only for the functions that a plan
lists as its sole consumers. Any other use of the result computes it first, so that the
list is a hint and never changes a result.
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
from hetconv.comm.rank_group import RankGroup, all_gather_object
from hetconv.comm.redistribute import start_exchange
from hetconv.errors import HetConvError
from hetconv.kernels.backend_choice import ANY_ROUTE
from hetconv.kernels.epilogue import IDENTITY, Epilogue
from hetconv.operators import read_call
from hetconv.operators.base import function_name, writes_in_place
from hetconv.operators.elementwise import activation_of
from hetconv.operators.norms import BatchNormCall
from hetconv.runtime.gradient_sync import ACTIVE_SYNC
from hetconv.runtime.het_tensor import HetTensor
from hetconv.runtime.inputs import Args, Func, Kwargs, to_layout
from hetconv.sharding.layout import Layout, apportion, spans
from hetconv.torch_internals import write_count

from . import views
from .conv_geometry import Geometry
from .halo_exchange import compute
from .norms.batch_norm import norm_of, scale_and_shift


class DeferredConv(NamedTuple):
    """Convolution that is not computed yet, with the epilogue that was fused into it.

    A call computes this rank's shard.

    Attributes:
        x: This rank's shard of the input.
        w: Its weights.
        b: Its bias.
        geo: Its share of the convolution.
        layout: Layout of the result.
        group: The ranks.
        fusible: Names of the functions that may be fused next, in order.
        chunks: Number of chunks of the batch in which the whole result is gathered.
        epilogue: What was fused so far.
        seen: Tensors that will be read, each with its version when it was taken.
    """

    x: Tensor
    w: Tensor
    b: Tensor | None
    geo: Geometry
    layout: Layout
    group: RankGroup
    fusible: tuple[str, ...]
    chunks: int = 1
    epilogue: Epilogue = IDENTITY
    seen: tuple[tuple[Tensor, int], ...] = ()

    @property
    def is_local(self) -> bool:
        """Whether other ranks take no part; halos may be exchanged."""
        return False

    def reads(self, memory: int) -> bool:
        """Returns whether the storage with this id may be among what is read."""
        return True

    def __call__(self) -> Tensor:
        """Computes this rank's shard; collective if halos are exchanged."""
        with self._reading():
            return compute(*self[:4], self.group, self.epilogue)[0]

    def gathered(self) -> Tensor | None:
        """Returns the whole result in chunks, or None if it is to be gathered at once."""
        if min(self.chunks, self.layout.shape[0]) < 2 or self.layout.dim != 1:
            return None
        with self._reading():
            return gathered_in_chunks(self)

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
    """Returns an entry of `DeferredConv.seen`; none for inference tensors, without versions."""
    return () if t.is_inference() else ((t, write_count(t)),)


def fusion_pays(group: RankGroup) -> bool:
    """Returns whether fusion is faster on these ranks; collective.

    The answer is the same on all ranks, because it decides when halos are exchanged.
    Fusion pays where Triton computes convolutions. ATen computes an epilogue in separate
    passes, and fusing it in Python takes longer than the one pass that is saved: with
    cuDNN on an H100 a model takes 2.6 times as long as without.
    """
    return any(all_gather_object(group, not kernels.only_aten()))


def may_defer(x: Tensor) -> bool:
    """Returns whether an operator that reads ``x`` may be deferred.

    It may within a parallelized model's forward, without autograd, and if a later write
    to ``x`` would be noticed.
    """
    if torch.is_grad_enabled() or ACTIVE_SYNC.get() is None:
        return False
    if isinstance(x, HetTensor):
        return x.placement.kind != "replicated" or not x.local.is_inference()
    return not x.is_inference()


def fuse(func: Func, args: Args, kwargs: Kwargs) -> HetTensor | None:
    """Fuses a call into the deferred convolution that it is called on.

    Args:
        func: The torch function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        The result, which is deferred too; None if the call cannot be fused.
    """
    for i, x in enumerate(args[:2]):
        if x.__class__ is not HetTensor or not isinstance(x.pending, DeferredConv):
            continue
        fusible, name = x.pending.fusible, function_name(func)
        if fusible[:1] != (name,) or torch.is_grad_enabled():
            continue
        in_place = writes_in_place(func, kwargs)
        if in_place and (i or not views.may_write(x, x.placement)):
            continue
        deferred = _fused(x, i, name, func, args, kwargs)
        if deferred is not None:
            fused = x.superseded_by(deferred._replace(fusible=fusible[1:]))
            if not in_place:
                return fused
            x.become(fused)
            return x
    return None


def _fused(
    x: HetTensor, i: int, name: str, func: Func, args: Args, kwargs: Kwargs
) -> DeferredConv | None:
    """Returns the convolution of ``x``, argument ``i`` of a call, with the call fused.

    Returns None if it cannot be fused.
    """
    deferred = x.pending
    assert isinstance(deferred, DeferredConv)
    epilogue = deferred.epilogue
    if name == "batch_norm":
        call = read_call(func, args, kwargs) if epilogue is IDENTITY else None
        norm = norm_of(call) if isinstance(call, BatchNormCall) else None
        if norm is None or norm.training:
            return None
        dtype, group = deferred.x.dtype, deferred.group
        scale, shift = scale_and_shift(norm, dtype, x.placement, group)
        return deferred._replace(epilogue=Epilogue(scale, shift))
    if epilogue.activation:
        return None
    if name == "add":
        return _with_residual(deferred, x, i, args, kwargs)
    found = activation_of(name, args, kwargs)
    if found is None:
        return None
    activation, slope = found
    epilogue = epilogue._replace(activation=activation, slope=slope)
    return deferred._replace(epilogue=epilogue)


def _with_residual(
    deferred: DeferredConv, x: HetTensor, i: int, args: Args, kwargs: Kwargs
) -> DeferredConv | None:
    """Fuses an addition; the other summand is brought to the layout of ``x``."""
    epilogue = deferred.epilogue
    if epilogue.residual is not None or len(args) != 2 or kwargs.get("alpha", 1) != 1:
        return None
    other = args[1 - i]
    if not isinstance(other, Tensor) or other is x:
        return None
    if other.shape != x.shape or other.dtype != x.dtype:
        return None
    # The sum has the layout of its first summand.
    same_layout = isinstance(other, HetTensor) and other.placement == x.placement
    if (i and not same_layout) or not may_defer(other):
        return None
    residual = to_layout(other, x.placement, deferred.group)
    seen = deferred.seen + version(residual)
    return deferred._replace(epilogue=epilogue._replace(residual=residual), seen=seen)


def gathered_in_chunks(deferred: DeferredConv) -> Tensor:
    """Computes and gathers a convolution in chunks of the batch; collective.

    Each chunk travels while the next is computed. A chunk is computed by the same
    kernel as the whole batch would be, so that results are the same to the last bit,
    unless ATen chooses its algorithm by the size of the batch.

    Args:
        deferred: A convolution whose result is sharded along channels.

    Returns:
        The whole result on every rank, channels-last.
    """
    x, w, b, geo, layout, group = deferred[:6]
    epilogue, rank = deferred.epilogue, group.rank
    N, *image = layout.shape
    s, route = geo.op.spec, ANY_ROUTE
    if geo.own is not None and x.dim() == 4 and x.numel() and w.numel():
        args: Any = (s.stride, geo.padding(geo.own.segment), s.dilation, geo.groups)
        route = kernels.route(x, w, *args)
    exchanges: list[tuple[slice, Tensor, PendingExchange]] = []
    for lo, hi in spans(apportion(N, (1,) * min(deferred.chunks, N))):
        chunk = slice(lo, hi)
        local = replace(geo, y_shape=(hi - lo, *geo.y_shape[1:]))
        residual = epilogue.residual[chunk] if epilogue.residual is not None else None
        fused = epilogue._replace(residual=residual)
        part, _ = compute(x[chunk], w, b, local, group, fused, route)
        sharded = Layout.sharded((hi - lo, *image), 1, layout.sizes)
        whole = Layout.replicated(sharded.shape, group.size)
        exchange = start_exchange(group, part, sharded.boxes, whole.boxes)
        exchanges.append((chunk, part, exchange))
    memory = kernels.CHANNELS_LAST.get(x.dim(), torch.contiguous_format)
    y = torch.empty(layout.shape, dtype=x.dtype, device=x.device, memory_format=memory)
    for chunk, part, exchange in exchanges:
        places = y[chunk].split(layout.sizes, 1)
        with exchange as received:
            parts = received | {rank: part}
            kernels.unpack([*parts.values()], [places[r] for r in parts])
    return y
