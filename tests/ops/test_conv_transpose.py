"""Transposed convolutions and PReLU on shards, in every placement, against plain torch."""

from __future__ import annotations

from math import ceil

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hetconv
from hetconv.operators.conv_transpose import ConvTranspose, TransposedWindow
from hetconv.sharding.layout import Layout
from hetconv.sharding.rule import Gather
from hetconv.sharding.split import SplitKind
from tests.equivalence import Differences, assert_same, train
from tests.nets import splits_of
from tests.placed import PLACEMENTS, WORLD, Fn, on_parts
from tests.spawn import on_ranks

FUNCTIONS: dict[str, Fn] = {
    "2 by 2, stride 2": lambda x, z, p: F.conv_transpose2d(
        x, p["full"].new_ones(8, 3, 2, 2) * p["c"][0], None, 2
    ),
    "weights and bias": lambda x, z, p: F.conv_transpose2d(
        x, z_like(p, 4, 3), p["c"][:4], 2, 1, 1
    ),
    "4, stride 2, padding 1": lambda x, z, p: F.conv_transpose2d(
        x, z_like(p, 2, 4), None, stride=2, padding=1
    ),
    "stride 1": lambda x, z, p: F.conv_transpose2d(x, z_like(p, 3, 3), None, padding=1),
    "stride 3 of kernel 2": lambda x, z, p: F.conv_transpose2d(
        x, z_like(p, 2, 2), p["c"][:2], 3
    ),
    "unequal": lambda x, z, p: F.conv_transpose2d(
        x, z_like(p, 2, 3), None, (2, 1), (0, 1), (1, 0), dilation=(1, 2)
    ),
    "dilated": lambda x, z, p: F.conv_transpose2d(
        x, z_like(p, 2, 2), None, 2, 0, 1, dilation=3
    ),
    "groups": lambda x, z, p: F.conv_transpose2d(
        x, z_like(p, 3, 3), p["c"][:6], 2, groups=2
    ),
    "sequences": lambda x, z, p: F.conv_transpose1d(
        x.flatten(2), z_like(p, 3, 4, 1), p["c"][:3], 3, 1, 2, 1, 2
    ),
    "volumes of one plane": lambda x, z, p: F.conv_transpose3d(
        x.unsqueeze(2), z_like(p, 2, 3, 3), None, 2, 1, (0, 1, 0)
    ),
    "volumes of one column": lambda x, z, p: F.conv_transpose3d(
        x.unsqueeze(4),
        z_like(p, 2, 2, 3),
        p["c"][:4],
        (3, 1, 2),
        (1, 0, 0),
        (2, 0, 1),
        2,
        (2, 1, 3),
    ),
    "prelu by channel": lambda x, z, p: F.prelu(x - 1, p["c"]),
    "prelu of one slope": lambda x, z, p: F.prelu(x - 1, p["one"]),
    "prelu by keyword": lambda x, z, p: F.prelu(input=x - 1, weight=p["c"]),
}


def z_like(
    p: dict[str, torch.Tensor], K: int, size: int, rank: int = 2
) -> torch.Tensor:
    """Filters (8, K, size, ...) that a parameter has a gradient through."""
    ramp = torch.linspace(-1, 1, 8 * K * size**rank, dtype=p["c"].dtype).view(
        8, K, *(size,) * rank
    )
    return ramp * p["c"].view(8, *(1,) * (rank + 1))


def placed(name: str, placement: str) -> Differences:
    return on_parts(FUNCTIONS[name], placement)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_placement_gives_what_torch_gives(name: str, placement: str) -> None:
    assert_same(on_ranks(WORLD, placed, name, placement))


class Up(nn.Module):
    """A U-Net's way up: transposed convolution, concatenated skip, PReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = (
            nn.Conv2d(3, 6, 3, 2, 1),
            nn.ConvTranspose2d(6, 4, 3, 2, 1, 1),
        )
        self.act, self.out = nn.PReLU(4), nn.Conv2d(7, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(
            torch.cat([self.act(self.up(torch.relu(self.down(x)))), torch.relu(x)], 1)
        )


@pytest.mark.parametrize("kind", ["height", "width", "sample", "filter"])
@pytest.mark.parametrize("ratio", [(3, 1), (2, 0, 1)])
def test_a_way_up_trains_as_on_one_device(
    ratio: tuple[int, ...], kind: SplitKind
) -> None:
    assert_same(on_ranks(len(ratio), trained, kind, ratio))


def trained(kind: SplitKind, ratio: tuple[int, ...]) -> Differences:
    return train(
        Up, splits_of(Up(), (kind,), ratio), (2, 3, 12, 8), len(ratio), "sgd", 2
    )


def test_nothing_is_gathered_on_the_way_up() -> None:
    graph = hetconv.capture(Up(), torch.zeros(2, 3, 12, 8))
    assert not [n.function for n in graph.nodes if isinstance(n.op, Gather)]


@settings(max_examples=200)
@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 4),
    st.integers(0, 3),
    st.integers(1, 9),
)
def test_what_a_span_of_outputs_reads(
    k: int, s: int, d: int, pad: int, extra: int, size: int
) -> None:
    """Exactly the inputs that add to one of them."""
    window = TransposedWindow(k, s, d, pad, extra)
    n = window.out_size(size)
    for lo in range(max(n, 0)):
        for hi in range(lo + 1, n + 1):
            adds = [
                i
                for i in range(size)
                if any(lo <= window.first(i) + r * d < hi for r in range(k))
            ]
            a, b = window.reads((lo, hi), size)
            assert all(a <= i < b for i in adds)
            assert b - a <= ceil((hi - lo + window.reach) / s) + 1
    assert window.reads((2, 2), size) == (0, 0)


def test_a_cut_by_rows_stays_aligned_where_the_factor_is_whole() -> None:
    x = Layout.sharded((1, 8, 12, 5), 2, (7, 0, 5))
    window = TransposedWindow(4, 2, 1, 1)
    sharding = ConvTranspose((1, 4, 24, 10), (window, window)).sharding((x,))
    assert sharding.output.sizes == (14, 0, 10)
    assert [(b.lo[2], b.hi[2]) for b in sharding.input_layouts[0].boxes] == [
        (0, 8),
        (0, 0),
        (6, 12),
    ]
