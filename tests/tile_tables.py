"""Tables of seconds by tile, so that a search can be tested without a GPU.

They are what an H100 measured, see `bench.tiles`. Tiles that were unstable there are
wrong, and a few more, drawn by chance, fail or are wrong.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bench.kernels.cases import cases
from bench.kernels.checks import gemm_shapes
from bench.tiles.suite import MEASURED
from hetconv.autotune.search.tile_search import Choice, WrongResultError
from hetconv.kernels import Tile
from hetconv.kernels.chip import CHIPS
from hetconv.kernels.tiles import estimated_seconds

MIN_TILES = 50
FAILED, WRONG = 0.04, 0.03  # of the tiles


@dataclass(frozen=True)
class Table:
    """A measured pass: its ``tiles`` with their predicted seconds, and what came of each."""

    name: str
    tiles: Mapping[Tile, float]
    heuristic: Tile
    rows: Mapping[str, Mapping[str, Any]]
    asked: list[str] = field(default_factory=list)

    def __call__(self, choice: Choice) -> float:
        self.asked.append(str(choice))
        row = self.rows[str(choice)]
        if "wrong" in row:
            raise WrongResultError(row["wrong"])
        if "failed" in row:
            raise RuntimeError(row["failed"])
        return float(row["us"]) * 1e-6

    @property
    def best(self) -> float:
        """Seconds of the fastest tile; ATen, which a search cannot miss, left out."""
        found = (
            row["us"] for c, row in self.rows.items() if "us" in row and c != "aten"
        )
        return float(min(found)) * 1e-6

    @property
    def bad(self) -> set[str]:
        return {choice for choice, row in self.rows.items() if "us" not in row}

    def again(self) -> Table:
        """The same, asked nothing yet."""
        return replace(self, asked=[])


def load() -> list[Table]:
    """The passes of which many tiles were measured."""
    rows = json.loads(MEASURED.read_text(encoding="utf-8"))["rows"]
    return [_table(row) for row in rows if len(row["tiles"]) >= MIN_TILES]


def _table(row: Mapping[str, Any]) -> Table:
    (case,) = (c for c in cases() if c.name == row["name"])
    shapes, tiles = gemm_shapes(case, row["pass"]), [*map(Tile.parse, row["tiles"])]
    seconds = sum(estimated_seconds(tiles, shape, CHIPS[90]) for shape in shapes)
    costs = dict(zip(tiles, map(float, seconds), strict=True))
    first = min(costs, key=lambda t: costs[t])
    dice = random.Random(f"{row['name']} {row['pass']}")
    rows: dict[str, Mapping[str, Any]] = {"aten": {"us": row["cudnn_us"]}}
    for tile, found in row["tiles"].items():
        rows[tile] = {"us": found["us"]}
        fate = dice.random() if tile != str(first) else 1.0
        if found.get("unstable") or fate < WRONG:
            rows[tile] = {"wrong": "differs from call to call"}
        elif fate < WRONG + FAILED:
            rows[tile] = {"failed": "OutOfResources"}
    return Table(f"{row['name']}, {row['pass']}", costs, first, rows)
