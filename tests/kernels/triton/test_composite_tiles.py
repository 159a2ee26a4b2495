"""Tiles of two accumulators, weight gradients by several kinds of runs, sums of splits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hetconv.kernels import Tile
from hetconv.kernels.launch import LaunchSequence, StridedLayout
from hetconv.kernels.tiles import COMPOSITE_SHAPES, Pass, TileKind, search_space
from hetconv.kernels.triton import wgrad
from hetconv.kernels.triton.split_k import (
    MAX_BLOCK_SPLITS,
    splits_at_a_time,
    sum_launch,
)
from hetconv.sharding.conv_spec import ConvSpec
from tests.interpreter import (
    BOUNDS,
    CHIP,
    PASSES,
    SAME,
    Tensors,
    assert_close,
    assert_right,
    by_triton,
    images,
    skip_unless_it_runs,
    tensors,
    truth,
)
from tests.spawn import DEVICE

pytestmark = pytest.mark.usefixtures("new_memory_is_nan")
# Fewer rows than a tile, rows that end within its second accumulator, and two tiles.
ROWS = {48: (40, 56), 96: (72, 104), 160: (136, 168), 192: (136, 200), 320: (264, 328)}


def spec_of(what: Pass, rows: int, stride: int = 1) -> ConvSpec:
    """A convolution whose product has these rows and few columns."""
    C, K = (rows, 24) if what == "input gradient" else (24, rows)
    size = (6, 8) if stride == 2 else (5, 7)
    return images(C, K, size, 3, 3, (stride, stride), SAME)


@pytest.mark.parametrize("what", PASSES)
@pytest.mark.parametrize("end", [0, 1])
@pytest.mark.parametrize("m", sorted(ROWS))
@pytest.mark.parametrize("kind", ["tma", "pointer"])
def test_two_accumulators_give_the_result_of_one(
    what: Pass, end: int, m: int, kind: TileKind
) -> None:
    tile = Tile(kind, m, 64, 16 if kind == "pointer" else 32, 8, 2, 1 + 2 * end)
    skip_unless_it_runs(tile)
    spec = spec_of(what, ROWS[m][end])
    assert_right(spec, tensors(spec), tile, (what,))


@pytest.mark.parametrize("what", PASSES)
def test_two_accumulators_at_stride_2(what: Pass) -> None:
    tile = Tile("tma", 96, 64, 16, 4, 2)
    skip_unless_it_runs(tile)
    spec = spec_of(what, 112, stride=2)
    spec = replace(spec, C=48, K=112) if what != "input gradient" else spec
    assert_right(spec, tensors(spec), tile, (what,))


@pytest.mark.parametrize("what", PASSES)
@pytest.mark.parametrize("kind", ["tma", "pointer"])
def test_two_accumulators_in_groups(what: Pass, kind: TileKind) -> None:
    """The second one reaches into the next group's rows, which it must not store."""
    tile = Tile(kind, 48, 64, 16, 4, 2)
    skip_unless_it_runs(tile)
    spec = images(64, 64, (5, 6), 3, 3, (1, 1), SAME, (1, 1), 2)
    assert_right(spec, tensors(spec), tile, (what,))


def test_every_multiple_of_16_is_covered_with_a_tenth_of_padding() -> None:
    for filters in range(16, 1025, 16):
        spec = images(64, filters, (56, 56), 3, 3, (1, 1), SAME, dtype="bfloat16")
        layouts = (
            StridedLayout.packed(s, spec.dtype)
            for s in (spec.x_shape, spec.w_shape, spec.y_shape)
        )
        shape = wgrad.forward(spec, *layouts, "ieee").shape
        padded = min(-(-filters // t.m) * t.m for t in search_space(shape, CHIP))
        assert padded <= 1.1 * filters, filters


def test_the_composite_shapes_are_those_that_no_power_of_two_gives() -> None:
    for kind, shapes in COMPOSITE_SHAPES.items():
        tiles = [Tile(kind, m, n, 16, warps, 2) for m, n, warps, _ in shapes]
        assert all(min(t.row_blocks) > 0 and sum(t.row_blocks) == t.m for t in tiles)


RUNS = {
    "joined rows": ((4, 16), 2, (1, 4, 16), 1),
    "a joined image": ((8, 8), 2, (1, 8, 8), 1),
    "two joined images": ((4, 8), 2, (2, 4, 8), 1),
    "two runs of samples": ((3, 5), 32, (1, 1, 32), 2),
    "two runs of columns": ((3, 28), 2, (1, 1, 32), 2),
    "a run of columns": ((3, 40), 2, (1, 1, 64), 1),
}


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("m", [64, 96])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("name", RUNS)
def test_weight_gradients_by_runs(name: str, stride: int, m: int, splits: int) -> None:
    (P, Q), N, sizes, per_step = RUNS[name]
    tile = Tile("tma", m, 64, 64, 4, 2, splits)
    skip_unless_it_runs(tile)
    size = (P * stride, Q * stride)
    spec = images(16, 72, size, 3, 3, (stride, stride), SAME)
    spec = replace(spec, N=N)
    found = gradient_of(spec, tensors(spec)).shape.runs_of(64, "tma")
    assert (tuple(sorted(found.sizes)), found.per_step) == (
        tuple(sorted(sizes)),
        per_step,
    )
    assert found.joined == ("joined" in name)
    assert_right(spec, tensors(spec), tile, ("weight gradient",))


def gradient_of(spec: ConvSpec, t: Tensors) -> wgrad.WeightGradient:
    w = StridedLayout.packed(spec.w_shape, spec.dtype)
    x, g = StridedLayout.of(t.x), StridedLayout.of(t.g)
    return wgrad.weight_gradient(spec, x, w, g, "ieee")


def test_rows_that_lie_apart_are_not_joined() -> None:
    tile = Tile("tma", 64, 64, 64, 4, 2)
    skip_unless_it_runs(tile)
    spec = images(16, 64, (4, 16), 3, 3, (1, 1), SAME)
    t = tensors(spec)
    wide = torch.full((2, 4, 24, 64), float("nan"), dtype=t.g.dtype, device=DEVICE)
    g = wide[:, :, :16].copy_(t.g.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    apart = t._replace(g=g)
    assert not gradient_of(spec, apart).shape.runs_of(64, "tma").joined
    found = by_triton("weight gradient", spec, apart, tile)
    assert_close(found, truth("weight gradient", spec, t), BOUNDS["float16"])


@pytest.mark.parametrize("split_k", [2, 3, 5, 7, 14, 29, 66])
@pytest.mark.parametrize("channels", [1, 48, 1025])
def test_partial_results_are_added_in_float32(split_k: int, channels: int) -> None:
    generator = torch.Generator().manual_seed(split_k)
    partial = torch.randn(split_k, 3, channels, generator=generator).to(DEVICE)
    y = torch.empty(1, 1, 3, channels, device=DEVICE).permute(0, 3, 1, 2)
    launch = sum_launch(StridedLayout.of(y), split_k)
    LaunchSequence((launch,)).run(partial=partial, y=y)
    expected = partial.double().sum(0).cpu().T[None, :, None, :]
    assert_close(y, expected, 1e-6)


@pytest.mark.parametrize("split_k", range(1, 200))
def test_at_most_a_quarter_of_the_places_of_a_load_stays_empty(split_k: int) -> None:
    size = splits_at_a_time(split_k)
    places = -(-split_k // size) * size
    assert size & (size - 1) == 0
    assert places - split_k <= places / 4
    assert size == MAX_BLOCK_SPLITS or size <= 2 * split_k
