"""Tiles that are worth a try for a matrix product on a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, product

from hetconv.kernels.chip import Chip
from hetconv.sharding.conv_spec import ITEMSIZE

from .gemm_shape import GemmShape
from .tile import Tile, TileKind

TileShape = tuple[int, int, int, int]  # m, n, warps, most stages

# Larger first: those that compile without a spill for every dtype. TMA may take more
# stages, as no registers hold what is loaded.
TILE_SHAPES: Mapping[TileKind, tuple[TileShape, ...]] = {
    "tma": (
        (128, 256, 8, 8),
        (256, 128, 8, 8),
        (128, 128, 8, 8),
        (128, 128, 4, 8),
        (64, 256, 8, 8),
        (64, 256, 4, 8),
        (64, 128, 4, 8),
        (128, 64, 4, 8),
        (64, 64, 4, 8),
    ),
    "pointer": (
        (128, 128, 8, 3),
        (64, 128, 4, 4),
        (128, 64, 4, 4),
        (64, 64, 4, 4),
        (64, 32, 4, 4),
        (32, 128, 4, 4),
        (32, 64, 4, 4),
        (16, 128, 4, 4),
    ),
}
# Sums of two powers of two: for slices that others would pad.
COMPOSITE_SHAPES: Mapping[TileKind, tuple[TileShape, ...]] = {
    "tma": (
        (320, 128, 8, 8),
        (320, 64, 8, 8),
        (192, 128, 8, 8),
        (160, 128, 8, 8),
        (96, 128, 4, 8),
    ),
    "pointer": ((96, 64, 4, 4), (48, 64, 4, 4)),
}
MAX_FLOAT32_COMPOSITE = 256 * 128  # results of a composite tile in tf32
MIN_STAGES = 2
MIN_STEPS_PER_SPLIT = 4
MAX_SPLIT_K = 256
BARRIER_BYTES = 1024  # of shared memory, beside the operands
COMPOSITE_BYTES = (
    4096  # that a second accumulator may take beside its operands, as compiled
)
STEP_BYTES = 128  # of a step of a reduction, along the reduced dimension


def search_space(shape: GemmShape, chip: Chip) -> Iterator[Tile]:
    """Yields every tile worth a try, without split-k, whose operands fit in shared memory."""
    kinds: tuple[TileKind, ...] = (
        ("tma", "pointer") if uses_tma(shape, chip) else ("pointer",)
    )
    for kind in kinds:
        yield from tiles_of_kind(shape, chip, kind)


def tiles_of_kind(shape: GemmShape, chip: Chip, kind: TileKind) -> Iterator[Tile]:
    """Yields those tiles of the search space that read their operands in one way."""
    shapes = tile_shapes(shape, kind) + composite_shapes(shape, kind)
    for (m, n, warps, stages), k in product(shapes, tile_depths(shape, kind)):
        least = MIN_STAGES if kind == "tma" else max(stages - 1, MIN_STAGES)
        for s in range(least, stages + 1):
            tile = Tile(kind, m, n, k, warps, s)
            if fits(tile, shape, chip):
                yield tile


def largest_stages(
    shape: GemmShape,
    chip: Chip,
    kind: TileKind,
    depths: Iterable[int],
    shapes: Sequence[TileShape] | None = None,
) -> Iterator[Tile]:
    """Yields tiles, each with as many stages, two at least, as fit.

    Args:
        shape: The matrix product.
        chip: The GPU.
        kind: How operands are read.
        depths: Depths of a step.
        shapes: Sides and warps; those of `tile_shapes` by default.
    """
    sides = tile_shapes(shape, kind) if shapes is None else shapes
    for (m, n, warps, stages), k in product(sides, depths):
        counts = range(stages, MIN_STAGES - 1, -1)
        tiles = (Tile(kind, m, n, k, warps, s) for s in counts)
        yield from islice((t for t in tiles if fits(t, shape, chip)), 1)


def uses_tma(shape: GemmShape, chip: Chip) -> bool:
    """Returns whether TMA can be used and pays: a left operand has 64 rows at least."""
    return shape.supports_tma and chip.arch >= 90 and shape.m > 32


def fits(tile: Tile, shape: GemmShape, chip: Chip) -> bool:
    """Returns whether the pipeline's operands and barriers fit in shared memory."""
    return shared_bytes(tile, shape) <= chip.shared


def shared_bytes(tile: Tile, shape: GemmShape) -> int:
    """Returns the shared memory of a program, in bytes."""
    operands = tile.stages * (tile.m + tile.n) * tile.k * ITEMSIZE[shape.dtype]
    is_composite = tile.row_blocks[1] > 0
    return operands + BARRIER_BYTES + (COMPOSITE_BYTES if is_composite else 0)


def tile_shapes(shape: GemmShape, kind: TileKind) -> list[TileShape]:
    """Returns those of `TILE_SHAPES` that spill no registers."""

    def spills(m: int, n: int) -> bool:
        return (m, n) == (16, 128) or (shape.packed and m * n > 64 * 64)

    return [s for s in TILE_SHAPES[kind] if not (shape.ieee and spills(*s[:2]))]


def composite_shapes(shape: GemmShape, kind: TileKind) -> list[TileShape]:
    """Returns those of `COMPOSITE_SHAPES` that pad no more rows, and spill no registers."""

    def padded(m: int) -> int:
        return -(-shape.m // m) * m

    def spills(m: int, n: int) -> bool:
        return shape.dtype == "float32" and m * n > MAX_FLOAT32_COMPOSITE

    if shape.ieee:
        return []
    fewest = min(padded(m) for m, *_ in tile_shapes(shape, kind))
    found = (s for s in COMPOSITE_SHAPES[kind] if padded(s[0]) <= fewest)
    return [s for s in found if not spills(*s[:2])]


def tile_depths(shape: GemmShape, kind: TileKind) -> list[int]:
    """Returns depths of a step, deepest first.

    They are one of `STEP_BYTES`, shallower ones where they pad less, and by TMA twice the
    deepest where it pads no more.
    """
    deepest = min(STEP_BYTES // ITEMSIZE[shape.dtype], 32 if shape.packed else 64)
    depths: list[int] = []
    for k in (64, 32, 16):
        padded = _padded_depth(shape, k, kind)
        pads_less = all(padded < _padded_depth(shape, j, kind) for j in depths)
        if k <= deepest and _divides(shape, k, kind) and pads_less:
            depths.append(k)
    twice = 2 * depths[0]
    if kind == "tma" and _divides(shape, twice, kind):
        padded = _padded_depth(shape, twice, kind)
        if padded <= _padded_depth(shape, depths[0], kind):
            depths.insert(0, twice)
    return depths


def _divides(shape: GemmShape, k: int, kind: TileKind) -> bool:
    must_divide = kind == "tma" and shape.k_divides_channels
    return not must_divide or shape.channels % k == 0


def _padded_depth(shape: GemmShape, k: int, kind: TileKind) -> int:
    return shape.steps_of(k, kind) * k


def split_k_candidates(tile: Tile, shape: GemmShape, programs: int) -> list[int]:
    """Returns factors of split-k that leave every program some steps.

    Args:
        tile: The tile, whose own factor does not count.
        shape: The matrix product.
        programs: Programs that run at once on the GPU. Factors that fill them once,
            twice and so on are among those returned.
    """
    steps, tiles = shape.steps(tile), shape.tiles(tile)
    filling = {waves * programs // tiles for waves in (1, 2, 3, 4)}
    factors = {*range(1, 9), 12, 16, 24, 32, 48, 64, 96, 128, MAX_SPLIT_K} | filling
    return sorted(z for z in factors if z == 1 or _splits(steps, z))


def _splits(steps: int, z: int) -> bool:
    each = -(-steps // z) if z else 0
    return (
        1 < z <= MAX_SPLIT_K and each >= MIN_STEPS_PER_SPLIT and (z - 1) * each < steps
    )
