"""How a convolution runs is known by the very layout that its input has."""

from __future__ import annotations

import torch
from torch import nn

from hetconv.comm.rank_group import rank_group_of
from hetconv.nn.layers import HetConv2d
from hetconv.ops.conv import conv_case
from hetconv.runtime.het_tensor import HetTensor
from hetconv.sharding.conv_spec import ConvSpec
from hetconv.sharding.layer_rules import Conv
from hetconv.sharding.layout import Layout
from hetconv.sharding.split import Split
from tests.spawn import on_ranks


def with_the_ways_of_another() -> float:
    """The error of a layer that knows another layout by the id of this one's, as a copy
    of a layer may.
    """
    torch.manual_seed(0)
    group, x = rank_group_of(), torch.randn(2, 4, 8, 6)
    conv = HetConv2d.from_conv(nn.Conv2d(4, 4, 3, padding=1), Split("height", (1, 1)))
    cuts = [Layout.sharded(x.shape, 2, sizes) for sizes in ((6, 2), (4, 4))]
    parts = [
        HetTensor.made(
            x[:, :, slice(c.boxes[group.rank].lo[2], c.boxes[group.rank].hi[2])],
            c,
            group,
        )
        for c in cuts
    ]
    with torch.no_grad():
        conv(parts[0])
        conv._cases = {id(cuts[1]): conv._cases[id(cuts[0])]}
        return float((conv(parts[1]) - conv(x)).abs().max())


def test_another_layouts_way_is_not_taken() -> None:
    assert max(on_ranks(2, with_the_ways_of_another)) <= 1e-6


def case_of(
    kind: str, sizes: tuple[int, ...], kernel: int, dim: int | None
) -> tuple[bool, bool, bool]:
    """(nothing is brought, nothing travels, one call of torch's own convolution) of a
    layer with the input cut so.
    """
    group = rank_group_of()
    one, pad = (1, 1), (kernel // 2,) * 2
    op = Conv(ConvSpec(4, 4, (8, 8), 4, (kernel, kernel), one, (pad, pad), one, 1))
    shape = op.spec.x_shape
    src = (
        Layout.replicated(shape, 2)
        if dim is None
        else Layout.sharded(shape, dim, (3 * shape[dim] // 4, shape[dim] // 4))
    )
    case = conv_case(op, src, Split(kind, sizes), group)  # type: ignore[arg-type]
    assert case.geo is not None
    return case.is_local, not case.geo.held, case.torch_call is not None


def test_what_moves_nothing_is_one_call_of_torch() -> None:
    assert on_ranks(2, case_of, "sample", (3, 1), 3, 0) == [(True, True, True)] * 2
    assert on_ranks(2, case_of, "height", (3, 1), 1, 2) == [(True, True, True)] * 2
    assert on_ranks(2, case_of, "height", (3, 1), 3, 2) == [(True, False, False)] * 2
    assert (
        on_ranks(2, case_of, "height", (3, 1), 3, None) == [(False, True, False)] * 2
    )  # padded on one side
    assert on_ranks(2, case_of, "filter", (3, 1), 3, None) == [(False, True, True)] * 2
    assert on_ranks(2, case_of, "channel", (3, 1), 3, 1)[1] == (
        True,
        True,
        False,
    )  # adds no bias
