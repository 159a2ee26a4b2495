"""Convolutions of a rank's own rows and of the halo rows of other ranks.

Convolution is linear: conv(own rows + halo) = conv(own rows) + conv(halo). The halo
contributes to the few output rows beside a boundary only. Own rows are therefore neither
copied nor padded, and the exchange runs while they are computed. The backward pass sends
the halo's cotangent first, and computes the rest meanwhile.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

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
from hetconv.kernels.epilogue import per_channel
from hetconv.runtime.inputs import differentiable_gradients, tie_to_graph, uncounted
from hetconv.sharding.conv_geometry import Geometry
from hetconv.sharding.conv_spec import Segment
from hetconv.torch_internals import materialized


class FusedEpilogue(NamedTuple):
    """The epilogue activation(scale * y + shift + residual) of a convolution y.

    Attributes:
        scale: one number per filter of this rank, in float32 at least; or None.
        shift: likewise.
        residual: a tensor like y, or None.
        activation: name of the activation, or None.
        slope: its slope below zero.
    """

    scale: Tensor | None = None
    shift: Tensor | None = None
    residual: Tensor | None = None
    activation: str | None = None
    slope: float = 0.0


IDENTITY, ANY = FusedEpilogue(), Route()


def computed(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    geo: Geometry,
    group: RankGroup,
    after: FusedEpilogue = IDENTITY,
    route: Route = ANY,
) -> tuple[Tensor, dict[int, Tensor]]:
    """Computes this rank's output, without autograd.

    Args:
        x: this rank's input.
        w: its filters.
        b: their bias.
        geo: what it computes.
        group: the ranks.
        after: the epilogue.
        route: which kernels to use.

    Returns:
        The output, and the halos by sender.
    """
    bias = b if geo.adds_bias else None
    whole = geo.covers and bool(x.numel() and w.numel())
    if whole and not geo.held and geo.own is not None:
        return _run(geo, x, geo.own, geo.own_lo, w, bias, after, route), {}
    under_way = start_exchange(group, x, geo.held, geo.wanted) if geo.held else None
    scaled = FusedEpilogue(
        scale=after.scale
    )  # what a part of the sums gets, when all of them are not there yet
    if whole:
        assert geo.own is not None
        first = (
            after._replace(residual=None, activation=None)
            if geo.halos and after is not IDENTITY
            else after
        )
        y = _run(geo, x, geo.own, geo.own_lo, w, bias, first, route)
    else:
        y = _constant(x.new_zeros(geo.y_shape), bias, after)
        if geo.own is not None and x.numel() and w.numel():
            _rows(y, geo, geo.own).add_(
                _run(geo, x, geo.own, geo.own_lo, w, None, scaled, route)
            )
    got = under_way.wait() if under_way is not None else {}
    for peer, segment, lo in geo.halos:
        if segment is not None:
            _rows(y, geo, segment).add_(
                _run(geo, got[peer], segment, lo, w, None, scaled, route)
            )
    if geo.halos or not whole:
        kernels.finish_in_place(y, after.residual, after.activation, after.slope)
    return y, got


def _constant(y: Tensor, bias: Tensor | None, after: FusedEpilogue) -> Tensor:
    """Adds the convolution of zeros; a rank without output rows need not hold the bias."""
    if not y.numel():
        return y
    if bias is not None:
        y += per_channel(bias if after.scale is None else bias * after.scale, y)
    if after.shift is not None:
        y += per_channel(after.shift, y)
    return y


class LocalConv(torch.autograd.Function):
    """A convolution of one rank's shard, with its backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        b: Tensor | None,
        geo: Geometry,
        group: RankGroup,
    ) -> Tensor:
        """Computes this rank's output."""
        y, got = computed(x, w, b, geo, group)
        ctx.save_for_backward(x, w, *(got[peer] for peer, _, _ in geo.halos))
        ctx.geo, ctx.group, ctx.biases = geo, group, len(b) if b is not None else 0
        ctx.call = call_tags.forward_call()
        return y

    @staticmethod
    def backward(
        ctx: Any, g: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        """Computes the gradients of input, weight and bias."""
        (x, w, *halos), geo, group, g = (
            ctx.saved_tensors,
            ctx.geo,
            ctx.group,
            materialized(g),
        )
        call_tags.enter_backward(ctx.call)
        if torch.is_grad_enabled():
            gx, gw = differentiable_gradients(
                partial(_differentiable, geo, group), (x, w), g
            )
            gb = summed_pixels(g)[: ctx.biases] if ctx.needs_input_grad[2] else None
            return (
                gx,
                gw,
                gb if gb is None or geo.adds_bias else uncounted(gb),
                None,
                None,
            )
        want_x, want_w, want_b = ctx.needs_input_grad[:3]
        partial_w: list[tuple[Segment, Tensor]] = []
        home: dict[int, Tensor] = {}
        for (peer, segment, lo), halo in zip(geo.halos, halos, strict=True):
            home[peer] = torch.zeros_like(halo) if want_x else halo
            if segment is not None:
                gx, gw, _ = _back(geo, g, halo, segment, lo, w, (want_x, want_w, False))
                if want_x:
                    home[peer] = _placed(gx, halo, geo, segment, lo)
                if want_w:
                    partial_w.append((segment, gw))
        under_way = _send_home(geo, group, x, home) if want_x and geo.held else None
        gx, gw, gb = None, None, None
        if geo.own is not None and x.numel() and w.numel():
            wants = (want_x, want_w, want_b and geo.covers and ctx.biases == len(w))
            gx, gw, gb = _back(geo, g, x, geo.own, geo.own_lo, w, wants)
            gx = _placed(gx, x, geo, geo.own, geo.own_lo) if want_x else None
            partial_w[:0] = [(geo.own, gw)] if want_w else []
        if want_b and gb is None:
            gb = summed_pixels(g)[: ctx.biases]  # of which a rank may hold none
        gx = x.new_zeros(x.shape) if want_x and gx is None else gx
        if under_way is not None:
            with under_way as came:
                _add_home(gx, came, geo, group)
        return (
            gx,
            _weight_gradient(partial_w, w, geo) if want_w else None,
            gb,
            None,
            None,
        )


def _differentiable(geo: Geometry, group: RankGroup, x: Tensor, w: Tensor) -> Tensor:
    """Computes `computed` without bias by operators that autograd knows."""
    y, sources = x.new_zeros(geo.y_shape), [x, w]
    parts = [] if geo.own is None else [(x, geo.own, geo.own_lo)]
    if geo.held:
        joined, *got = _FetchedHalos.apply(x, geo, group)
        y, sources = y + joined, [x, w, joined]
        parts += [
            (halo, s, lo)
            for halo, (_, s, lo) in zip(got, geo.halos, strict=True)
            if s is not None
        ]
    for rows, segment, lo in parts:
        if rows.numel() and w.numel():
            own, taps = _cut(rows, w, geo, segment, lo)
            s = geo.op.spec
            part = aten.conv(
                own, taps, None, s.stride, geo.padding(segment), s.dilation, geo.groups
            )
            before = segment.out[0] - geo.first_out
            beyond = y.shape[geo.dim] - before - part.shape[geo.dim]
            y = y + F.pad(part, (*(0, 0) * (y.dim() - 1 - geo.dim), before, beyond))
    return tie_to_graph(y, *sources)


class _FetchedHalos(torch.autograd.Function):
    """Halos of a rank, in the order of ``geo.halos``.

    A zero that ties every rank to the exchange comes first.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, geo: Geometry, group: RankGroup
    ) -> tuple[Tensor, ...]:
        ctx.geo, ctx.group, ctx.shape, ctx.call = (
            geo,
            group,
            x.shape,
            call_tags.forward_call(),
        )
        got = start_exchange(group, x, geo.held, geo.wanted).wait()
        return x.new_zeros(()), *(got[peer] for peer, _, _ in geo.halos)

    @staticmethod
    def backward(ctx: Any, joined: Tensor, *halos: Tensor) -> tuple[Tensor, None, None]:
        call_tags.enter_backward(ctx.call)
        return (
            _HalosSentHome.apply(joined, ctx.shape, ctx.geo, ctx.group, *halos),
            None,
            None,
        )


class _HalosSentHome(torch.autograd.Function):
    """Adjoint of `_FetchedHalos`: the cotangent of own rows that other ranks read."""

    @staticmethod
    def forward(
        ctx: Any,
        joined: Tensor,
        shape: torch.Size,
        geo: Geometry,
        group: RankGroup,
        *halos: Tensor,
    ) -> Tensor:
        ctx.geo, ctx.group, ctx.call = geo, group, call_tags.forward_call()
        gx = joined.new_zeros(shape)
        home = {peer: halo for (peer, _, _), halo in zip(geo.halos, halos, strict=True)}
        with _send_home(geo, group, gx, home) as came:
            _add_home(gx, came, geo, group)
        return gx

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        call_tags.enter_backward(ctx.call)
        joined, *halos = _FetchedHalos.apply(g, ctx.geo, ctx.group)
        return joined, None, None, None, *halos


def _send_home(
    geo: Geometry, group: RankGroup, x: Tensor, home: dict[int, Tensor]
) -> PendingExchange:
    """Sends each halo's cotangent to its owner, and receives those of this rank's rows."""
    return PendingExchange(
        group, x, home, exchange_plan(geo.wanted, geo.held, group.rank).comes
    )


def _add_home(
    gx: Any, came: dict[int, Tensor], geo: Geometry, group: RankGroup
) -> None:
    """Adds the cotangents of rows that others read; in one pass unless several read one."""
    held = geo.held[group.rank]
    boxes = [geo.wanted[peer].intersect(held) for peer in came]
    views = [gx[box.slices_in(held)] for box in boxes]
    if disjoint(boxes):
        kernels.unpack(list(came.values()), views, add=True)
    else:
        for piece, view in zip(came.values(), views, strict=True):
            view += piece


def _weight_gradient(
    parts: list[tuple[Segment, Tensor]], w: Tensor, geo: Geometry
) -> Tensor:
    if parts and parts[0][1].shape == w.shape:
        (_, total), *parts = parts
    else:
        total = torch.zeros_like(w)
    for segment, gw in parts:
        total.narrow(geo.dim, segment.taps[0], segment.taps[1] - segment.taps[0]).add_(
            gw
        )
    return total


def _run(
    geo: Geometry,
    x: Tensor,
    segment: Segment,
    lo: int,
    w: Tensor,
    b: Tensor | None,
    after: FusedEpilogue,
    route: Route,
) -> Tensor:
    """Returns what the rows of a segment contribute to the output.

    Args:
        geo: what the rank computes.
        x: rows of the input.
        segment: of these rows.
        lo: index of the first row of ``x``.
        w: the filters.
        b: the bias.
        after: the epilogue.
        route: which kernels to use.
    """
    s = geo.op.spec
    x, w = _cut(x, w, geo, segment, lo)
    args = (x, w, b, s.stride, geo.padding(segment), s.dilation, geo.groups)
    if after is IDENTITY:
        return kernels.conv_forward(*args, route=route)
    return kernels.conv_forward(*args, **after._asdict(), route=route)


def _back(
    geo: Geometry,
    g: Tensor,
    x: Tensor,
    segment: Segment,
    lo: int,
    w: Tensor,
    wanted: tuple[bool, bool, bool],
) -> tuple[Any, Any, Any]:
    s = geo.op.spec
    g = _rows(g, geo, segment)
    x, w = _cut(x, w, geo, segment, lo)
    pad = geo.padding(segment)
    return kernels.conv_backward(g, x, w, s.stride, pad, s.dilation, geo.groups, wanted)


def _cut(
    x: Tensor, w: Tensor, geo: Geometry, segment: Segment, lo: int
) -> tuple[Tensor, Tensor]:
    (a, b), (r0, r1) = segment.rows, segment.taps
    x = (
        x
        if (a - lo, b - a) == (0, x.shape[geo.dim])
        else x.narrow(geo.dim, a - lo, b - a)
    )
    return x, w if (r0, r1) == (0, w.shape[geo.dim]) else w.narrow(geo.dim, r0, r1 - r0)


def _rows(y: Tensor, geo: Geometry, segment: Segment) -> Tensor:
    """Returns the rows of an output tensor that a segment contributes to."""
    lo, hi = segment.out
    return (
        y
        if hi - lo == y.shape[geo.dim]
        else y.narrow(geo.dim, lo - geo.first_out, hi - lo)
    )


def _placed(gx: Tensor, x: Tensor, geo: Geometry, segment: Segment, lo: int) -> Tensor:
    """Returns the gradient of a segment's rows, with zeros for rows that were not read."""
    if gx.shape == x.shape:
        return gx
    whole = torch.zeros_like(x)
    whole.narrow(
        geo.dim, segment.rows[0] - lo, segment.rows[1] - segment.rows[0]
    ).copy_(gx)
    return whole
