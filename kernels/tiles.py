"""How a kernel cuts its work: the tile, the tiles that fit a problem and a chip, and the default among them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod
from typing import Literal

import torch

from ..errors import KernelError
from ..spec import ITEMSIZE, Conv2dSpec
from .launch import Chip

Path = Literal["boxes", "pointers"]
Pass = Literal["forward", "input gradient", "weight gradient"]


@dataclass(frozen=True)
class Tile:
    """One program's share of the matrix product that a convolution is, and how it is run.

    ================  =====================  ============================  ==========================
    pass              ``m`` counts           ``n`` counts                  ``k``: reduced in one step
    ================  =====================  ============================  ==========================
    forward           filters                output pixels                 input channels of one tap
    input gradient    input channels         input pixels of one phase     filters of one tap
    weight gradient   filters                input channels of one tap     output pixels
    ================  =====================  ============================  ==========================

    ``path``: "boxes" needs Hopper's copy engine, "pointers" runs anywhere. ``splits`` programs share a reduction.
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
        found = re.fullmatch(r"(boxes|pointers):(\d+)x(\d+)x(\d+):(\d+)w(\d+)s(\d+)z", text)
        if found is None:
            raise KernelError(f"tile {text!r} is not understood; write it as boxes:128x128x64:8w4s1z")
        path, *numbers = found.groups()
        return Tile(path, *map(int, numbers))  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        powers = all(v >= 16 and v & (v - 1) == 0 for v in (self.m, self.n, self.k))
        if not powers or self.warps not in (1, 2, 4, 8, 16) or self.stages < 1 or self.splits < 1:
            raise KernelError(
                f"tile {self} cannot be run: m, n and k must be powers of two of at least 16, "
                "warps 1, 2, 4, 8 or 16, stages and splits at least 1"
            )


@dataclass(frozen=True)
class Extents:
    """A pass as a matrix product: rows, columns and length of the reduction, and into how many the two are cut apart.

    ``channels`` is what a step of the reduction must not cross: the channels of one tap, or all pixels.
    ``repeats`` counts products of this size: taps of a weight gradient, times groups. ``boxes``: whether Hopper's copy
    engine can fetch the operands, with ``image`` the samples, rows and columns that ``n`` counts, and ``whole`` whether
    its steps must then divide the channels.
    """

    m: int
    n: int
    channels: int
    taps: int
    repeats: int
    dtype: str
    boxes: bool = False
    image: tuple[int, int, int] | None = None
    whole: bool = False

    def padded(self, tile: Tile) -> int:
        """Results computed, counting those that a tile computes beyond the edge."""
        return self.tiles(tile) * tile.m * tile.n

    def tiles(self, tile: Tile) -> int:
        n = _up(self.n, tile.n)
        if tile.path == "boxes" and self.image is not None:
            n = prod(_up(a, b) for a, b in zip(self.image, pixel_box(self.image, tile.n), strict=True))
        return _up(self.m, tile.m) * n * self.repeats

    def steps(self, tile: Tile) -> int:
        return _up(self.channels, tile.k) * self.taps


# (m, n, warps, stages), larger first: those that compile without a spill for every dtype that uses tensor cores.
SHAPES: Mapping[Path, tuple[tuple[int, int, int, int], ...]] = {
    "boxes": (
        (128, 256, 8, 3), (256, 128, 8, 3), (128, 128, 8, 4),
        (64, 256, 8, 3), (64, 128, 4, 4), (128, 64, 4, 4), (64, 64, 4, 4),
    ),
    "pointers": (
        (128, 128, 8, 3), (64, 128, 4, 4), (128, 64, 4, 4),
        (64, 64, 4, 4), (32, 128, 4, 4), (32, 64, 4, 4), (16, 128, 4, 4),
    ),
}  # fmt: skip
WAVES = 1.5  # tiles per multiprocessor that keep it busy
WASTE = 1.15  # the most that a larger tile may pad beyond the one that pads least
FEWEST_STEPS = 4  # of a reduction that is split
MOST_SPLITS = 256


def space(work: Extents, chip: Chip) -> Iterator[Tile]:
    """Every tile worth a try for a pass on a chip, without splits: those whose operands fit in shared memory."""
    for path in ("boxes", "pointers") if takes_boxes(work, chip) else ("pointers",):
        for (m, n, warps, stages), k in product(SHAPES[path], depths(work, path)):
            tiles = [Tile(path, m, n, k, warps, s) for s in sorted({stages, max(stages - 1, 2)})]
            yield from (t for t in tiles if fits(t, work, chip))


def default(work: Extents, chip: Chip) -> Tile:
    """The largest tile that fits, pads little and keeps the chip busy; else the one with most tiles.

    A reduction over pixels is split for that from the outset, one over channels only where no tile does.
    """
    path: Path = "boxes" if takes_boxes(work, chip) else "pointers"
    k = depths(work, path)[0]
    found = [t for m, n, w, s in SHAPES[path] if (t := _shrunk(Tile(path, m, n, k, w, s), work, chip)) is not None]
    least = min(map(work.padded, found))
    tight = [t for t in found if work.padded(t) <= WASTE * least]
    most = {t: max(min(work.steps(t) // FEWEST_STEPS, MOST_SPLITS), 1) for t in tight}
    busy = [t for t in tight if work.tiles(t) * (most[t] if work.image is None else 1) >= WAVES * chip.sms]
    tile = busy[0] if busy else max(tight, key=lambda t: (work.tiles(t) * most[t], t.m * t.n))
    return replace(tile, splits=max(min(int(WAVES * chip.sms) // work.tiles(tile), most[tile]), 1))


def takes_boxes(work: Extents, chip: Chip) -> bool:
    """Whether the copy engine is there and pays: a left operand has 64 rows at least, so few results would waste it."""
    return work.boxes and chip.arch >= 90 and work.m > 32


def fits(tile: Tile, work: Extents, chip: Chip) -> bool:
    """Whether the pipeline's operands leave room in shared memory for barriers."""
    return tile.stages * (tile.m + tile.n) * tile.k * ITEMSIZE[work.dtype] + 1024 <= chip.shared


def depths(work: Extents, path: Path) -> list[int]:
    """Steps of a reduction, deepest first: 128 bytes, or less where that pads the channels of a tap by much."""
    found = [k for k in (64, 32, 16) if k * ITEMSIZE[work.dtype] <= 128]
    if path == "boxes" and work.whole:
        found = [k for k in found if work.channels % k == 0]
    least = min(_up(work.channels, k) * k for k in found)
    return [k for k in found if _up(work.channels, k) * k <= WASTE * least]


def _shrunk(tile: Tile, work: Extents, chip: Chip) -> Tile | None:
    """The tile with as many of its stages, two at least, as fit."""
    stages = [s for s in range(tile.stages, 1, -1) if fits(replace(tile, stages=s), work, chip)]
    return replace(tile, stages=stages[0]) if stages else None


def pixel_box(shape: tuple[int, int, int], pixels: int) -> tuple[int, int, int]:
    """The box of ``pixels`` (samples, rows, columns), powers of two, that covers a shape in the fewest copies.

    Of several the squarest, whose taps overlap most.
    """
    found = []
    for i, j in product(range(pixels.bit_length()), repeat=2):
        p, q = 1 << i, 1 << j
        if p * q <= pixels and max(p, q, pixels // (p * q)) <= 256:
            box = (pixels // (p * q), p, q)
            copies = prod(_up(a, b) for a, b in zip(shape, box, strict=True))
            found.append((copies, abs(i - j), -j, box))
    return min(found)[3]


def _up(a: int, b: int) -> int:
    return -(-a // b)


Entry = Tile | Literal["aten"]
Problem = tuple[Pass, Conv2dSpec, str]  # the last: "ieee" or "tf32"
_installed: dict[tuple[str, str, str], dict[Problem, Entry]] = {}


def install(entries: Mapping[Problem, Entry], device: str, versions: tuple[str, str] | None = None) -> None:
    """From now on these tiles, or ATen, compute these problems on devices of this name.

    ``versions`` of (torch, triton) that they were measured with, by default those in use: others ignore them.
    """
    _installed.setdefault((device, *(versions or _versions())), {}).update(entries)


def tuned(device: str, what: Pass, spec: Conv2dSpec, precision: str) -> Entry | None:
    """What was installed for a problem on this device under the versions in use."""
    return _installed.get((device, *_versions()), {}).get((what, spec, precision)) if _installed else None


@lru_cache
def _versions() -> tuple[str, str]:
    import triton

    return str(torch.__version__), triton.__version__
