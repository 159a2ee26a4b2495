"""Boxes of pixels: how a tile's pixels lie in an image."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from .tile import MIN_SIDE

Image = tuple[int, int, int]  # samples, rows, columns

MAX_BOX_SIDE = 256  # pixels, of a box that the copy engine reads
MORE_RUNS = 0.15  # of a step's time, that a second run costs which waits for the first


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


class PixelRuns(NamedTuple):
    """Pixels that one step of a weight gradient reduces.

    They are boxes that are runs in the memory of the result's gradient. As the left
    operand of Hopper's tensor cores any other box would go through registers, and
    results would differ from call to call (Triton 3.6 to 3.9).

    Attributes:
        sizes: Pixels of a box along each dimension, in the box's order.
        copies: Boxes that cover the image.
        order: Samples (0), rows (1) and columns (2), in the box's order.
        per_step: Boxes that are multiplied in one step.
        joined: Whether a box is of whole rows, which lie beside each other.
    """

    sizes: Image
    copies: int
    order: Image = (0, 1, 2)
    per_step: int = 1
    joined: bool = False

    @property
    def steps(self) -> int:
        """Steps that reduce all pixels."""
        return _up(self.copies, self.per_step)


@lru_cache(4096)
def pixel_runs(
    image: Image, pixels: int, joins_rows: bool = False, most_per_step: int = 1
) -> PixelRuns:
    """Returns the runs that reduce an image in the least time; of several the simplest.

    Args:
        image: Samples, rows and columns.
        pixels: Pixels of a step, a power of two.
        joins_rows: Whether a run may go on from row to row and from sample to sample.
        most_per_step: Runs that one step may take.
    """
    orders = ((0, 1, 2), (0, 2, 1), (1, 2, 0))
    found = [
        PixelRuns(
            (1, 1, side), prod(image) // image[o[2]] * _up(image[o[2]], side), o, n
        )
        for n in range(1, most_per_step + 1)
        for o in orders
        if (side := pixels // n) * n == pixels and (n == 1 or side >= MIN_SIDE)
    ]
    if joins_rows and (rows := _joined_rows(image, pixels)) is not None:
        found.append(PixelRuns(rows, prod(image) // pixels, joined=True))
    return min(
        found, key=lambda r: (r.steps * (1 + MORE_RUNS * (r.per_step - 1)), r.joined)
    )


def _joined_rows(image: Image, pixels: int) -> Image | None:
    """Whole rows, or whole samples, of that many pixels; None where they do not fit."""
    samples, rows, columns = image
    if pixels % columns or pixels == columns:
        return None
    height = pixels // columns
    if rows % height == 0:
        return (1, height, columns)
    if height % rows == 0 and samples % (height // rows) == 0:
        return (height // rows, rows, columns)
    return None


def _up(a: int, b: int) -> int:
    return -(-a // b)
