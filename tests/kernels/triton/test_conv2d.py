"""The three passes by Triton are the definition's, through every path of the kernels,
on tensors that lie anyhow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetconv import kernels
from hetconv.errors import KernelError
from hetconv.kernels import Tile
from hetconv.kernels.launch import Launch
from hetconv.kernels.tiles import Pass
from hetconv.kernels.triton.implicit_gemm import (
    implicit_gemm_pointers,
    implicit_gemm_tma,
)
from hetconv.kernels.triton.wgrad import wgrad_pointers, wgrad_tma
from hetconv.sharding.conv_spec import ConvSpec
from tests.interpreter import (
    CHIP,
    ON_GPU,
    POINTER,
    SAME,
    TMA,
    assert_right,
    by_triton,
    geometry,
    images,
    multiplying_in,
    skip_unless_it_runs,
    tensors,
)
from tests.strategies import convolutions

pytestmark = pytest.mark.usefixtures("new_memory_is_nan")
HALVES = ("float16", "bfloat16")
SPLIT_POINTER, SPLIT_TMA = replace(POINTER, split_k=3), replace(TMA, split_k=3)
LONG_TMA, SPLIT_LONG_TMA = (
    replace(TMA, n=128, k=32),
    replace(TMA, n=128, k=32, split_k=3),
)
EXAMPLES = 16 if ON_GPU else 8  # on a GPU each compiles kernels of its own
hopper = pytest.mark.skipif(CHIP.arch < 90, reason="needs Hopper's copy engine")
seeds = st.integers(0, 2**32)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What was launched since the test began."""
    seen: list[Launch] = []
    run = Launch.run

    def recorded(self: Launch, tensors: Any) -> None:
        seen.append(self)
        run(self, tensors)

    monkeypatch.setattr(Launch, "run", recorded)
    return seen


@settings(max_examples=EXAMPLES)
@given(
    convolutions(("float32", *HALVES), st.integers(1, 3)),
    seeds,
    st.sampled_from(["ieee", "tf32"]),
    st.sampled_from([POINTER, SPLIT_POINTER]),
)
def test_any_convolution_by_pointers(
    spec: ConvSpec, seed: int, precision: str, tile: Tile
) -> None:
    with multiplying_in(precision):
        assert_right(spec, tensors(spec, seed), tile)


@hopper
@settings(max_examples=EXAMPLES)
@given(
    convolutions(HALVES, st.just(1), aligned=True),
    seeds,
    st.sampled_from([LONG_TMA, SPLIT_LONG_TMA]),
)
def test_any_aligned_convolution_by_boxes(
    spec: ConvSpec, seed: int, tile: Tile
) -> None:
    assert_right(spec, tensors(spec, seed), tile)


@settings(max_examples=EXAMPLES)
@given(convolutions(("float32", *HALVES), st.integers(1, 2), aligned=True), seeds)
def test_any_convolution_by_the_default_tile(spec: ConvSpec, seed: int) -> None:
    with multiplying_in("tf32"):
        assert_right(spec, tensors(spec, seed))


def first(name: str, value: Any) -> Callable[[list[Launch]], bool]:
    return lambda seen: {**seen[0].scalars, **seen[0].constants}[name] == value


def made_by(*kernels: Any) -> Callable[[list[Launch]], bool]:
    return lambda seen: {r.kernel for r in seen if len(r.tensors) > 2} >= set(kernels)


RGB = images(3, 20, (9, 11), 3, 7, (2, 2), ((1, 2), (3, 0)), dtype="float32")
EVEN = images(32, 40, (8, 10), 3, 3, (2, 2), SAME)
GROUPS = images(48, 96, (6, 5), 3, 3, (1, 1), SAME, (1, 1), 3)
ROUTES: dict[str, tuple[Pass, ConvSpec, Tile, Callable[[list[Launch]], bool]]] = {
    "an image's numbers": ("forward", RGB, POINTER, first("PACKED", True)),
    "an image's numbers for filters": (
        "weight gradient",
        RGB,
        POINTER,
        first("PACKED", True),
    ),
    "an image's numbers, split": (
        "forward",
        RGB,
        SPLIT_POINTER,
        first("PACKED", True),
    ),
    "too few numbers for two groups": (
        "forward",
        images(6, 4, (5, 6), 3, 3, (1, 1), SAME, (1, 1), 2),
        POINTER,
        first("PACKED", False),
    ),
    "31 taps": (
        "forward",
        images(8, 9, (5, 33), 1, 31, (1, 1), ((0, 0), (15, 15))),
        POINTER,
        first("S", 31),
    ),
    "32 taps": (
        "forward",
        images(8, 9, (6, 9), 4, 8, (1, 1), ((1, 2), (3, 4))),
        POINTER,
        first("S", 8),
    ),
    "63 taps": (
        "input gradient",
        images(8, 9, (8, 8), 9, 7, (1, 1), ((4, 4), (3, 3))),
        POINTER,
        first("R", 9),
    ),
    "channels in several steps": (
        "forward",
        images(72, 9, (3, 4), 2, 2),
        POINTER,
        first("C", 72),
    ),
    "one row of pixels": (
        "forward",
        images(24, 40, (5, 7), 1, 1),
        POINTER,
        first("Q", 70),
    ),
    "one row of gradients": (
        "weight gradient",
        images(24, 40, (5, 7), 1, 1),
        POINTER,
        first("SIZE_2", 70),
    ),
    "one row by boxes": (
        "forward",
        images(24, 40, (5, 7), 1, 1),
        TMA,
        first("Q", 70),
    ),
    "a padded 1 x 1": (
        "forward",
        images(24, 40, (5, 7), 1, 1, (1, 1), SAME),
        POINTER,
        first("OFFSET_H", -1),
    ),
    "a strided 1 x 1 by pointers": (
        "forward",
        images(24, 40, (5, 7), 1, 1, (2, 3)),
        POINTER,
        first("STRIDE_H", 1),
    ),
    "a strided 1 x 1 by boxes": (
        "forward",
        images(24, 40, (5, 7), 1, 1, (2, 3)),
        TMA,
        first("STRIDE", 1),
    ),
    "four phases": (
        "input gradient",
        images(9, 8, (7, 9), 3, 3, (2, 2), SAME),
        POINTER,
        lambda seen: len(seen) == 4,
    ),
    "phases that are split": (
        "input gradient",
        images(9, 8, (7, 9), 3, 3, (2, 2), SAME),
        SPLIT_POINTER,
        lambda seen: len(seen) == 8,
    ),
    "phases that no tap reads": (
        "input gradient",
        images(9, 8, (7, 8), 2, 1, (3, 2)),
        POINTER,
        lambda seen: len(seen) == 2,
    ),
    "one phase of dilated taps": (
        "input gradient",
        images(9, 8, (9, 9), 3, 3, (2, 2), SAME, (2, 2)),
        POINTER,
        lambda seen: len(seen) == 1,
    ),
    "phases of one tap": (
        "input gradient",
        images(9, 8, (6, 8), 2, 2, (2, 2)),
        POINTER,
        lambda seen: [r.constants["R"] for r in seen] == [1] * 4,
    ),
    "boxes at stride 2": ("forward", EVEN, TMA, first("STRIDE", 2)),
    "boxes at stride 2, split": ("forward", EVEN, SPLIT_TMA, first("STRIDE", 2)),
    "boxes at stride 2 of a dilated filter": (
        "forward",
        images(16, 24, (12, 10), 3, 3, (2, 2), ((2, 3), (1, 1)), (3, 2)),
        TMA,
        first("STRIDE", 2),
    ),
    "boxes at stride 2 for filters": (
        "weight gradient",
        EVEN,
        TMA,
        first("STRIDE", 2),
    ),
    "boxes of phases": ("input gradient", EVEN, TMA, made_by(implicit_gemm_tma)),
    "boxes of groups": ("forward", GROUPS, TMA, made_by(implicit_gemm_tma)),
    "boxes of groups for inputs": (
        "input gradient",
        GROUPS,
        SPLIT_TMA,
        made_by(implicit_gemm_tma),
    ),
    "boxes of groups for filters": (
        "weight gradient",
        GROUPS,
        SPLIT_TMA,
        made_by(wgrad_tma),
    ),
    "boxes of strided groups": (
        "forward",
        images(32, 32, (6, 6), 3, 3, (2, 2), SAME, (1, 1), 2),
        TMA,
        first("STRIDE", 2),
    ),
    "boxes of strided groups for filters": (
        "weight gradient",
        images(32, 32, (6, 6), 3, 3, (2, 2), SAME, (1, 1), 2),
        TMA,
        first("STRIDE", 2),
    ),
    "boxes of channels that end within a step": (
        "forward",
        images(24, 40, (5, 5), 3, 3),
        TMA,
        made_by(implicit_gemm_tma),
    ),
    "groups by pointers": ("forward", GROUPS, POINTER, made_by(implicit_gemm_pointers)),
    "a filter per channel": (
        "forward",
        images(5, 10, (6, 5), 3, 3, (1, 1), SAME, (1, 1), 5),
        SPLIT_POINTER,
        made_by(implicit_gemm_pointers),
    ),
    "a filter per channel for inputs": (
        "input gradient",
        images(5, 10, (6, 5), 3, 3, (2, 1), SAME, (1, 1), 5),
        POINTER,
        made_by(implicit_gemm_pointers),
    ),
    "a filter per channel for filters": (
        "weight gradient",
        images(5, 10, (6, 5), 3, 3, (1, 1), SAME, (1, 1), 5),
        POINTER,
        made_by(wgrad_pointers),
    ),
    "more programs than are added at once": (
        "forward",
        images(40, 9, (4, 4), 3, 3),
        Tile("pointer", 16, 64, 16, 4, 2, split_k=27),
        first("SPLIT_K", 27),
    ),
    "more programs than steps": (
        "forward",
        images(8, 9, (4, 4), 3, 3),
        Tile("pointer", 16, 16, 16, 4, 2, split_k=20),
        first("SPLIT_K", 20),
    ),
    "more programs than steps for filters": (
        "weight gradient",
        images(8, 16, (4, 4), 2, 1),
        Tile("tma", 64, 64, 16, 4, 2, split_k=20),
        first("SPLIT_K", 20),
    ),
}


@pytest.mark.parametrize("name", ROUTES)
def test_every_route_through_the_kernels(name: str, launches: list[Launch]) -> None:
    what, spec, tile, taken = ROUTES[name]
    skip_unless_it_runs(tile)
    assert_right(spec, tensors(spec), tile, (what,))
    assert taken(launches)
    assert any("partial" in r.tensors.values() for r in launches) == (tile.split_k > 1)


@hopper
@pytest.mark.parametrize(
    ("image", "rows", "cols"),
    [((2, 5, 16), 1, 2), ((2, 16, 5), 2, 1), ((16, 3, 5), 0, 1)],
)
@pytest.mark.parametrize("stride", [1, 2])
def test_pixels_in_any_order_for_filters(
    image: tuple[int, int, int],
    rows: int,
    cols: int,
    stride: int,
    launches: list[Launch],
) -> None:
    N, P, Q = image
    spec = images(16, 8, (P * stride, Q * stride), 3, 3, (stride, stride), SAME)
    spec = replace(spec, N=N)
    assert_right(spec, tensors(spec), TMA, ("weight gradient",))
    assert (launches[0].constants["ROWS"], launches[0].constants["COLS"]) == (
        rows,
        cols,
    )


NOT_BY_TMA: dict[str, tuple[Pass, ConvSpec]] = {
    "an odd height at stride 2": (
        "forward",
        images(32, 40, (9, 10), 3, 3, (2, 2), SAME),
    ),
    "an odd width at stride 2": (
        "weight gradient",
        images(32, 40, (8, 11), 3, 3, (2, 2), SAME),
    ),
    "two strides": ("forward", images(32, 40, (8, 10), 3, 3, (2, 1), SAME)),
    "stride 3": ("forward", images(32, 40, (9, 9), 3, 3, (3, 3), SAME)),
    "8 channels a group": (
        "forward",
        images(16, 32, (6, 6), 3, 3, (1, 1), SAME, (1, 1), 2),
    ),
    "unaligned channels": ("forward", images(36, 40, (6, 6), 3, 3)),
    "unaligned filters": ("input gradient", images(32, 36, (6, 6), 3, 3)),
    "exact float32": ("forward", images(8, 16, (6, 6), 3, 3, dtype="float32")),
}


@pytest.mark.parametrize("name", NOT_BY_TMA)
def test_what_does_not_come_in_boxes_is_refused(name: str) -> None:
    what, spec = NOT_BY_TMA[name]
    with (
        multiplying_in("ieee"),
        pytest.raises(KernelError, match="tma:64x64x16:4w2s1z reads by TMA"),
    ):
        by_triton(what, spec, tensors(spec), TMA)
    assert_right(spec, tensors(spec), None, (what,))


@hopper
@pytest.mark.parametrize("what", ["forward", "input gradient"])
def test_tf32_by_boxes(what: Pass) -> None:
    spec = images(36, 24, (7, 6), 3, 3, (1, 1), ((1, 0), (2, 1)), dtype="float32")
    with multiplying_in("tf32"):
        assert_right(spec, tensors(spec), SPLIT_TMA, (what,))


@pytest.mark.parametrize("splits", [1, 3])
def test_a_call_without_bias(splits: int) -> None:
    spec = images(8, 9, (4, 4), 3, 3)
    t = tensors(spec)
    tile = Tile("pointer", 16, 64, 16, 4, 2, splits)
    y = kernels.conv2d_forward(
        t.x, t.w, None, *geometry(spec), tile=tile, backend="triton"
    )
    biased = kernels.conv2d_forward(
        t.x, t.w, torch.zeros_like(t.bias), *geometry(spec), tile=tile, backend="triton"
    )
    assert y.equal(biased)
