"""How a kernel cuts its work: the tile, the tiles that fit a problem and a chip, and
the default among them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod
from typing import Literal, NamedTuple

import torch

from hetconv.errors import KernelError
from hetconv.sharding.conv_spec import ITEMSIZE, Conv2dSpec

from .launch import Chip

Path = Literal["boxes", "pointers"]
Image = tuple[int, int, int]  # samples, rows, columns
Pass = Literal["forward", "input gradient", "weight gradient"]


@dataclass(frozen=True)
class Tile:
    """One program's share of the matrix product that a convolution is, and how it is run.

    ================  =====================  ============================
    ========================== pass              ``m`` counts           ``n`` counts
    ``k``: reduced in one step ================  =====================
    ============================  ========================== forward           filters
    output pixels                 input channels of one tap input gradient    input
    channels         input pixels of one phase     filters of one tap weight gradient
    filters                input channels of one tap     output pixels ================
    =====================  ============================  ==========================

    ``path``: "boxes" needs Hopper's copy engine, "pointers" runs anywhere. ``splits``
    programs share a reduction.
    """

    path: Path
    m: int
    n: int
    k: int
    warps: int
    stages: int
    splits: int = 1

    def __str__(self) -> str:
        return f"{self.path}:{self.m}x{self.n}x{self.k}:{self.warps}w{self.stages}s{self.splits}z"

    @staticmethod
    def parse(text: str) -> Tile:
        """The tile that prints so, as in ``boxes:128x128x64:8w4s1z``."""
        found = re.fullmatch(
            r"(boxes|pointers):(\d+)x(\d+)x(\d+):(\d+)w(\d+)s(\d+)z", text
        )
        if found is None:
            raise KernelError(
                f"tile {text!r} is not understood; write it as boxes:128x128x64:8w4s1z"
            )
        path, *numbers = found.groups()
        return Tile(path, *map(int, numbers))  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        powers = all(
            16 <= v <= 256 and v & (v - 1) == 0 for v in (self.m, self.n, self.k)
        )
        if (
            not powers
            or self.warps not in (1, 2, 4, 8, 16)
            or self.stages < 1
            or self.splits < 1
        ):
            raise KernelError(
                f"tile {self} cannot be run: m, n and k must be powers of two from 16 to 256, "
                "warps 1, 2, 4, 8 or 16, stages and splits at least 1"
            )


@dataclass(frozen=True)
class Extents:
    """A pass as a matrix product of ``m`` by ``n`` results, as `Tile` counts them,
    ``repeats`` of which are computed.

    Each sums ``taps`` times over ``open_channels``, or over the pixels of ``image``
    (samples, rows, columns) where ``over_pixels``; ``n`` else counts these. ``boxes``:
    whether Hopper's copy engine can fetch the operands, and ``whole`` whether its steps
    must then divide the channels. ``numbers``: channels are an image's numbers, whose
    many masks take registers. ``ieee``: float32 is multiplied as it is, without tensor
    cores.
    """

    m: int
    n: int
    channels: int
    taps: int
    repeats: int
    dtype: str
    image: Image
    boxes: bool = False
    whole: bool = False
    over_pixels: bool = False
    numbers: bool = False
    ieee: bool = False

    def padded(self, tile: Tile) -> int:
        """Results computed, counting those that a tile computes beyond the edge."""
        return self.tiles(tile) * tile.m * tile.n

    def tiles(self, tile: Tile) -> int:
        n = _up(self.n, tile.n)
        if tile.path == "boxes" and not self.over_pixels:
            n = pixel_box(self.image, tile.n).copies
        return _up(self.m, tile.m) * n * self.repeats

    def steps(self, tile: Tile) -> int:
        return self.steps_of(tile.path, tile.k)

    def steps_of(self, path: Path, k: int) -> int:
        """Steps of ``k`` numbers that a reduction takes."""
        if not self.over_pixels:
            return _up(self.channels, k) * self.taps
        return pixel_line(self.image, k).copies


# (m, n, warps, stages), larger first: those that compile without a spill for every dtype.
SHAPES: Mapping[Path, tuple[tuple[int, int, int, int], ...]] = {
    "boxes": (
        (128, 256, 8, 3),
        (256, 128, 8, 3),
        (128, 128, 8, 4),
        (64, 256, 8, 3),
        (64, 128, 4, 4),
        (128, 64, 4, 4),
        (64, 64, 4, 4),
    ),
    "pointers": (
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
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
FEWEST_STEPS = 4  # of a reduction that is split
LONGEST = 256  # side of a box that the copy engine fetches

# To rank tiles by, from data sheets: nothing here was measured. In cycles, per multiprocessor.
MACS = {
    80: 1024,
    86: 512,
    89: 512,
    90: 2048,
}  # multiplications in 16 bits; others like the next older chip
CACHE_BYTES = 40  # from the level-2 cache
STEP, FILL, LAUNCH = (
    150,
    2000,
    3000,
)  # waiting in a step, filling and draining a pipeline, one more kernel


def space(work: Extents, chip: Chip) -> Iterator[Tile]:
    """Every tile worth a try for a pass on a chip, without splits: those whose operands
    fit in shared memory.
    """
    for path in ("boxes", "pointers") if takes_boxes(work, chip) else ("pointers",):
        for (m, n, warps, stages), k in product(shapes(work, path), depths(work, path)):
            tiles = [
                Tile(path, m, n, k, warps, s)
                for s in sorted({stages, max(stages - 1, 2)})
            ]
            yield from (t for t in tiles if fits(t, work, chip))


@lru_cache(4096)
def default(work: Extents, chip: Chip) -> Tile:
    """The tile, and the splits of its reduction, of the fewest `cycles`."""
    path: Path = "boxes" if takes_boxes(work, chip) else "pointers"
    found = [
        Tile(path, m, n, k, w, s)
        for (m, n, w, s), k in product(shapes(work, path), depths(work, path))
    ]
    whole = [t for tile in found if (t := _shrunk(tile, work, chip)) is not None]
    found = [replace(t, splits=z) for t in whole for z in splits(t, work)]
    return min(found, key=lambda t: cycles(t, work, chip))


def cycles(tile: Tile, work: Extents, chip: Chip) -> float:
    """A rough count that ranks tiles: products or fetches, whichever takes longer, in
    waves of one tile for each SM.
    """
    item, results = ITEMSIZE[work.dtype], work.m * work.n * work.repeats
    macs = MACS[max(a for a in MACS if a <= max(chip.arch, 80))] * 2 / item
    step = (
        max(
            tile.m * tile.n * tile.k / macs,
            (tile.m + tile.n) * tile.k * item / CACHE_BYTES,
        )
        + STEP
    )
    each = _up(work.steps(tile), tile.splits) * step + FILL
    total = _up(work.tiles(tile) * tile.splits, chip.sms) * each
    if tile.splits == 1:
        return total
    moved = (2 * 4 * tile.splits + item) * results
    return total + moved / (CACHE_BYTES * chip.sms) + LAUNCH


def takes_boxes(work: Extents, chip: Chip) -> bool:
    """Whether the copy engine is there and pays: a left operand has 64 rows at least,
    so few results would waste it.
    """
    return work.boxes and chip.arch >= 90 and work.m > 32


def fits(tile: Tile, work: Extents, chip: Chip) -> bool:
    """Whether the pipeline's operands leave room in shared memory for barriers."""
    return (
        tile.stages * (tile.m + tile.n) * tile.k * ITEMSIZE[work.dtype] + 1024
        <= chip.shared
    )


def shapes(work: Extents, path: Path) -> list[tuple[int, int, int, int]]:
    """The `SHAPES` for a pass, but for those that spill registers without tensor cores."""
    spilling = [
        s
        for s in SHAPES[path]
        if s[:2] == (16, 128) or (work.numbers and s[0] * s[1] > 64 * 64)
    ]
    return [s for s in SHAPES[path] if not (work.ieee and s in spilling)]


def depths(work: Extents, path: Path) -> list[int]:
    """Steps of a reduction, deepest first: 128 bytes, and less where that pads the
    channels of a tap less.
    """
    found = [
        k
        for k in (64, 32, 16)
        if k * ITEMSIZE[work.dtype] <= 128 and not (work.numbers and k > 32)
    ]
    if path == "boxes" and work.whole:
        found = [k for k in found if work.channels % k == 0]
    lengths = {k: work.steps_of(path, k) * k for k in found}
    return [
        k
        for i, k in enumerate(found)
        if all(lengths[k] < lengths[j] for j in found[:i])
    ]


def splits(tile: Tile, work: Extents) -> list[int]:
    """Splits of a reduction that are worth a try: those that leave every program some steps."""
    steps = work.steps(tile)
    return [
        z
        for z in SPLITS
        if z == 1 or (z * FEWEST_STEPS <= steps and (z - 1) * _up(steps, z) < steps)
    ]


def _shrunk(tile: Tile, work: Extents, chip: Chip) -> Tile | None:
    """The tile with as many of its stages, two at least, as fit."""
    stages = [
        s
        for s in range(tile.stages, 1, -1)
        if fits(replace(tile, stages=s), work, chip)
    ]
    return replace(tile, stages=stages[0]) if stages else None


class Box(NamedTuple):
    """A box of pixels: how many of each dimension, in an ``order`` of samples (0), rows
    (1) and columns (2).
    """

    sizes: Image
    copies: int  # that cover the image
    order: Image = (0, 1, 2)


@lru_cache(4096)
def pixel_box(image: Image, pixels: int) -> Box:
    """The box of ``pixels``, powers of two, that covers an image in the fewest copies;
    of several the squarest.

    A square's taps overlap most.
    """
    found = []
    for i, j in product(range(pixels.bit_length()), repeat=2):
        p, q = 1 << i, 1 << j
        if p * q <= pixels and max(p, q, pixels // (p * q)) <= LONGEST:
            sizes = (pixels // (p * q), p, q)
            copies = prod(_up(a, b) for a, b in zip(image, sizes, strict=True))
            found.append((copies, abs(i - j), -j, sizes))
    copies, _, _, sizes = min(found)
    return Box(sizes, copies)


@lru_cache(4096)
def pixel_line(image: Image, pixels: int) -> Box:
    """The run of ``pixels`` along one dimension, ordered last, that covers an image in
    the fewest copies.

    A weight gradient reduces over runs alone: as the left operand of Hopper's tensor
    cores a box of several dimensions would go through registers, and results would
    differ from call to call (Triton 3.6 to 3.9).
    """
    orders = ((0, 1, 2), (0, 2, 1), (1, 2, 0))
    copies = [prod(image) // image[o[2]] * _up(image[o[2]], pixels) for o in orders]
    return min(
        (Box((1, 1, pixels), c, o) for c, o in zip(copies, orders, strict=True)),
        key=lambda b: b.copies,
    )


def _up(a: int, b: int) -> int:
    return -(-a // b)


Entry = Tile | Literal["aten"]
Problem = tuple[Pass, Conv2dSpec, str]  # the last: "ieee" or "tf32"
_installed: dict[tuple[str, str, str], dict[Problem, Entry]] = {}


def install(
    entries: Mapping[Problem, Entry],
    device: str,
    versions: tuple[str, str] | None = None,
) -> None:
    """From now on these tiles, or ATen, compute these problems on devices of this name.

    ``versions`` of (torch, triton) that they were measured with, by default those in
    use: others ignore them.
    """
    _installed.setdefault((device, *(versions or versions_in_use())), {}).update(
        entries
    )


def any_tuned() -> bool:
    """Whether anything was installed, for whatever device."""
    return bool(_installed)


def tuned(device: str, what: Pass, spec: Conv2dSpec, precision: str) -> Entry | None:
    """What was installed for a problem on this device under the versions in use."""
    return (
        _installed.get((device, *versions_in_use()), {}).get((what, spec, precision))
        if _installed
        else None
    )


@lru_cache
def versions_in_use() -> tuple[str, str]:
    """Of torch and triton. Raises `ImportError` without triton."""
    import triton

    return str(torch.__version__), triton.__version__
