"""Tables of seconds by tile, so that a search can be tested without a GPU: read, and made by a model where none is.

`load` takes the rows that ``python -m bench kernels --tiles`` records. `synthetic`, which ``python -m tests.tile_tables``
writes to a file, measures nothing: it is a roofline, with waves of resident tiles, a level-2 cache that a wave may
exceed, pipelines that hide latency, ±8 % of seeded noise for each tile, and tiles that fail or are wrong.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any, Literal

from hetconv.autotune.tiles import Choice, Problem, WrongResult
from hetconv.kernels import Tile
from hetconv.kernels.launch import CHIPS, Chip
from hetconv.kernels.tiles import Extents, Pass, cycles
from hetconv.spec import ITEMSIZE, Conv2dSpec

FILE = Path(__file__).parent / "data" / "tile_tables.json"
SOURCE = "synthetic: python -m tests.tile_tables, a seeded model of no device; nothing here was measured"
NOISE, FAILING, WRONG = 0.08, 0.04, 0.03


@dataclass
class Table:
    """``seconds`` by choice; ``bad`` has what failed ("failed") or was wrong ("wrong"). Counts what it is asked."""

    name: str
    problem: Problem
    seconds: Mapping[Choice, float]
    bad: Mapping[Tile, Literal["failed", "wrong"]]
    asked: list[Choice] = field(default_factory=list)

    def __call__(self, choice: Choice) -> float:
        self.asked.append(choice)
        if choice != "aten" and choice in self.bad:
            raise WrongResult("3.1e-02") if self.bad[choice] == "wrong" else RuntimeError("misaligned address")
        return self.seconds[choice]

    @property
    def size(self) -> int:
        return len(self.seconds) + len(self.bad)

    @property
    def best(self) -> float:
        return min(self.seconds.values())

    def again(self) -> Table:
        return Table(self.name, self.problem, self.seconds, self.bad)


def load(path: Path = FILE) -> list[Table]:
    return [_table(case, document["chips"]) for document in [json.loads(path.read_text())] for case in document["cases"]]
