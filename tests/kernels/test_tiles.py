"""How work is cut: tiles, boxes of pixels, taps of a phase. Integers only; nothing is launched."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetconv.errors import KernelError
from hetconv.kernels import Tile, tiles
from hetconv.kernels.chip import CHIPS, Chip
from hetconv.kernels.launch import StridedLayout
from hetconv.kernels.tiles import GemmShape, Image
from hetconv.kernels.triton import dgrad
from hetconv.kernels.triton.backend import usable_tile
from hetconv.sharding.conv_spec import ConvSpec, Window
from tests.strategies import windows

chips = st.sampled_from(list(CHIPS.values()))
dtypes = st.sampled_from(["float16", "bfloat16", "float32"])
images = st.tuples(st.integers(1, 64), st.integers(1, 256), st.integers(1, 256))
powers = st.integers(4, 8).map(lambda i: 1 << i)
sides = st.sampled_from([16, 32, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384])
any_tile = st.builds(
    Tile,
    st.sampled_from(["tma", "pointer"]),
    sides,
    powers,
    powers,
    st.sampled_from([1, 2, 4, 8, 16]),
    st.integers(1, 9),
    st.integers(1, 300),
)


@st.composite
def extents(draw: st.DrawFn) -> GemmShape:
    """Of a pass over channels, or of one over pixels."""
    image, m, dtype, boxes = (
        draw(images),
        draw(st.integers(1, 2048)),
        draw(dtypes),
        draw(st.booleans()),
    )
    taps, repeats, whole = (
        draw(st.integers(1, 63)),
        draw(st.integers(1, 64)),
        draw(st.booleans()),
    )
    channels = draw(st.integers(1, 128)) * (
        16 if whole else draw(st.sampled_from([1, 16]))
    )
    if draw(st.booleans()):
        return GemmShape(
            m,
            channels,
            1,
            1,
            repeats,
            dtype,
            image,
            boxes and dtype != "float32",
            reduces_pixels=True,
        )
    return GemmShape(
        m, prod(image), channels, taps, repeats, dtype, image, boxes, whole
    )


@given(any_tile)
def test_a_tile_is_what_it_prints(tile: Tile) -> None:
    assert Tile.parse(str(tile)) == tile


@pytest.mark.parametrize(
    "text",
    [
        "",
        "64x64x64",
        "tma:64x64:4w2s1z",
        "discs:64x64x64:4w2s1z",
        "tma:64x64x64:4w",
    ],
)
def test_other_words_are_no_tile(text: str) -> None:
    with pytest.raises(KernelError, match="write it as tma:128x128x64:8w4s1z"):
        Tile.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "tma:112x64x64:4w2s1z",
        "tma:72x64x64:4w2s1z",
        "tma:64x48x64:4w2s1z",
        "tma:64x8x64:4w2s1z",
        "pointer:64x64x100:4w2s1z",
        "pointer:64x64x64:3w2s1z",
        "pointer:64x64x64:4w0s1z",
        "pointer:64x64x64:4w2s0z",
        "pointer:64x64x0:4w2s1z",
        "tma:512x64x16:4w2s1z",
    ],
)
def test_a_tile_that_cannot_be_run_is_refused(text: str) -> None:
    with pytest.raises(
        KernelError,
        match=f"tile {text} cannot be run: n and k must be powers of two",
    ):
        Tile.parse(text)


@given(extents(), chips)
def test_the_default_runs(work: GemmShape, chip: Chip) -> None:
    tile = tiles.default_tile(work, chip)
    assert usable_tile(tile, work, chip) == tile
    assert (tile.kind == "tma") == tiles.uses_tma(work, chip)


@given(extents(), chips)
def test_the_default_leaves_no_program_without_a_step(
    work: GemmShape, chip: Chip
) -> None:
    tile = tiles.default_tile(work, chip)
    each = -(-work.steps(tile) // tile.split_k)
    assert (tile.split_k - 1) * each < work.steps(tile)
    assert tile.split_k == 1 or each >= tiles.MIN_STEPS_PER_SPLIT


@given(extents(), chips)
def test_the_space_holds_tiles_that_run(work: GemmShape, chip: Chip) -> None:
    found = list(tiles.search_space(work, chip))
    assert found
    assert len(set(found)) == len(found)
    assert all(
        usable_tile(tile, work, chip) == tile and tile.split_k == 1 for tile in found
    )


@given(extents(), any_tile)
def test_tiles_cover_the_results(work: GemmShape, tile: Tile) -> None:
    assert work.padded_results(tile) >= work.m * work.n * work.repeats
    assert work.padded_results(tile) == work.tiles(tile) * tile.m * tile.n
    assert work.steps(tile) * tile.k >= (
        prod(work.image) if work.reduces_pixels else work.channels * work.taps
    )


WORK = GemmShape(
    64, 64, 48, 9, 1, "float16", (1, 8, 8), supports_tma=True, k_divides_channels=True
)


@pytest.mark.parametrize(
    ("tile", "work", "arch", "match"),
    [
        ("tma:64x64x16:4w2s1z", WORK, 80, "reads by TMA, which takes a Hopper GPU"),
        (
            "tma:64x64x16:4w2s1z",
            GemmShape(64, 64, 48, 9, 1, "float16", (1, 8, 8)),
            90,
            "give a tile of pointers",
        ),
        (
            "tma:64x64x64:4w2s1z",
            WORK,
            90,
            "steps by 64, which must divide the 48 channels",
        ),
        (
            "pointer:128x128x64:4w4s1z",
            WORK,
            89,
            f"more shared memory than the {99 << 10} bytes",
        ),
        ("pointer:256x256x64:4w4s1z", WORK, 90, "give fewer stages"),
    ],
)
def test_a_tile_that_does_not_fit_is_refused(
    tile: str, work: GemmShape, arch: int, match: str
) -> None:
    with pytest.raises(KernelError, match=f"tile {tile} .*{match}"):
        usable_tile(Tile.parse(tile), work, CHIPS[arch])


def covers(image: Image, box: tiles.Box) -> int:
    return prod(
        -(-image[i] // size) for i, size in zip(box.order, box.sizes, strict=True)
    )


@given(images, powers)
def test_boxes_cover_an_image_in_the_fewest_copies(image: Image, pixels: int) -> None:
    box = tiles.pixel_box(image, pixels)
    assert prod(box.sizes) == pixels
    assert box.order == (0, 1, 2)
    assert box.copies == covers(image, box)
    sides = [1 << i for i in range(9)]
    every = (
        tiles.Box((a, b, c), 0)
        for a, b, c in product(sides, repeat=3)
        if a * b * c == pixels
    )
    assert box.copies == min(covers(image, other) for other in every)


@given(images, powers, st.booleans(), st.sampled_from([1, 2]))
def test_runs_cover_an_image_too(
    image: Image, pixels: int, joins: bool, most: int
) -> None:
    run = tiles.pixel_runs(image, pixels, joins, most)
    assert run.per_step <= most
    assert prod(run.sizes) * run.per_step == pixels
    assert max(run.sizes) <= 256
    # A product of a tensor core reduces 16 numbers or more.
    assert prod(run.sizes) >= min(pixels, 16)
    assert sorted(run.order) == [0, 1, 2]
    boxes = tiles.Box(run.sizes, run.copies, run.order)
    assert run.copies == covers(image, boxes)
    assert run.steps * run.per_step >= run.copies
    if run.joined:
        assert joins
        assert run.copies * pixels == prod(image)
        assert is_run(image, run.sizes)
    else:
        assert sorted(run.sizes)[:2] == [1, 1]


def is_run(image: Image, box: Image) -> bool:
    """Whether every copy of a box is a run of pixels in memory, counted by hand."""
    (N, P, Q), (n, p, q) = image, box
    step, first = n * p * q, 0
    for n0, p0, q0 in product(range(0, N, n), range(0, P, p), range(0, Q, q)):
        inside = product(range(n0, n0 + n), range(p0, p0 + p), range(q0, q0 + q))
        if [(a * P + b) * Q + c for a, b, c in inside] != [*range(first, first + step)]:
            return False
        first += step
    return True


@pytest.mark.parametrize(
    ("image", "pixels", "sizes", "per_step", "steps"),
    [
        ((32, 32, 32), 64, (1, 2, 32), 1, 512),  # two rows beside each other
        ((32, 8, 8), 64, (1, 8, 8), 1, 32),  # a whole image
        ((32, 4, 8), 64, (2, 4, 8), 1, 16),  # two of them
        ((32, 28, 28), 64, (1, 1, 32), 2, 392),  # samples: 28 rows of 28, two a step
        ((8, 28, 28), 64, (1, 1, 32), 2, 112),  # rows of 28, padded to 32
        (
            (32, 56, 56),
            64,
            (1, 1, 64),
            1,
            1792,
        ),  # rows of 56: 12 % more than samples by twos
        ((64, 14, 14), 64, (1, 1, 64), 1, 196),  # samples
    ],
)
def test_runs_of_common_images(
    image: Image, pixels: int, sizes: Image, per_step: int, steps: int
) -> None:
    run = tiles.pixel_runs(image, pixels, True, 2)
    assert (run.sizes, run.per_step, run.steps) == (sizes, per_step, steps)


@given(windows, st.integers(1, 30))
def test_every_tap_that_meets_an_input_row_belongs_to_its_phase(
    window: Window, size: int
) -> None:
    """(r, p) with p stride + r dilation - pad = h: once each, in the phase of h, and no
    other pair.
    """
    outputs = window.out_size(size)
    by_definition = sorted(
        (p * window.stride + r * window.dilation - window.pad_lo, r, p)
        for p, r in product(range(outputs), range(window.kernel))
        if 0 <= p * window.stride + r * window.dilation - window.pad_lo < size
    )
    by_phases = []
    for a in range(min(window.stride, size)):
        taps = dgrad.taps_of_phase(window, a)
        for i, t in product(range(-(-(size - a) // window.stride)), range(taps.count)):
            r, p = (
                taps.first + t * taps.step,
                i * taps.stride + taps.offset + t * taps.dilation,
            )
            if 0 <= p < outputs:
                by_phases.append((a + i * window.stride, r, p))
    assert sorted(by_phases) == by_definition


@given(windows, windows, st.integers(1, 12), st.integers(1, 12), st.booleans())
def test_phases_cover_the_input_once(
    rows: Window, cols: Window, H: int, W: int, last: bool
) -> None:
    padding = (rows.pad_lo, rows.pad_hi), (cols.pad_lo, cols.pad_hi)
    strides, dilation = (rows.stride, cols.stride), (rows.dilation, cols.dilation)
    spec = ConvSpec(
        1, 4, (H, W), 4, (rows.kernel, cols.kernel), strides, padding, dilation
    )
    shapes = (spec.y_shape, spec.w_shape, spec.x_shape)
    g, w, dx = (StridedLayout.packed(shape, "float32") for shape in shapes)
    count = [[0] * W for _ in range(H)]
    for phase in dgrad.phases(spec, g, w, dx, "ieee"):
        _, _, over_rows, over_cols = phase.slices
        for h, v in product(range(H)[over_rows], range(W)[over_cols]):
            count[h][v] += 1
        if phase.gemm is not None:
            assert prod(phase.gemm.y.shape) == 4 * len(range(H)[over_rows]) * len(
                range(W)[over_cols]
            )
    assert {n for row in count for n in row} == {1}
