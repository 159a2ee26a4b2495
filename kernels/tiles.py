"""Tiles of the implicit GEMM kernels: search space, cost model, default and tuned tiles."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, product
from math import prod
from typing import Literal, NamedTuple

import torch

from hetconv.errors import KernelError
from hetconv.sharding.conv_spec import ITEMSIZE, ConvSpec

from .launch import Chip
from .launchers.decisions import forget_decisions

TileKind = Literal["tma", "pointer"]
Image = tuple[int, int, int]  # samples, rows, columns
Pass = Literal["forward", "input gradient", "weight gradient"]


@dataclass(frozen=True)
class Tile:
    """Share of one program in the matrix product that a convolution is, and its launch.

    ===============  ==============  =============  ===============================
    pass             ``m`` counts    ``n`` counts   ``k``, reduced in one step
    ===============  ==============  =============  ===============================
    forward          filters         output pixels  input channels of one tap
    input gradient   input channels  input pixels   filters of one tap
    weight gradient  filters         channels       output pixels
    ===============  ==============  =============  ===============================

    An input gradient's pixels are those of one phase of the stride, a weight gradient's
    channels those of one tap. A tile prints as ``kind:MxNxK:WwSsZz``, for instance
    ``tma:128x128x64:8w4s1z``.

    Attributes:
        kind: "tma" reads operands by Hopper's copy engine, "pointer" runs anywhere.
        m: Rows of results.
        n: Columns of results.
        k: Depth of one step of the reduction.
        warps: Warps per program.
        stages: Stages of software pipelining.
        split_k: Programs that share one reduction.

    Raises:
        KernelError: The numbers cannot be run.
    """

    kind: TileKind
    m: int
    n: int
    k: int
    warps: int
    stages: int
    split_k: int = 1

    def __str__(self) -> str:
        size = f"{self.m}x{self.n}x{self.k}"
        return f"{self.kind}:{size}:{self.warps}w{self.stages}s{self.split_k}z"

    @staticmethod
    def parse(text: str) -> Tile:
        """Returns the tile that prints as ``text``.

        Raises:
            KernelError: No tile prints so.
        """
        pattern = r"(tma|pointer):(\d+)x(\d+)x(\d+):(\d+)w(\d+)s(\d+)z"
        found = re.fullmatch(pattern, text)
        if found is None:
            raise KernelError(
                f"tile {text!r} is not understood; write it as tma:128x128x64:8w4s1z"
            )
        kind, *numbers = found.groups()
        return Tile(kind, *map(int, numbers))  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        sides = (self.m, self.n, self.k)
        are_powers_of_2 = all(16 <= v <= 256 and v & (v - 1) == 0 for v in sides)
        is_launched = (
            self.warps in (1, 2, 4, 8, 16) and min(self.stages, self.split_k) > 0
        )
        if not are_powers_of_2 or not is_launched:
            raise KernelError(
                f"tile {self} cannot be run: m, n and k must be powers of two from 16 to 256, "
                "warps 1, 2, 4, 8 or 16, stages and split-k at least 1"
            )


@dataclass(frozen=True)
class GemmShape:
    """Matrix product that one pass of a convolution is.

    Attributes:
        m: Rows of the result, as `Tile` counts them.
        n: Columns of the result; pixels, unless the reduction is over pixels.
        channels: Numbers that are reduced for each tap.
        taps: Taps that are reduced.
        repeats: Number of such products: groups, and taps of a weight gradient.
        dtype: PyTorch's name of the operands' data type.
        image: Samples, rows and columns of the pixels.
        supports_tma: Whether Hopper's copy engine can read the operands.
        k_divides_channels: Whether steps by TMA must divide the channels.
        reduces_pixels: Whether the reduction is over pixels, as in a weight gradient.
        packed: Whether channels are numbers of several pixels, whose many masks take
            registers.
        ieee: Whether float32 is multiplied exactly, without tensor cores.
    """

    m: int
    n: int
    channels: int
    taps: int
    repeats: int
    dtype: str
    image: Image
    supports_tma: bool = False
    k_divides_channels: bool = False
    reduces_pixels: bool = False
    packed: bool = False
    ieee: bool = False

    def padded_results(self, tile: Tile) -> int:
        """Returns the results that are computed, those beyond the edge included."""
        return self.tiles(tile) * tile.m * tile.n

    def tiles(self, tile: Tile) -> int:
        """Returns the number of tiles of results."""
        columns = _up(self.n, tile.n)
        if tile.kind == "tma" and not self.reduces_pixels:
            columns = pixel_box(self.image, tile.n).copies
        return _up(self.m, tile.m) * columns * self.repeats

    def steps(self, tile: Tile) -> int:
        """Returns the number of steps of a reduction by a tile."""
        return self.steps_of(tile.k)

    def steps_of(self, k: int) -> int:
        """Returns the number of steps of a reduction, ``k`` numbers each."""
        if not self.reduces_pixels:
            return _up(self.channels, k) * self.taps
        return pixel_line(self.image, k).copies


# (m, n, warps, stages), larger first: those that compile without a spill for every dtype.
TILE_SHAPES: Mapping[TileKind, tuple[tuple[int, int, int, int], ...]] = {
    "tma": (
        (128, 256, 8, 3),
        (256, 128, 8, 3),
        (128, 128, 8, 4),
        (64, 256, 8, 3),
        (64, 128, 4, 4),
        (128, 64, 4, 4),
        (64, 64, 4, 4),
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
SPLIT_K_FACTORS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MIN_STEPS_PER_SPLIT = 4
MAX_BOX_SIDE = 256  # pixels, of a box that the copy engine reads
BARRIER_BYTES = 1024  # of shared memory, beside the operands
STEP_BYTES = 128  # of the deepest step of a reduction

# Cost model, from data sheets: nothing here was measured. Per multiprocessor and cycle:
HALF_MACS_PER_CYCLE = {80: 1024, 86: 512, 89: 512, 90: 2048}  # by compute capability
L2_BYTES_PER_CYCLE = 40
STEP_LATENCY_CYCLES = 150
PIPELINE_FILL_CYCLES = 2000
LAUNCH_CYCLES = 3000


def search_space(shape: GemmShape, chip: Chip) -> Iterator[Tile]:
    """Yields every tile worth a try, without split-k, whose operands fit in shared memory."""
    kinds: tuple[TileKind, ...] = (
        ("tma", "pointer") if uses_tma(shape, chip) else ("pointer",)
    )
    for kind in kinds:
        for (m, n, warps, stages), k in product(
            tile_shapes(shape, kind), tile_depths(shape, kind)
        ):
            for s in sorted({stages, max(stages - 1, 2)}):
                tile = Tile(kind, m, n, k, warps, s)
                if fits(tile, shape, chip):
                    yield tile


@lru_cache(4096)
def default_tile(shape: GemmShape, chip: Chip) -> Tile:
    """Returns the tile, with its split-k, of the fewest estimated cycles."""
    kind: TileKind = "tma" if uses_tma(shape, chip) else "pointer"
    found = [
        replace(tile, split_k=z)
        for tile in largest_stages(shape, chip, kind, tile_depths(shape, kind))
        for z in split_k_candidates(tile, shape)
    ]
    return min(found, key=lambda t: estimated_cycles(t, shape, chip))


def largest_stages(
    shape: GemmShape, chip: Chip, kind: TileKind, depths: Iterable[int]
) -> Iterator[Tile]:
    """Yields tiles of the given depths, each with as many stages, two at least, as fit."""
    for (m, n, warps, stages), k in product(tile_shapes(shape, kind), depths):
        tiles = (Tile(kind, m, n, k, warps, s) for s in range(stages, 1, -1))
        yield from islice((t for t in tiles if fits(t, shape, chip)), 1)


def estimated_cycles(tile: Tile, shape: GemmShape, chip: Chip) -> float:
    """Returns a rough count of cycles that ranks tiles.

    A step takes as long as its products or its loads, whichever is longer; tiles run in
    waves of one for each multiprocessor.
    """
    item, results = ITEMSIZE[shape.dtype], shape.m * shape.n * shape.repeats
    arch = max(a for a in HALF_MACS_PER_CYCLE if a <= max(chip.arch, 80))
    macs_per_cycle = HALF_MACS_PER_CYCLE[arch] * 2 / item
    products = tile.m * tile.n * tile.k / macs_per_cycle
    loads = (tile.m + tile.n) * tile.k * item / L2_BYTES_PER_CYCLE
    step = max(products, loads) + STEP_LATENCY_CYCLES
    program = _up(shape.steps(tile), tile.split_k) * step + PIPELINE_FILL_CYCLES
    total = _up(shape.tiles(tile) * tile.split_k, chip.sms) * program
    if tile.split_k == 1:
        return total
    partial_bytes = (2 * 4 * tile.split_k + item) * results
    return total + partial_bytes / (L2_BYTES_PER_CYCLE * chip.sms) + LAUNCH_CYCLES


def uses_tma(shape: GemmShape, chip: Chip) -> bool:
    """Returns whether TMA can be used and pays: a left operand has 64 rows at least."""
    return shape.supports_tma and chip.arch >= 90 and shape.m > 32


def fits(tile: Tile, shape: GemmShape, chip: Chip) -> bool:
    """Returns whether the pipeline's operands and barriers fit in shared memory."""
    operands = tile.stages * (tile.m + tile.n) * tile.k * ITEMSIZE[shape.dtype]
    return operands + BARRIER_BYTES <= chip.shared


def tile_shapes(shape: GemmShape, kind: TileKind) -> list[tuple[int, int, int, int]]:
    """Returns those of `TILE_SHAPES` that spill no registers."""

    def spills(m: int, n: int) -> bool:
        return (m, n) == (16, 128) or (shape.packed and m * n > 64 * 64)

    return [s for s in TILE_SHAPES[kind] if not (shape.ieee and spills(*s[:2]))]


def tile_depths(shape: GemmShape, kind: TileKind) -> list[int]:
    """Returns depths of a step, deepest first; less deep where channels are padded less."""
    deepest = min(STEP_BYTES // ITEMSIZE[shape.dtype], 32 if shape.packed else 64)
    depths: list[int] = []
    for k in (64, 32, 16):
        if k > deepest:
            continue
        if kind == "tma" and shape.k_divides_channels and shape.channels % k:
            continue
        if all(shape.steps_of(k) * k < shape.steps_of(j) * j for j in depths):
            depths.append(k)
    return depths


def split_k_candidates(tile: Tile, shape: GemmShape) -> list[int]:
    """Returns factors of split-k that leave every program some steps."""
    steps = shape.steps(tile)
    return [
        z
        for z in SPLIT_K_FACTORS
        if z == 1
        or (z * MIN_STEPS_PER_SPLIT <= steps and (z - 1) * _up(steps, z) < steps)
    ]


class Box(NamedTuple):
    """Box of pixels that tiles an image.

    Attributes:
        sizes: Pixels along each dimension, in the box's order.
        copies: Boxes that cover the image.
        order: Samples (0), rows (1) and columns (2), in the box's order.
    """

    sizes: Image
    copies: int
    order: Image = (0, 1, 2)


@lru_cache(4096)
def pixel_box(image: Image, pixels: int) -> Box:
    """Returns the box that covers an image in the fewest copies; of several the squarest.

    A square's taps overlap most.

    Args:
        image: Samples, rows and columns.
        pixels: Pixels of the box, a power of two.
    """
    found = []
    for i, j in product(range(pixels.bit_length()), repeat=2):
        p, q = 1 << i, 1 << j
        if p * q <= pixels and max(p, q, pixels // (p * q)) <= MAX_BOX_SIDE:
            sizes = (pixels // (p * q), p, q)
            copies = prod(_up(a, b) for a, b in zip(image, sizes, strict=True))
            found.append((copies, abs(i - j), -j, sizes))
    copies, _, _, sizes = min(found)
    return Box(sizes, copies)


@lru_cache(4096)
def pixel_line(image: Image, pixels: int) -> Box:
    """Returns the line along one dimension, ordered last, of the fewest copies.

    A weight gradient reduces over lines alone: as the left operand of Hopper's tensor
    cores a box of several dimensions would go through registers, and results would
    differ from call to call (Triton 3.6 to 3.9).

    Args:
        image: Samples, rows and columns.
        pixels: Pixels of the line.
    """
    orders = ((0, 1, 2), (0, 2, 1), (1, 2, 0))
    copies = [prod(image) // image[o[2]] * _up(image[o[2]], pixels) for o in orders]
    lines = zip(copies, orders, strict=True)
    return min((Box((1, 1, pixels), c, o) for c, o in lines), key=lambda b: b.copies)


def _up(a: int, b: int) -> int:
    return -(-a // b)


Entry = Tile | Literal["aten"]
Problem = tuple[Pass, ConvSpec, str]  # the last: "ieee" or "tf32"
_installed: dict[tuple[str, str, str], dict[Problem, Entry]] = {}


def install(
    entries: Mapping[Problem, Entry],
    device: str,
    versions: tuple[str, str] | None = None,
) -> None:
    """Makes these tiles, or ATen, compute these problems on devices of this name.

    Args:
        entries: What computes each problem.
        device: Name of the GPU.
        versions: Of torch and triton that the entries were measured with; under others
            they are ignored. Those in use by default.
    """
    key = (device, *(versions or versions_in_use()))
    _installed.setdefault(key, {}).update(entries)
    forget_decisions()


def any_installed() -> bool:
    """Returns whether anything was installed, for whatever device."""
    return bool(_installed)


def tuned_entry(
    device: str, pass_name: Pass, spec: ConvSpec, precision: str
) -> Entry | None:
    """Returns what was installed for a problem on this device and these versions."""
    if not _installed:
        return None
    entries = _installed.get((device, *versions_in_use()), {})
    return entries.get((pass_name, spec, precision))


@lru_cache
def versions_in_use() -> tuple[str, str]:
    """Returns the versions of torch and triton.

    Raises:
        ImportError: Triton is not installed.
    """
    import triton

    return str(torch.__version__), triton.__version__
