"""Convolution of local shards, with the halo exchange of spatial splits.

A spatial split uses that convolution is linear: conv(own rows + halos) = conv(own rows)
+ conv(halos). A halo adds only to the few output rows next to the boundary, so that own
rows are never copied or padded, and the exchange overlaps with their computation. The
backward pass sends the halos' gradients back first and computes the rest meanwhile.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hetconv import kernels
from hetconv.comm import call_tags
from hetconv.comm.exchange import PendingExchange
from hetconv.comm.exchange_plan import disjoint, exchange_plan
from hetconv.comm.rank_group import RankGroup
from hetconv.comm.redistribute import start_exchange
from hetconv.kernels import Route, aten
from hetconv.kernels.aten import summed_pixels
from hetconv.kernels.backend_choice import ANY_ROUTE
from hetconv.kernels.epilogue import IDENTITY, Epilogue, per_channel
from hetconv.runtime.inputs import differentiable_gradients, tie_to_graph, uncounted
from hetconv.sharding.conv_spec import ConvGeometry, Segment, Span
from hetconv.torch_internals import materialized

from .conv_geometry import Geometry, Slab


def compute(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    geo: Geometry,
    group: RankGroup,
    epilogue: Epilogue = IDENTITY,
    route: Route = ANY_ROUTE,
) -> tuple[Tensor, dict[int, Tensor]]:
    """Computes the local output of a convolution, without autograd.

    Args:
        x: This rank's shard of the input.
        w: Its weights.
        b: Its bias.
        geo: Its share of the convolution.
        group: The ranks, which exchange halos.
        epilogue: What is computed on the result.
        route: Which kernel computes it.

    Returns:
        The local output, and the halos that were received, by sender.
    """
    bias = b if geo.adds_bias else None
    own = geo.own if x.numel() and w.numel() else None
    covers = own is not None and geo.covers
    if own is not None and covers and not geo.held:
        return _run(geo, x, own, w, bias, epilogue, route), {}
    exchange = start_exchange(group, x, geo.held, geo.wanted) if geo.held else None
    scaled = Epilogue(scale=epilogue.scale)  # what each partial result needs
    if own is not None and covers:
        first = epilogue
        if geo.halos:  # residual and activation come after the halos
            first = epilogue._replace(residual=None, activation="")
        y = _run(geo, x, own, w, bias, first, route)
    else:
        y = _add_constant(x.new_zeros(geo.y_shape), bias, epilogue)
        if own is not None:
            _rows(y, geo, own).add_(_run(geo, x, own, w, None, scaled, route))
    halos = exchange.wait() if exchange is not None else {}
    for peer, slab in geo.halos:
        if slab is not None:
            part = _run(geo, halos[peer], slab, w, None, scaled, route)
            _rows(y, geo, slab).add_(part)
    if geo.halos or not covers:
        kernels.epilogue_in_place(y, epilogue._replace(scale=None, shift=None))
    return y, halos


def _add_constant(y: Tensor, bias: Tensor | None, epilogue: Epilogue) -> Tensor:
    """Adds the scaled bias and the shift to ``y``, in place."""
    if not y.numel():  # such a rank need not hold the bias
        return y
    if bias is not None:
        y += per_channel(bias if epilogue.scale is None else bias * epilogue.scale, y)
    if epilogue.shift is not None:
        y += per_channel(epilogue.shift, y)
    return y


class LocalConv(torch.autograd.Function):
    """Convolution of local shards, with autograd; see `compute`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        b: Tensor | None,
        geo: Geometry,
        group: RankGroup,
    ) -> Tensor:
        """Computes the local output and saves what the backward pass needs."""
        y, halos = compute(x, w, b, geo, group)
        ctx.save_for_backward(x, w, *(halos[peer] for peer, _ in geo.halos))
        ctx.geo, ctx.group, ctx.biases = geo, group, len(b) if b is not None else 0
        ctx.call = call_tags.forward_call()
        return y

    @staticmethod
    def backward(
        ctx: Any, g: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        """Computes the gradients of shard, weight and bias, and exchanges those of halos."""
        (x, w, *halos), geo, group = ctx.saved_tensors, ctx.geo, ctx.group
        g = materialized(g)
        call_tags.enter_backward(ctx.call)
        want_x, want_w, want_b = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            again = partial(_differentiable, geo, group)
            gx, gw = differentiable_gradients(again, (x, w), g)
            gb = summed_pixels(g)[: ctx.biases] if want_b else None
            if gb is not None and not geo.adds_bias:
                gb = uncounted(gb)
            return gx, gw, gb, None, None
        w_parts: list[tuple[Segment, Tensor]] = []
        halo_grads: dict[int, Tensor] = {}
        for (peer, slab), halo in zip(geo.halos, halos, strict=True):
            gx, wants = None, (want_x, want_w, False)
            if slab is not None:
                gx, gw, _ = _gradients(geo, g, halo, slab, w, wants)
                w_parts += [(slab.segment, gw)] if want_w else []
            halo_grads[peer] = torch.zeros_like(halo) if gx is None else gx
        sends = want_x and geo.held
        exchange = _return_halos(geo, group, x, halo_grads) if sends else None
        gx, gb = None, None
        if geo.own is not None and x.numel() and w.numel():
            wants = (want_x, want_w, want_b and geo.covers and ctx.biases == len(w))
            gx, gw, gb = _gradients(geo, g, x, geo.own, w, wants)
            w_parts[:0] = [(geo.own.segment, gw)] if want_w else []
        if want_b and gb is None:
            gb = summed_pixels(g)[: ctx.biases]  # this rank may hold no bias
        if want_x and gx is None:
            gx = x.new_zeros(x.shape)
        if exchange is not None:
            with exchange as received:
                _add_halo_gradients(gx, received, geo, group)
        return gx, _weight_gradient(w_parts, w, geo) if want_w else None, gb, None, None


def _differentiable(geo: Geometry, group: RankGroup, x: Tensor, w: Tensor) -> Tensor:
    """Computes the result without bias by operators that autograd can differentiate."""
    y, sources = x.new_zeros(geo.y_shape), [x, w]
    parts = [(x, geo.own)]
    if geo.held:
        zero, *halos = _FetchHalos.apply(x, geo, group)
        y, sources = y + zero, [x, w, zero]
        parts += zip(halos, (slab for _, slab in geo.halos), strict=True)
    s = geo.op.spec
    for rows, slab in parts:
        if slab is None or not (rows.numel() and w.numel()):
            continue
        rows, taps = _cut(rows, w, geo, slab)
        pad = geo.padding(slab.segment)
        part = aten.conv(
            rows, taps, None, ConvGeometry(s.stride, pad, s.dilation, geo.groups)
        )
        before = slab.segment.out[0] - geo.first_out
        after = y.shape[geo.dim] - before - part.shape[geo.dim]
        y = y + F.pad(part, (*(0, 0) * (y.dim() - 1 - geo.dim), before, after))
    return tie_to_graph(y, *sources)


class _FetchHalos(torch.autograd.Function):
    """Receives the halos, in the order of ``geo.halos``.

    The first result is a zero that makes every rank take part in the backward exchange.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, geo: Geometry, group: RankGroup
    ) -> tuple[Tensor, ...]:
        ctx.geo, ctx.group, ctx.shape = geo, group, x.shape
        ctx.call = call_tags.forward_call()
        halos = start_exchange(group, x, geo.held, geo.wanted).wait()
        return x.new_zeros(()), *(halos[peer] for peer, _ in geo.halos)

    @staticmethod
    def backward(ctx: Any, zero: Tensor, *halos: Tensor) -> tuple[Tensor, None, None]:
        call_tags.enter_backward(ctx.call)
        gx = _ReturnHalos.apply(zero, ctx.shape, ctx.geo, ctx.group, *halos)
        return gx, None, None


class _ReturnHalos(torch.autograd.Function):
    """Sends the halos' gradients back: the adjoint of `_FetchHalos`."""

    @staticmethod
    def forward(
        ctx: Any,
        zero: Tensor,
        shape: torch.Size,
        geo: Geometry,
        group: RankGroup,
        *halos: Tensor,
    ) -> Tensor:
        ctx.geo, ctx.group, ctx.call = geo, group, call_tags.forward_call()
        gx = zero.new_zeros(shape)
        grads = {peer: halo for (peer, _), halo in zip(geo.halos, halos, strict=True)}
        with _return_halos(geo, group, gx, grads) as received:
            _add_halo_gradients(gx, received, geo, group)
        return gx

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        call_tags.enter_backward(ctx.call)
        zero, *halos = _FetchHalos.apply(g, ctx.geo, ctx.group)
        return zero, None, None, None, *halos


def _return_halos(
    geo: Geometry, group: RankGroup, x: Tensor, halo_grads: dict[int, Tensor]
) -> PendingExchange:
    """Starts to send each halo's gradient to the rank that owns the rows."""
    receives = exchange_plan(geo.wanted, geo.held, group.rank).comes
    return PendingExchange(group, x, halo_grads, receives)


def _add_halo_gradients(
    gx: Any, received: dict[int, Tensor], geo: Geometry, group: RankGroup
) -> None:
    """Adds the gradients of own rows that other ranks read."""
    held = geo.held[group.rank]
    boxes = [geo.wanted[peer].intersect(held) for peer in received]
    views = [gx[box.slices_in(held)] for box in boxes]
    if disjoint(boxes):
        kernels.unpack(list(received.values()), views, add=True)
    else:  # several ranks read the same rows
        for piece, view in zip(received.values(), views, strict=True):
            view += piece


def _weight_gradient(
    parts: list[tuple[Segment, Tensor]], w: Tensor, geo: Geometry
) -> Tensor:
    """Sums the gradients of the taps that each segment uses."""
    if parts and parts[0][1].shape == w.shape:
        (_, total), *parts = parts
    else:
        total = torch.zeros_like(w)
    for segment, gw in parts:
        narrow(total, geo.dim, segment.taps).add_(gw)
    return total


def _run(
    geo: Geometry,
    x: Tensor,
    slab: Slab,
    w: Tensor,
    b: Tensor | None,
    epilogue: Epilogue,
    route: Route,
) -> Tensor:
    """Computes what the rows of a slab in ``x`` add to the output."""
    s = geo.op.spec
    x, w = _cut(x, w, geo, slab)
    pads = geo.padding(slab.segment)
    return kernels.conv_forward(
        x,
        w,
        b,
        s.stride,
        pads,
        s.dilation,
        geo.groups,
        epilogue=epilogue,
        route=route,
    )


def _gradients(
    geo: Geometry,
    g: Tensor,
    x: Tensor,
    slab: Slab,
    w: Tensor,
    wanted: tuple[bool, bool, bool],
) -> tuple[Any, Any, Any]:
    """Computes the wanted gradients of ``x``, of the taps that are used, and of the bias."""
    s, pad = geo.op.spec, geo.padding(slab.segment)
    rows, taps = _cut(x, w, geo, slab)
    gx, gw, gb = kernels.conv_backward(
        _rows(g, geo, slab), rows, taps, s.stride, pad, s.dilation, geo.groups, wanted
    )
    if gx is None or not wanted[0]:
        return None, gw, gb
    if gx.shape != x.shape:  # rows that are not read have a gradient of zero
        whole = torch.zeros_like(x)
        _cut(whole, w, geo, slab)[0].copy_(gx)
        gx = whole
    return gx, gw, gb


def _cut(x: Tensor, w: Tensor, geo: Geometry, slab: Slab) -> tuple[Tensor, Tensor]:
    """Returns the rows of ``x`` and the taps of ``w`` that a slab's segment uses."""
    (lo, hi), first = slab.segment.rows, slab.first
    rows = narrow(x, geo.dim, (lo - first, hi - first))
    return rows, narrow(w, geo.dim, slab.segment.taps)


def _rows(y: Tensor, geo: Geometry, slab: Slab) -> Tensor:
    """Returns the rows of the local output that a slab adds to."""
    lo, hi = slab.segment.out
    return narrow(y, geo.dim, (lo - geo.first_out, hi - geo.first_out))


def narrow(x: Tensor, dim: int, span: Span) -> Tensor:
    """Returns a view of a span of one dimension."""
    lo, hi = span
    return x if span == (0, x.shape[dim]) else x.narrow(dim, lo, hi - lo)
