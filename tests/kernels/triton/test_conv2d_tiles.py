"""Convolutions by every tile, and the same bits every time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import pytest

from hetconv.kernels import Tile, tiles
from hetconv.kernels.launch import StridedLayout
from hetconv.kernels.tiles import GemmShape, Pass, TileKind
from hetconv.kernels.triton import dgrad, fprop, wgrad
from hetconv.sharding.conv_spec import ConvSpec
from tests.interpreter import (
    CHIP,
    ON_GPU,
    PASSES,
    SAME,
    assert_right,
    by_triton,
    images,
    multiplying_in,
    tensors,
)

pytestmark = pytest.mark.usefixtures("new_memory_is_nan")
# Samples, channels, rows and columns, filters, taps a side.
LAYERS = [
    (32, 640, (32, 32), 640, 3),
    (32, 256, (14, 14), 256, 3),
    (1, 128, (28, 28), 128, 3),
]


@pytest.mark.parametrize("what", get_args(Pass))
@pytest.mark.parametrize("path", get_args(TileKind))
def test_the_same_bits_every_time(what: Pass, path: TileKind) -> None:
    spec = (
        images(32, 32, (7, 6), 2, 2) if not ON_GPU else images(96, 64, (40, 37), 3, 3)
    )
    tile, t = Tile(path, 64, 64, 16, 4, 2, split_k=5), tensors(spec)
    assert by_triton(what, spec, t, tile).equal(by_triton(what, spec, t, tile))


@pytest.mark.parametrize("what", get_args(Pass))
@pytest.mark.parametrize("shape", LAYERS)
def test_default_tiles_give_the_same_bits_every_time(what: Pass, shape: Any) -> None:
    """Of layers whose weight gradients differed from call to call on an H100, when left
    operands were in registers.
    """
    N, C, sides, K, R = shape
    spec = (
        images(C, K, sides, R, R, dtype="float16")
        if ON_GPU
        else images(16, 32, (5, 6), R, R)
    )
    spec = replace(spec, N=N if ON_GPU else 2)
    t = tensors(spec)
    first = by_triton(what, spec, t)
    assert all(first.equal(by_triton(what, spec, t)) for _ in range(7))


def work_of(what: Pass, spec: ConvSpec) -> GemmShape:
    x, w, y = (
        StridedLayout.packed(s, spec.dtype)
        for s in (spec.x_shape, spec.w_shape, spec.y_shape)
    )
    if what == "input gradient":
        (phase,) = dgrad.phases(spec, y, w, x, "tf32")
        assert phase.gemm is not None
        return phase.gemm.shape
    return (fprop.forward if what == "forward" else wgrad.weight_gradient)(
        spec, x, w, y, "tf32"
    ).shape


def all_tiles() -> Iterator[tuple[Pass, ConvSpec, Tile]]:
    """The tiles of the whole space at their most stages, every other one split; in the
    interpreter a few of them.
    """
    large, small = (136, 200, (40, 37), 3, 3, (1, 1), SAME), (40, 72, (5, 6), 2, 2)
    for what, dtype in product(PASSES, ("float16", "float32")):
        spec = images(*(large if ON_GPU else small), dtype=dtype)
        space = {
            (t.kind, t.m, t.n, t.k): t
            for t in tiles.search_space(work_of(what, spec), CHIP)
        }
        for i, tile in list(enumerate(space.values()))[:: 1 if ON_GPU else 7]:
            yield what, spec, replace(tile, split_k=1 + 2 * (i % 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "spec", "tile"),
    list(all_tiles()),
    ids=lambda v: getattr(v, "dtype", str(v)),
)
def test_every_tile(what: Pass, spec: ConvSpec, tile: Tile) -> None:
    with multiplying_in("tf32"):
        assert_right(spec, tensors(spec), tile, (what,))
