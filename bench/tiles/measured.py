"""Measured tiles as a result file has them, and how far a choice among them is off."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from bench.kernels.cases import cases
from bench.kernels.checks import gemm_shapes
from hetconv.errors import KernelError
from hetconv.kernels.chip import Chip
from hetconv.kernels.tiles import GemmShape, Pass, Tile, pixel_box
from hetconv.kernels.tiles.search_space import MIN_STAGES
from hetconv.kernels.tiles.time_model import Workload, joined, workload


@dataclass(frozen=True)
class MeasuredPass:
    """Tiles of one pass of one convolution, as measured.

    Attributes:
        name: Name of the case.
        what: The pass.
        shapes: Matrix products of the pass; an input gradient has one for each phase of
            the stride.
        tiles: The tiles that gave right results every time.
        seconds: Their times.
        chip: The GPU.
        boxes: Whether a step of a weight gradient took the squarest box of pixels.
    """

    name: str
    what: Pass
    shapes: tuple[GemmShape, ...]
    tiles: tuple[Tile, ...]
    seconds: tuple[float, ...]
    chip: Chip
    boxes: bool

    def workloads(self) -> list[Workload]:
        """Returns the tiles as the time model sees them, for each product of the pass."""
        chip = self.chip
        if not self.boxes or self.what != "weight gradient":
            return [workload(self.tiles, shape, chip) for shape in self.shapes]
        (shape,) = self.shapes
        return [joined([workload([t], _in_boxes(shape, t), chip) for t in self.tiles])]

    def regret(self, predicted: Sequence[float]) -> float:
        """Returns the time of the tile that is predicted fastest, of the fastest one's."""
        chosen = min(range(len(self.tiles)), key=lambda i: predicted[i])
        return self.seconds[chosen] / min(self.seconds)


def _in_boxes(shape: GemmShape, tile: Tile) -> GemmShape:
    """A weight gradient whose steps take boxes, as one row of as many pixels."""
    steps = pixel_box(shape.image, tile.k).copies
    return replace(shape, image=(1, 1, steps * tile.k))


def read(path: Path) -> dict[str, Any]:
    """Returns the document of a result file of `bench tiles`.

    Raises:
        KernelError: The file cannot be read, or is of another suite.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise KernelError(f"{path} cannot be read: {e}") from e
    if not isinstance(document, dict) or document.get("suite") != "tiles":
        raise KernelError(
            f"{path} is no result file of bench tiles; give one, say "
            "bench/results/nvidia-h100-80gb-hbm3/tiles.json"
        )
    return document


def load(path: Path) -> list[MeasuredPass]:
    """Returns the passes of a result file of `bench tiles`.

    Raises:
        KernelError: The file cannot be read, is of another suite, or names a case that
            does not exist.
    """
    document = read(path)
    in_boxes = document.get("weight_gradient_steps") == "boxes"
    chip = Chip(**document["chip"])
    return [_loaded(row, chip, in_boxes, path) for row in document["rows"]]


def _loaded(
    row: Mapping[str, Any], chip: Chip, boxes: bool, path: Path
) -> MeasuredPass:
    known = {case.name: case for case in cases()}
    case = known.get(row["name"])
    if case is None:
        raise KernelError(f"{path} has a case {row['name']!r} that does not exist now")
    stable = {
        tile: v["us"] * 1e-6
        for text, v in row["tiles"].items()
        if "us" in v and not v.get("unstable")
        # With two stages loads and products hardly overlap; the default takes none.
        if (tile := Tile.parse(text)).stages > MIN_STAGES
    }
    return MeasuredPass(
        row["name"],
        row["pass"],
        tuple(gemm_shapes(case, row["pass"])),
        tuple(stable),
        tuple(stable.values()),
        chip,
        boxes,
    )


def summary(regrets: Mapping[Pass, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Returns geometric mean, worst and number of the regrets of each kind of pass."""
    return {
        what: {"geomean": geometric_mean(v), "worst": max(v), "passes": len(v)}
        for what, v in regrets.items()
    }
