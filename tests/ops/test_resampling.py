"""Interpolation, padding and poolings on shards: equal to torch's in every placement,
and what is sent for them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from hetconv.operators import read_call
from hetconv.operators.resampling import Interpolate
from hetconv.sharding.layout import Layout
from hetconv.sharding.moves import Move, bytes_per_pair
from hetconv.sharding.rule import OpSharding
from hetconv.sharding.split import REPLICATE
from tests.equivalence import Differences
from tests.placed import (
    PLACEMENTS,
    WORLD,
    Fn,
    check,
    gathered,
    in_every_placement,
    sequence,
    volume,
)
from tests.spawn import on_ranks

ROWS, COLUMNS = PLACEMENTS["rows"], PLACEMENTS["columns"]


def resized(mode: str, **options: Any) -> Fn:
    return lambda x, z, p: F.interpolate(x, mode=mode, **options)


SIZES: dict[str, dict[str, Any]] = {
    "by 2": {"scale_factor": 2},
    "by 3": {"scale_factor": 3.0},
    "by (2, 1)": {"scale_factor": (2.0, 1.0)},
    "by (1, 3)": {"scale_factor": (1, 3)},
    "by 1.7": {"scale_factor": 1.7},
    "by 1.7, recomputed": {"scale_factor": 1.7, "recompute_scale_factor": True},
    "by 2.1": {"scale_factor": 2.1},  # twice the size, but not twice as dense
    "by 3.1": {"scale_factor": 3.1},
    "by 0.4": {"scale_factor": 0.4},
    "by 1.1": {"scale_factor": 1.1},
    "to (12, 10)": {"size": (12, 10)},
    "to (9, 13)": {"size": (9, 13)},
    "to (3, 5)": {"size": [3, 5]},
    "to (2, 3)": {"size": (2, 3)},
    "to 1": {"size": 1},
}
INTERPOLATIONS: dict[str, Fn] = {
    f"{mode} {name}": resized(mode, **options)
    for mode in ("nearest", "nearest-exact", "bilinear", "bicubic")
    for name, options in SIZES.items()
} | {
    f"{mode} {name}, corners aligned": resized(mode, **SIZES[name], align_corners=True)
    for mode in ("bilinear", "bicubic")
    for name in ("by 2", "by 1.7", "by 0.4", "to (9, 13)", "to (3, 5)", "to 1")
}
INTERPOLATIONS |= {
    "area": resized("area", scale_factor=2),
    "area of (4, 3)": resized("area", size=(4, 3)),
    "area of (3, 5)": resized("area", size=(3, 5)),
    "sequence, area": sequence(resized("area", size=7)),
    "volume, area": volume(resized("area", size=(4, 3, 3))),
    "sequence, nearest-exact": sequence(resized("nearest-exact", scale_factor=0.5)),
    "volume, nearest by 2": volume(resized("nearest", scale_factor=2)),
    "antialias": resized("bilinear", size=(3, 4), antialias=True),
    "Upsample": lambda x, z, p: nn.Upsample(scale_factor=2, mode="bilinear")(x),
    "sequence, nearest": sequence(resized("nearest", scale_factor=2)),
    "sequence, linear": sequence(resized("linear", size=37)),
    "volume, nearest": volume(resized("nearest-exact", size=(9, 7, 8))),
    "volume, trilinear": volume(resized("trilinear", scale_factor=(2, 1.5, 1))),
}
PADS: dict[str, Fn] = {
    f"{mode} {pads}": lambda x, z, p, mode=mode, pads=pads: F.pad(x, pads, mode)
    for mode in ("constant", "reflect", "replicate", "circular")
    for pads in ((1, 1, 1, 1), (0, 1, 0, 1), (2, 0, 0, 0), (3, 2, 4, 1), (0, 2, 0, 4))
} | {
    "value": lambda x, z, p: F.pad(x, (1, 2, 0, 3), value=2.5),
    "channels": lambda x, z, p: F.pad(x, (0, 0, 0, 0, 1, 2), "constant", 0.5),
    "samples": lambda x, z, p: F.pad(x, (0, 0, 0, 0, 0, 0, 1, 0)),
    "cropped": lambda x, z, p: F.pad(x, (-1, -1, -2, 0)),
    "cropped and padded": lambda x, z, p: F.pad(x, (-3, 2, 1, -4)),
    "replicated, cropped": lambda x, z, p: F.pad(x, (-1, 2, 1, -1), "replicate"),
    "nothing": lambda x, z, p: F.pad(x, (0, 0)),
    "by keyword": lambda x, z, p: F.pad(input=x, pad=(1, 0, 2, 0), value=1.0),
    "written to": lambda x, z, p: F.pad(x * 1, (0, 0, 0, 0)).mul_(2) + x,
    "sequence": sequence(lambda x, z, p: F.pad(x, (2, 1), "reflect")),
    "volume": volume(lambda x, z, p: F.pad(x, (1, 1, 0, 0, 2, 1), "replicate")),
    "around": lambda x, z, p: F.pad(x, (5, 5, 6, 6), "circular"),
    "cropped, circular": lambda x, z, p: F.pad(x, (-2, 0, 0, -3), "circular"),
    "sequence, around": sequence(lambda x, z, p: F.pad(x, (7, 30), "circular")),
    "volume, around": volume(lambda x, z, p: F.pad(x, (1, 0, 2, 1, 4, 6), "circular")),
    "mirrored and cropped": lambda x, z, p: F.pad(x, (4, -2, -3, 2), "reflect"),
}
UNSHUFFLES: dict[str, Fn] = {
    "pixel_unshuffle": lambda x, z, p: F.pixel_unshuffle(F.pad(x, (0, 1)), 2),
    "pixel_unshuffle by 3": lambda x, z, p: F.pixel_unshuffle(
        input=F.pad(x, (0, 1)), downscale_factor=3
    ),
    "there and back": lambda x, z, p: F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2),
}
FUNCTIONS = {
    f"{family}: {name}": fn
    for family, fns in (
        ("interpolate", INTERPOLATIONS),
        ("pad", PADS),
        ("unshuffle", UNSHUFFLES),
    )
    for name, fn in fns.items()
}


def everywhere(
    name: str, dtype: torch.dtype = torch.float64, autocast: bool = False
) -> dict[str, Differences]:
    return in_every_placement(FUNCTIONS[name], dtype, autocast)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name: str) -> None:
    check(on_ranks(WORLD, everywhere, name))


MIXED = [
    "interpolate: nearest by 2",
    "interpolate: nearest by 1.7",
    "interpolate: bilinear by 2",
    "interpolate: bicubic to (9, 13)",
    "pad: reflect (0, 1, 0, 1)",
    "pad: constant (1, 1, 1, 1)",
    "unshuffle: there and back",
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", MIXED)
def test_function_under_autocast(name: str, dtype: torch.dtype) -> None:
    check(
        on_ranks(WORLD, everywhere, name, dtype, True),
        {torch.bfloat16: 2e-1, torch.float32: 1e-5}[dtype],
    )


@pytest.mark.parametrize("name", MIXED)
def test_function_in_half_precision(name: str) -> None:
    check(on_ranks(WORLD, everywhere, name, torch.float16), 3e-2)


GATHERED_OVER_ROWS = {
    *(
        f"interpolate: {mode} by 1.1"
        for mode in ("nearest", "nearest-exact", "bilinear", "bicubic")
    ),
    "interpolate: nearest by 2.1",
    "interpolate: nearest-exact by 2.1",
    "interpolate: nearest-exact by 3.1",
    "interpolate: antialias",
    "pad: cropped, circular",
}


PLACES = ("rows", "channels", "samples")


def found() -> set[tuple[str, str]]:
    return gathered(FUNCTIONS, PLACES)


def test_everything_else_runs_on_parts() -> None:
    unfit = {
        ("unshuffle: there and back", "channels")
    }  # cut within the channels that become one
    expected = {(name, "rows") for name in GATHERED_OVER_ROWS} | unfit
    assert all(names == expected for names in on_ranks(WORLD, found))


def step_of(layout: Layout, func: Any, *args: Any, **kwargs: Any) -> OpSharding:
    call = read_call(func, (torch.empty(layout.shape, device="meta"), *args), kwargs)
    assert call is not None
    return call.op.sharding((layout,), REPLICATE)


def moved(layout: Layout, sharding: OpSharding) -> int:
    (source,) = sharding.input_layouts
    return (
        sum(bytes_per_pair(Move(layout, source).forward, 1).values())
        if source != layout
        else 0
    )


@pytest.mark.parametrize("layout", [ROWS, COLUMNS], ids=["rows", "columns"])
@pytest.mark.parametrize("factor", [1, 2, 3, 4.0, 7])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_copies_of_pixels_need_no_message(
    layout: Layout, factor: float, mode: str
) -> None:
    step = step_of(layout, F.interpolate, scale_factor=factor, mode=mode)
    assert moved(layout, step) == 0
    assert step.output.sizes == tuple(int(factor * size) for size in layout.sizes)


@pytest.mark.parametrize(
    ("n", "out", "mode"),
    [(2, 82, "nearest"), (2, 98, "nearest"), (20, 134, "nearest-exact")],
)
def test_where_rounding_decides_which_pixel_is_nearest_torch_does_it(
    n: int, out: int, mode: str
) -> None:
    rows = Layout.sharded((1, 1, n, 1), 2, (1, n - 1))
    assert (
        step_of(rows, F.interpolate, size=(out, 1), mode=mode).output.kind
        == "replicated"
    )


def test_a_linear_interpolation_reads_one_row_beyond_each_cut_and_a_cubic_one_two() -> (
    None
):
    rows = Layout.sharded((1, 1, 12, 4), 2, (4, 0, 5, 3))
    for mode, beyond in (("bilinear", 1), ("bicubic", 2)):
        (need,) = step_of(rows, F.interpolate, scale_factor=2, mode=mode).input_layouts
        spans = [(0, 4 + beyond), (0, 0), (4 - beyond, 9 + beyond), (9 - beyond, 12)]
        assert [(b.lo[2], b.hi[2]) for b in need.boxes] == spans


def test_what_is_padded_comes_from_where_it_is() -> None:
    rows = Layout.sharded((1, 1, 12, 1), 2, (0, 2, 9, 1))
    far = step_of(rows, F.pad, (0, 0, 3, 2), "reflect")
    assert (moved(rows, far), far.output.sizes) == (2 + 2, (0, 5, 9, 3))
    around = step_of(rows, F.pad, (0, 0, 3, 2), "circular")
    assert [
        sum(bytes_per_pair(Move(rows, read_call).forward, 1).values())
        for read_call in around.input_layouts
    ] == [0, 3, 2]


@pytest.mark.parametrize("mode", ["constant", "replicate", "reflect"])
def test_padding_needs_no_message(mode: str) -> None:
    rows = Layout.sharded((1, 1, 12, 4), 2, (0, 4, 5, 3, 0))
    step = step_of(rows, F.pad, (1, 1, 3, 2), mode)
    assert (step.input_layouts, step.output.sizes) == ((rows,), (0, 7, 5, 5, 0))


def test_pixels_fold_where_they_lie_if_no_cut_divides_them() -> None:
    aligned, across = (
        Layout.sharded((1, 1, 12, 4), 2, sizes) for sizes in ((8, 4), (7, 5))
    )
    assert step_of(aligned, F.pixel_unshuffle, 2).input_layouts == (aligned,)
    assert moved(across, step_of(across, F.pixel_unshuffle, 2)) == 4


@given(
    st.sampled_from(["nearest", "nearest-exact", "bilinear", "bicubic"]),
    st.booleans(),
    st.integers(1, 60),
    st.one_of(st.integers(1, 120), st.floats(0.1, 5.0)),
    st.sampled_from([torch.float32, torch.float64]),
    st.tuples(st.integers(0, 300), st.integers(1, 300)),
)
def test_an_interpolation_reads_all_that_torch_reads(
    mode: str,
    align: bool,
    n: int,
    target: float,
    dtype: torch.dtype,
    span: tuple[int, int],
) -> None:
    """By torch's own weight of every input in every output."""
    options: dict[str, Any] = {
        "mode": mode,
        "align_corners": align if mode.startswith("bi") else None,
    }
    options["size" if isinstance(target, int) else "scale_factor"] = (
        target,
        1 if isinstance(target, int) else 1.0,
    )
    assume(isinstance(target, int) or int(n * target) > 0)
    call = read_call(
        F.interpolate, (torch.empty((1, n, n, 1), device="meta"),), options
    )
    assert call is not None
    assert isinstance(call.op, Interpolate)
    sharding = call.op.sharding(
        (Layout.sharded((1, n, n, 1), 2, (n, 0)),)
    )  # by two ranks: whether it runs on parts
    assume(call.op.filter is not None and sharding.output.kind == "sharded")
    weights = F.interpolate(torch.eye(n, dtype=dtype).view(1, n, n, 1), **options)[
        0, :, :, 0
    ]
    lo, hi = min(span[0], weights.shape[1] - 1), min(sum(span), weights.shape[1])
    hi = max(lo + 1, hi)
    used = (weights[:, lo:hi].abs() > 1e-4).any(1).nonzero().flatten().tolist()
    first, last = call.op.reads(2, n, (lo, hi))
    assert first <= min(used)
    assert max(used) < last <= n
