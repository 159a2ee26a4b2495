"""The matrix product that one pass of a convolution is, and how tiles cover it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from hetconv.sharding.conv_spec import ITEMSIZE

from .pixel_boxes import Image, PixelRuns, pixel_box, pixel_runs
from .tile import Tile, TileKind

MAX_RUNS_PER_STEP = 2  # of a weight gradient by TMA


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
        joins_rows: Whether a reduction over pixels by TMA may go on from row to row: all
            pixels of the result's gradient lie at one stride.
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
    joins_rows: bool = False

    @property
    def results(self) -> int:
        """Numbers of the result."""
        return self.m * self.n * self.repeats

    @property
    def operand_bytes(self) -> int:
        """Bytes of the images that are read, each once."""
        per_pixel = self.m + self.n if self.reduces_pixels else self.channels
        return per_pixel * prod(self.image) * ITEMSIZE[self.dtype]

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
        return self.steps_of(tile.k, tile.kind)

    def steps_of(self, k: int, kind: TileKind) -> int:
        """Returns the number of steps of a reduction, ``k`` numbers each."""
        if not self.reduces_pixels:
            return _up(self.channels, k) * self.taps
        return self.runs_of(k, kind).steps

    def runs_of(self, k: int, kind: TileKind) -> PixelRuns:
        """Returns the pixels that a weight gradient reduces in a step of ``k``."""
        if kind == "pointer":
            return pixel_runs(self.image, k)
        return pixel_runs(self.image, k, self.joins_rows, MAX_RUNS_PER_STEP)


def _up(a: int, b: int) -> int:
    return -(-a // b)
