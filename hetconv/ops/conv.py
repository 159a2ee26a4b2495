"""Convolution under a split."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ..layout import Layout
from ..replicas import contributed
from ..rules import SPACE, Conv, Split, Step
from ..tensor import HetTensor, gather
from ..transport import Team
from .common import autocast, bring, by_identity, cached_step, placement_of
from .geometry import Geometry, group_geometry, slab_geometry, spatial_geometry
from .halo import LocalConv, computed, may_be_torchs
from .waiting import Waiting, may_wait, version


def convolution(
    x: Tensor, w: Tensor, b: Tensor | None, op: Conv, split: Split, team: Team, followers: tuple[str, ...] = (),
    chunks: int = 1,
) -> Tensor:  # fmt: skip
    """A convolution of any rank under a split. ``w`` and ``b`` are this rank's slices where the split cuts them.

    Returns a HetTensor, or for ``replicate`` a plain tensor that every rank computed. ``followers``: the functions
    that alone will be called on the result; without autograd it waits for them, to compute them as it is stored.
    ``chunks`` of the batch in which a result that is cut by filter is gathered, if it is asked for whole.
    """
    if split.kind == "replicate":
        whole = Layout.replicated(op.spec.x_shape, 1)
        return _apply(gather(x), w, b, slab_geometry(op, whole, Split("filter", (op.spec.K,)), 0), team)
    step, geo, spatial = _prepared(op, placement_of(x, team), split, team)
    if step.contributes:
        w, b = contributed(team, w), contributed(team, b) if b is not None else None
    local = x.local if spatial and isinstance(x, HetTensor) else bring(x, step.reads[0], team)
    if geo is None:
        return HetTensor.wrap(_grouped(local, w, b, op, step.output, team), step.output, team)
    if (followers or chunks > 1) and step.output.kind == "sharded" and may_wait(x):
        local, w, b = autocast(local, w, b)
        waiting = Waiting(local, w, b, geo, step.output, team, followers, chunks, seen=version(local))
        return HetTensor.put_off(waiting, step.output, waiting.x.dtype, waiting.x.device, team)
    return HetTensor.made(_apply(local, w, b, geo, team), step.output, team)


@by_identity
def _prepared(op: Conv, src: Layout, split: Split, team: Team) -> tuple[Step, Geometry | None, bool]:
    """How it runs on an input that lies as ``src``, and whether halos come to own rows.

    There is no one geometry where filters of a grouped convolution are cut.
    """
    split = op.canonical(split)
    step = cached_step(op, (src,), split)
    if split.kind == "filter" and op.spec.groups > 1:
        return step, None, False
    if split.kind in SPACE and src.kind == "sharded" and src.dim == op.dim(split.kind):
        return step, spatial_geometry(op, src, split, team.rank), True
    return step, slab_geometry(op, src, split, team.rank), False


def _apply(x: Tensor, w: Tensor, b: Tensor | None, geo: Geometry, team: Team) -> Tensor:
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        if not torch.is_grad_enabled() or may_be_torchs(x, w, geo):
            return computed(x, w, b, geo, team)[0]
        return LocalConv.apply(x, w, b, geo, team)  # type: ignore[no-any-return]
    x, w, b = autocast(x, w, b)
    with torch.autocast(kind, enabled=False):
        return LocalConv.apply(x, w, b, geo, team)  # type: ignore[no-any-return]


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
        geo = group_geometry(op, z - a, max(g1 - g0, 1))
        rows = slice(a - k_lo, z - k_lo)
        outs.append(_apply(x_run, w[rows], b[rows] if b is not None else None, geo, team))
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1)
