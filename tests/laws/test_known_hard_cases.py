"""Cases that other systems get wrong (DistDL, ShardTensor, torch's DTensor): each is
right here, or refused by name.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hetconv
from hetconv.comm.rank_group import rank_group_of
from hetconv.errors import SplitError
from hetconv.nn.layers import HET_CONVS, HetConv2d
from hetconv.operators.layers import CONVS
from hetconv.runtime.het_tensor import HetTensor
from hetconv.sharding.layout import Layout
from hetconv.sharding.split import Split
from tests.equivalence import (
    Differences,
    apart,
    assert_same,
    full_gradients,
    one_step,
    pair,
)
from tests.nets import splits_of
from tests.spawn import on_ranks

ODD = (2, 3, 24, 9)
TONES, SOLID = (2, 3, 24), (2, 3, 9, 6, 5)


@dataclass(frozen=True)
class Case:
    """A convolution (channels, filters, kernel and more), its input, how it is cut, and
    how the input is held.
    """

    conv: tuple[int, int, Any]
    shape: tuple[int, ...]
    split: Split
    options: dict[str, Any] = field(default_factory=dict)
    held: tuple[int, tuple[int, ...]] | None = None
    world: int = 2


CASES = {
    "two groups cut by filters": Case(
        (6, 8, 3), (2, 6, 7, 5), Split("filter", (4, 4)), {"groups": 2}
    ),
    "two groups cut within a group": Case(
        (6, 8, 3), (2, 6, 7, 5), Split("filter", (5, 3)), {"groups": 2}
    ),
    "two groups cut twice in one": Case(
        (6, 8, 3), (2, 6, 7, 5), Split("filter", (1, 2, 5)), {"groups": 2}, world=3
    ),
    "four groups over three ranks": Case(
        (8, 12, 1), (1, 8, 4, 5), Split("filter", (4, 7, 1)), {"groups": 4}, world=3
    ),
    "two groups cut by channels": Case(
        (6, 8, 3), (2, 6, 7, 5), Split("channel", (3, 3)), {"groups": 2}
    ),
    "two groups on one rank": Case(
        (6, 8, 3), (2, 6, 7, 5), Split("channel", (0, 6)), {"groups": 2}
    ),
    "two groups cut by rows": Case(
        (6, 8, 3), (2, 6, 7, 5), Split("height", (3, 1)), {"groups": 2}
    ),
    "depthwise cut by filters": Case(
        (5, 5, 3), (2, 5, 7, 5), Split("filter", (3, 2)), {"groups": 5}
    ),
    "depthwise cut by channels": Case(
        (5, 5, 3), (2, 5, 7, 5), Split("channel", (1, 4)), {"groups": 5}
    ),
    "depthwise with two filters per channel": Case(
        (4, 8, 3), (1, 4, 7, 5), Split("filter", (3, 5)), {"groups": 4}
    ),
    "24 rows held as 18 and 6": Case(
        (3, 4, 3), ODD, Split("height", (18, 6)), {"padding": 1}, (2, (18, 6))
    ),
    "a halo past the neighbour": Case(
        (3, 4, 7), ODD, Split("height", (2, 2, 20)), {"padding": 3}, (2, (2, 2, 20)), 3
    ),
    "a dilated halo past the neighbour": Case(
        (3, 4, 3),
        ODD,
        Split("height", (20, 2, 2)),
        {"padding": 4, "dilation": 4},
        (2, (20, 2, 2)),
        3,
    ),
    "rows held otherwise than they are cut": Case(
        (3, 4, 3), ODD, Split("height", (1, 1, 1)), {"padding": 1}, (2, (2, 2, 20)), 3
    ),
    "rows held the wrong way round": Case(
        (3, 4, 3), ODD, Split("height", (23, 1)), {"padding": 1}, (2, (1, 23))
    ),
    "columns held, rows cut": Case(
        (3, 4, 3), ODD, Split("height", (3, 1)), {"padding": 1}, (3, (4, 5))
    ),
    "channels held, samples cut": Case(
        (3, 4, 3), ODD, Split("sample", (1, 1)), {"padding": 1}, (1, (2, 1))
    ),
    "uneven samples": Case(
        (3, 4, 3), (4, 3, 6, 5), Split("sample", (3, 1)), {}, (0, (3, 1))
    ),
    "stride 2, rows cut off the stride": Case(
        (3, 4, 3),
        (2, 3, 16, 5),
        Split("height", (11, 5)),
        {"stride": 2, "padding": 1},
        (2, (11, 5)),
    ),
    "stride 3 over a kernel of 2": Case(
        (3, 4, 2), ODD, Split("height", (5, 3)), {"stride": 3}, (2, (11, 13))
    ),
    "kernel 4, stride 2, pad 1": Case(
        (3, 4, 4),
        (2, 3, 16, 8),
        Split("height", (3, 1)),
        {"stride": 2, "padding": 1},
        (2, (12, 4)),
    ),
    "columns cut": Case(
        (3, 4, 3), (2, 3, 6, 12), Split("width", (5, 1)), {"padding": 1}, (3, (10, 2))
    ),
    "padding same": Case(
        (3, 4, (3, 5)), ODD, Split("height", (3, 1)), {"padding": "same"}, (2, (18, 6))
    ),
    "padding same, even kernel": Case(
        (3, 4, (4, 2)), ODD, Split("height", (3, 1)), {"padding": "same"}, (2, (18, 6))
    ),
    "padding same, even kernel, columns": Case(
        (3, 4, 4), ODD, Split("width", (3, 1)), {"padding": "same"}
    ),
    "padding valid": Case(
        (3, 4, 3), ODD, Split("height", (3, 1)), {"padding": "valid"}, (2, (18, 6))
    ),
    "padding as a tuple": Case(
        (3, 4, 3), ODD, Split("width", (3, 1)), {"padding": (0, 2)}, (3, (6, 3))
    ),
    "circular padding": Case(
        (3, 4, 3),
        ODD,
        Split("height", (3, 1)),
        {"padding": 1, "padding_mode": "circular"},
    ),
    "reflected padding": Case(
        (3, 4, 3),
        ODD,
        Split("width", (3, 1)),
        {"padding": 2, "padding_mode": "reflect"},
    ),
    "replicated padding": Case(
        (3, 4, 3),
        ODD,
        Split("sample", (1, 1)),
        {"padding": 1, "padding_mode": "replicate"},
    ),
    "circular same padding": Case(
        (3, 4, 3),
        ODD,
        Split("filter", (3, 1)),
        {"padding": "same", "padding_mode": "circular"},
        (2, (18, 6)),
    ),
    "padding wider than the input": Case(
        (3, 4, 3), (2, 3, 2, 2), Split("height", (1, 1)), {"padding": 4}
    ),
    "no rows on one rank": Case(
        (3, 4, 3), ODD, Split("height", (3, 0, 1)), {"padding": 1}, (2, (18, 0, 6)), 3
    ),
    "no filters on one rank": Case(
        (3, 4, 3), ODD, Split("filter", (3, 0, 1)), {"padding": 1}, world=3
    ),
    "no channels on one rank": Case(
        (3, 4, 3), ODD, Split("channel", (2, 0, 1)), {"padding": 1}, world=3
    ),
    "no samples on one rank": Case(
        (3, 4, 3), ODD, Split("sample", (1, 0, 1)), {"padding": 1}, (0, (1, 0, 1)), 3
    ),
    "no groups on one rank": Case(
        (6, 6, 3), (1, 6, 5, 5), Split("filter", (2, 0, 4)), {"groups": 3}, world=3
    ),
    "fewer rows than ranks": Case(
        (3, 4, 1), (2, 3, 2, 5), Split("height", (1, 1, 1, 1)), {}, None, 4
    ),
    "fewer samples than ranks": Case(
        (3, 4, 3), (2, 3, 6, 5), Split("sample", (1, 1, 1, 1)), {}, None, 4
    ),
    "fewer filters than ranks": Case(
        (3, 2, 3), (2, 3, 6, 5), Split("filter", (1, 0, 1, 0)), {}, None, 4
    ),
    "rows held by a rank that computes none": Case(
        (3, 4, 3), ODD, Split("height", (1, 0)), {"padding": 1}, (2, (10, 14))
    ),
    "a sequence held as 18 and 6": Case(
        (3, 4, 3), TONES, Split("width", (3, 1)), {"padding": 1}, (2, (18, 6))
    ),
    "a halo past the neighbour of a sequence": Case(
        (3, 4, 9), TONES, Split("width", (2, 2, 20)), {"padding": 4}, (2, (2, 2, 20)), 3
    ),
    "a sequence, stride 3, padding same with circular ends": Case(
        (3, 4, 4),
        TONES,
        Split("width", (1, 0, 2)),
        {"stride": 3, "padding": 2, "padding_mode": "circular"},
        None,
        3,
    ),
    "a depthwise sequence cut by filters": Case(
        (3, 6, 3), TONES, Split("filter", (4, 2)), {"groups": 3}
    ),
    "planes held as 6 and 3": Case(
        (3, 4, 3), SOLID, Split("depth", (2, 1)), {"padding": 1}, (2, (6, 3))
    ),
    "a dilated halo past the neighbour of planes": Case(
        (3, 4, (3, 1, 2)),
        SOLID,
        Split("depth", (7, 1, 1)),
        {"padding": (3, 0, 1), "dilation": (3, 1, 2)},
        (2, (7, 1, 1)),
        3,
    ),
    "no planes on one rank": Case(
        (3, 4, 3), SOLID, Split("depth", (2, 0, 1)), {"padding": 1}, (2, (6, 0, 3)), 3
    ),
    "planes held, rows cut": Case(
        (3, 4, 3), SOLID, Split("height", (3, 1)), {"padding": (0, 1, 2)}, (2, (4, 5))
    ),
    "rows of volumes held, stride 2": Case(
        (3, 4, 4),
        SOLID,
        Split("height", (3, 1)),
        {"stride": 2, "padding": 1},
        (3, (4, 2)),
    ),
    "columns of volumes, padding same, even kernel": Case(
        (3, 4, (2, 3, 4)),
        SOLID,
        Split("width", (3, 2)),
        {"padding": "same"},
        (4, (3, 2)),
    ),
    "volumes with reflected padding": Case(
        (3, 4, 3),
        SOLID,
        Split("depth", (1, 1)),
        {"padding": (2, 1, 1), "padding_mode": "reflect"},
    ),
    "volumes with replicated padding": Case(
        (3, 4, 3),
        SOLID,
        Split("filter", (3, 1)),
        {"padding": 1, "padding_mode": "replicate"},
        (2, (6, 3)),
    ),
    "volumes in three groups cut within one": Case(
        (3, 6, 3), SOLID, Split("filter", (1, 2, 3)), {"groups": 3}, None, 3
    ),
    "volumes cut by channels": Case(
        (3, 4, 3), SOLID, Split("channel", (2, 0, 1)), {"padding": "valid"}, None, 3
    ),
    "samples of volumes": Case(
        (3, 4, 3), SOLID, Split("sample", (1, 1)), {"bias": False}, (0, (1, 1))
    ),
    "40:40:20 of 64 filters": Case(
        (3, 64, 3),
        (1, 3, 5, 5),
        Split("filter", hetconv.apportion(64, (40, 40, 20))),
        {"bias": False},
        world=3,
    ),
}


def run(case: Case) -> Differences:
    """Output and all gradients against the whole convolution, and the global shape of
    the split output.
    """
    torch.set_default_dtype(torch.float64)
    rank = len(case.shape) - 2
    plain, x = CONVS[rank - 1](*case.conv, **case.options), torch.randn(case.shape)
    cut = HET_CONVS[rank - 1].from_conv(plain, case.split, output="split")
    x_plain = x.clone().requires_grad_()
    layout = Layout.replicated(case.shape, case.world)
    if case.held is not None:
        layout = Layout.sharded(case.shape, *case.held)
    box = layout.boxes[dist.get_rank()]
    local = x[tuple(map(slice, box.lo, box.hi))].clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # torch warns that it copies for padding "same" of even kernels
        expected = plain(x_plain)
    y = cut(
        local if case.held is None else HetTensor.wrap(local, layout, rank_group_of())
    )
    whole = hetconv.gather(y)
    g = torch.randn(expected.shape)
    whole.backward(g)
    expected.backward(g)
    gx = hetconv.redistribute(
        local.grad, layout, Layout.replicated(case.shape, case.world)
    )
    gradients = full_gradients(cut)
    found = {
        "shape": float(y.shape != expected.shape),
        "output": apart(whole, expected),
        "x": apart(gx, x_plain.grad),
    }
    return found | {
        name: apart(gradients[name], p.grad) for name, p in plain.named_parameters()
    }


@pytest.mark.parametrize("name", CASES)
def test_convolution(name: str) -> None:
    assert_same(on_ranks(CASES[name].world, run, CASES[name]))


def transposed() -> nn.Module:
    up = (
        nn.ConvTranspose2d(4, 4, 4, 2, 1),
        nn.ConvTranspose2d(4, 3, 3, 2, 1, output_padding=1),
    )
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), *up, nn.Conv2d(3, 3, 3, padding=1)
    )


def with_transposed(kind: Any, ratio: tuple[int, ...]) -> Differences:
    """Kernel 4 and kernel 3, stride 2."""
    serial, cut = pair(transposed, splits_of(transposed(), (kind,), ratio), len(ratio))
    return one_step(serial, cut, torch.randn(2, 3, 7, 5))


@pytest.mark.parametrize("ratio", [(2, 1), (5, 0, 2)])
@pytest.mark.parametrize("kind", ["sample", "height", "width", "filter", "channel"])
def test_transposed_convolutions(kind: str, ratio: tuple[int, ...]) -> None:
    assert_same(on_ranks(len(ratio), with_transposed, kind, ratio))


@pytest.mark.parametrize(
    ("sizes", "match"),
    [
        ((2, 4), "through the groups"),
        ((3, 2), "adds up to 5"),
        ((6,), "1 sizes for 2 ranks"),
        ((3, 2, 1), "3 sizes"),
    ],
)
def test_cuts_that_groups_do_not_allow_are_refused(
    sizes: tuple[int, ...], match: str
) -> None:
    (kind, message), again = on_ranks(2, refused, sizes)
    assert (kind, message) == again
    with pytest.raises(SplitError, match=match):
        raise {"SplitError": SplitError}[kind](message)


def refused(sizes: tuple[int, ...]) -> tuple[str, str]:
    try:
        HetConv2d(6, 8, 3, groups=2, split=Split("channel", sizes))
    except SplitError as e:
        return type(e).__name__, str(e)
    return "none", ""
