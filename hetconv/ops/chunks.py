"""A convolution cut by filter and gathered at once: chunks of the batch travel while the next one is computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hetconv import kernels
from hetconv.comm.exchange import Round
from hetconv.comm.rank_group import Team
from hetconv.comm.redistribute import start_round
from hetconv.sharding.layout import Layout, apportion, spans

from .geometry import Geometry
from .halo_exchange import ANY, After, computed


def gathered_in_chunks(
    x: Tensor, w: Tensor, b: Tensor | None, geo: Geometry, team: Team, after: After, layout: Layout, chunks: int
) -> Tensor:
    """The whole output, of a ``layout`` cut along channels, channels-last; without autograd, collective.

    A chunk is computed by whom the whole batch would be, with the same tile: the same bits, but for an ATen that goes
    by the size of the batch.
    """
    N, *image = layout.shape
    s, route = geo.op.spec, ANY
    if geo.own is not None and x.dim() == 4 and x.numel() and w.numel():
        geometry: Any = (s.stride, geo.padding(geo.own), s.dilation, geo.groups)
        route = kernels.route(x, w, *geometry)
    under_way: list[tuple[int, int, Tensor, Round]] = []
    for lo, hi in spans(apportion(N, (1,) * min(chunks, N))):
        own = replace(geo, y_shape=(hi - lo, *geo.y_shape[1:]))
        residual = after.residual[lo:hi] if after.residual is not None else None
        part, _ = computed(x[lo:hi], w, b, own, team, after._replace(residual=residual), route)
        some = Layout.sharded((hi - lo, *image), 1, layout.sizes)
        whole = Layout.replicated(some.shape, team.size)
        under_way.append((lo, hi, part, start_round(team, part, some.boxes, whole.boxes)))
    memory = kernels.CHANNELS_LAST.get(x.dim(), torch.contiguous_format)
    y = torch.empty(layout.shape, dtype=x.dtype, device=x.device, memory_format=memory)
    for lo, hi, part, round_ in under_way:
        places = y[lo:hi].split(layout.sizes, 1)
        with round_ as came:
            got = came | {team.rank: part}
            kernels.unpack([*got.values()], [places[r] for r in got])
    return y
