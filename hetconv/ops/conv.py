"""Convolution on parts. A spatial cut works by linearity: conv(own rows + halo) = conv(own rows) + conv(halo).

The halo only adds to the few output rows beside a cut, so own rows are never copied or padded, and the exchange runs
while they are computed; backward sends the halo's cotangent home first and computes the rest meanwhile.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import kernels
from ..emulate import stretched
from ..layout import Boxes, Layout, pieces
from ..movement import start_round
from ..replicas import contributed
from ..rules import SPATIAL, Conv, Linear, Split
from ..spec import Segment
from ..tensor import HetTensor, gather
from ..transport import Round, Team
from .common import bring, placement_of


@dataclass(frozen=True)
class Geometry:
    """This rank's share of a convolution: its own segment, and one per rank whose rows (columns) it also reads."""

    op: Conv
    dim: int
    y_shape: tuple[int, ...]
    first_out: int
    groups: int
    own: Segment | None
    own_lo: int
    halos: tuple[tuple[int, Segment | None, int], ...] = ()  # (rank, segment, first row of its piece)
    held: Boxes = ()
    wanted: Boxes = ()
    adds_bias: bool = True

    def padding(self, segment: Segment) -> tuple[tuple[int, int], tuple[int, int]]:
        given = self.op.spec.padding
        return (segment.pad, given[1]) if self.dim == 2 else (given[0], segment.pad)

    def covers(self) -> bool:
        """Whether the own segment adds to all of the own output (always, but for cuts far out of line)."""
        return self.own is not None and self.own.out == (self.first_out, self.first_out + self.y_shape[self.dim])


@lru_cache(maxsize=4096)
def spatial_geometry(op: Conv, x: Layout, split: Split, rank: int) -> Geometry:
    """Where ``x`` is cut along the same dimension: own rows as they lie, the others' pieces as halos."""
    dim = SPATIAL[split.kind]
    step = op.step((x,), split)
    window, (need,) = op.spec.windows[dim - 2], step.reads
    out = step.output.boxes[rank]
    span, mine = (out.lo[dim], out.hi[dim]), x.boxes[rank]
    halos = tuple(
        (s, window.segment((box.lo[dim], box.hi[dim]), span), box.lo[dim])
        for s, r, box in pieces(x.boxes, need.boxes)
        if r == rank and s != rank
    )
    own = window.segment((mine.lo[dim], mine.hi[dim]), span)
    return Geometry(op, dim, out.shape, span[0], op.spec.groups, own, mine.lo[dim], halos, x.boxes, need.boxes)


@lru_cache(maxsize=4096)
def slab_geometry(op: Conv, x: Layout, split: Split, rank: int) -> Geometry:
    """Where all that this rank reads lies in one slab."""
    step = op.step((x,), split)
    dim = SPATIAL.get(split.kind, 2) or 2
    out, need = step.output.boxes[rank], step.reads[0].boxes[rank]
    span = (out.lo[dim], out.hi[dim])
    own = op.spec.windows[dim - 2].segment((need.lo[dim], need.hi[dim]), span)
    return Geometry(
        op, dim, out.shape, span[0], op.spec.groups, own, need.lo[dim], adds_bias=split.kind != "channel" or rank == 0
    )


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, geo: Geometry, team: Team) -> Tensor:
        under_way = start_round(team, x, geo.held, geo.wanted) if geo.held else None
        bias = b if geo.adds_bias else None
        if geo.covers() and x.numel() and w.numel():
            assert geo.own is not None
            y = _run(geo, x, geo.own, geo.own_lo, w, bias)
        else:
            y = x.new_zeros(geo.y_shape)
            if bias is not None:
                y += bias.view(-1, 1, 1)
            if geo.own is not None and x.numel() and w.numel():
                _rows(y, geo, geo.own).add_(_run(geo, x, geo.own, geo.own_lo, w, None))
        got = under_way.wait() if under_way is not None else {}
        for peer, segment, lo in geo.halos:
            if segment is not None:
                _rows(y, geo, segment).add_(_run(geo, got[peer], segment, lo, w, None))
        ctx.save_for_backward(x, w, *(got[peer] for peer, _, _ in geo.halos))
        ctx.geo, ctx.team = geo, team
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        (x, w, *halos), geo, team = ctx.saved_tensors, ctx.geo, ctx.team
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
        under_way = _send_home(geo, team, x, home) if want_x and geo.held else None
        gx, gw, gb = None, None, None
        if geo.own is not None and x.numel() and w.numel():
            wants = (want_x, want_w, want_b and geo.covers())
            gx, gw, gb = _back(geo, g, x, geo.own, geo.own_lo, w, wants)
            gx = _placed(gx, x, geo, geo.own, geo.own_lo) if want_x else None
            partial_w[:0] = [(geo.own, gw)] if want_w else []
        if want_b and gb is None:
            gb = g.sum((0, 2, 3))
        gx = x.new_zeros(x.shape) if want_x and gx is None else gx
        for peer, piece in (under_way.wait() if under_way is not None else {}).items():
            box = geo.wanted[peer].intersect(geo.held[team.rank])
            gx[box.within(geo.held[team.rank])] += piece
        return gx, _weight_gradient(partial_w, w, geo) if want_w else None, gb, None, None


def _send_home(geo: Geometry, team: Team, x: Tensor, home: dict[int, Tensor]) -> Round:
    """Each halo's cotangent goes to the rank that lent it; from the others come those of this rank's rows."""
    mine = pieces(geo.wanted, geo.held)
    return Round(team, x, home, {s: box.shape for s, r, box in mine if r == team.rank and s != team.rank})


def _weight_gradient(parts: list[tuple[Segment, Tensor]], w: Tensor, geo: Geometry) -> Tensor:
    if parts and parts[0][1].shape == w.shape:
        (_, total), *parts = parts
    else:
        total = torch.zeros_like(w)
    for segment, gw in parts:
        total.narrow(geo.dim, segment.taps[0], segment.taps[1] - segment.taps[0]).add_(gw)
    return total


def _run(geo: Geometry, x: Tensor, segment: Segment, lo: int, w: Tensor, b: Tensor | None) -> Tensor:
    """What the rows of ``segment`` in ``x`` (whose first row is ``lo``) add to the output."""
    s = geo.op.spec
    x, w = _cut(x, w, geo, segment, lo)
    pad = geo.padding(segment)
    return stretched(lambda: kernels.conv2d_forward(x, w, b, s.stride, pad, s.dilation, geo.groups), x.device)


def _back(
    geo: Geometry, g: Tensor, x: Tensor, segment: Segment, lo: int, w: Tensor, wanted: tuple[bool, bool, bool]
) -> tuple[Any, Any, Any]:
    s = geo.op.spec
    g = _rows(g, geo, segment)
    x, w = _cut(x, w, geo, segment, lo)
    pad = geo.padding(segment)
    return stretched(lambda: kernels.conv2d_backward(g, x, w, s.stride, pad, s.dilation, geo.groups, wanted), x.device)


def _cut(x: Tensor, w: Tensor, geo: Geometry, segment: Segment, lo: int) -> tuple[Tensor, Tensor]:
    (a, b), (r0, r1) = segment.rows, segment.taps
    x = x if (a - lo, b - a) == (0, x.shape[geo.dim]) else x.narrow(geo.dim, a - lo, b - a)
    return x, w if (r0, r1) == (0, w.shape[geo.dim]) else w.narrow(geo.dim, r0, r1 - r0)


def _rows(y: Tensor, geo: Geometry, segment: Segment) -> Tensor:
    """The rows of an output tensor that a segment adds to."""
    lo, hi = segment.out
    return y if hi - lo == y.shape[geo.dim] else y.narrow(geo.dim, lo - geo.first_out, hi - lo)


def _placed(gx: Tensor, x: Tensor, geo: Geometry, segment: Segment, lo: int) -> Tensor:
    """The gradient of a segment's rows, in zeros where rows of ``x`` were not read."""
    if gx.shape == x.shape:
        return gx
    whole = torch.zeros_like(x)
    whole.narrow(geo.dim, segment.rows[0] - lo, segment.rows[1] - segment.rows[0]).copy_(gx)
    return whole


def conv2d(x: Tensor, w: Tensor, b: Tensor | None, op: Conv, split: Split, team: Team) -> Tensor:
    """A convolution under a split. ``w`` and ``b`` are this rank's slices where the split cuts them.

    Returns a HetTensor, or for ``replicate`` a plain tensor that every rank computed.
    """
    if split.kind == "replicate":
        whole = Layout.replicated(op.spec.x_shape, 1)
        return _apply(gather(x), w, b, slab_geometry(op, whole, Split("filter", (op.spec.K,)), 0), team)
    split, src = op.canonical(split), placement_of(x, team)
    step = op.step((src,), split)
    if step.contributes:
        w, b = contributed(team, w), contributed(team, b) if b is not None else None
    if split.kind == "filter" and op.spec.groups > 1:
        y = _grouped(bring(x, step.reads[0], team), w, b, op, step.output, team)
    elif split.kind in ("height", "width") and src.kind == "sharded" and src.dim == SPATIAL[split.kind]:
        assert isinstance(x, HetTensor)
        y = _apply(x.local, w, b, spatial_geometry(op, src, split, team.rank), team)
    else:
        y = _apply(bring(x, step.reads[0], team), w, b, slab_geometry(op, src, split, team.rank), team)
    return HetTensor.wrap(y, step.output, team)


def _apply(x: Tensor, w: Tensor, b: Tensor | None, geo: Geometry, team: Team) -> Tensor:
    x, w, b = _autocast(x, w, b)
    with torch.autocast(x.device.type, enabled=False):
        return _Conv.apply(x, w, b, geo, team)  # type: ignore[no-any-return]


def _autocast(x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    kind = w.device.type
    if not torch.is_autocast_enabled(kind) or w.dtype == torch.float64:
        return x, w, b
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), w.to(dtype), b.to(dtype) if b is not None else None


def _grouped(x: Tensor, w: Tensor, b: Tensor | None, op: Conv, y: Layout, team: Team) -> Tensor:
    """Own filters of a grouped convolution: part of a first group, whole groups, part of a last one."""
    s = op.spec
    k_lo, k_hi = y.boxes[team.rank].lo[1], y.boxes[team.rank].hi[1]
    per_k, per_c, first = s.K // s.groups, s.C // s.groups, op.group_span((k_lo, k_hi))[0]
    cuts = sorted({k_lo, k_hi, *(c for c in (-(-k_lo // per_k) * per_k, k_hi // per_k * per_k) if k_lo < c < k_hi)})
    outs = []
    for a, z in itertools.pairwise(cuts) if k_lo < k_hi else [(k_lo, k_hi)]:
        g0, g1 = op.group_span((a, z))
        x_run = x[:, (g0 - first) * per_c : (g1 - first) * per_c]
        geo = slab_geometry(op, Layout.replicated(s.x_shape, 1), Split("filter", (s.K,)), 0)
        geo = _with(geo, (s.N, z - a, s.P, s.Q), max(g1 - g0, 1))
        rows = slice(a - k_lo, z - k_lo)
        outs.append(_apply(x_run, w[rows], b[rows] if b is not None else None, geo, team))
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1)


@lru_cache(maxsize=4096)
def _with(geo: Geometry, y_shape: tuple[int, ...], groups: int) -> Geometry:
    return Geometry(geo.op, geo.dim, y_shape, 0, groups, geo.own, 0)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, adds_bias: bool) -> Tensor:
        ctx.save_for_backward(x, w)
        return stretched(lambda: F.linear(x, w, b if adds_bias else None), x.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        wants = ctx.needs_input_grad

        def gradients() -> tuple[Tensor | None, ...]:
            rows = prod(x.shape[:-1])
            g_rows, x_rows = g.reshape(rows, g.shape[-1]), x.reshape(rows, x.shape[-1])
            gx = g @ w if wants[0] else None
            gw = g_rows.t() @ x_rows if wants[1] else None
            return gx, gw, g_rows.sum(0) if wants[2] else None, None

        return stretched(gradients, x.device)


def linear(x: Tensor, w: Tensor, b: Tensor | None, op: Linear, split: Split, team: Team) -> Tensor:
    """A linear layer under a split, as `conv2d`."""
    if split.kind == "replicate":
        return _linear(gather(x), w, b)
    step = op.step((placement_of(x, team),), split)
    if step.contributes:
        w, b = contributed(team, w), contributed(team, b) if b is not None else None
    # Of a partial output one summand holds the bias; every rank computes its gradient, for the cotangent is replicated.
    y = _linear(bring(x, step.reads[0], team), w, b, adds_bias=split.kind != "channel" or team.rank == 0)
    return HetTensor.wrap(y, step.output, team)


def _linear(x: Tensor, w: Tensor, b: Tensor | None, adds_bias: bool = True) -> Tensor:
    x, w, b = _autocast(x, w, b)
    with torch.autocast(x.device.type, enabled=False):
        return _Linear.apply(x, w, b, adds_bias)  # type: ignore[no-any-return]
