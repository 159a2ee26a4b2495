"""Tables of seconds by tile, so that a search can be tested without a GPU: read, and
made up where none was recorded.

`load` takes what ``python -m bench kernels --tiles -o FILE`` writes. ``python -m
tests.tile_tables`` writes `FILE` in the same form, from a model of no device: a
roofline, waves of the tiles that an SM holds together, a level-2 cache that a wave may
exceed, pipelines that hide latency, ±8 % of seeded noise per tile, and tiles that fail
or are wrong.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from math import ceil
from pathlib import Path
from typing import Any

from bench.shared.kernel_cases import Case, cases
from bench.shared.kernel_checks import gemm_shapes
from hetconv.autotune.search.tile_search import (
    Choice,
    WrongResultError,
    heuristic,
    space,
)
from hetconv.kernels import Tile
from hetconv.kernels.launch import CHIPS, Chip
from hetconv.kernels.tiles import GemmShape, Pass
from hetconv.sharding.conv_spec import ITEMSIZE

FILE = Path(__file__).parent / "data" / "tile_tables.json"
SOURCE = (
    "synthetic: written by python -m tests.tile_tables, from a model of no device; "
    "nothing here was measured"
)
NOISE, FAILED, WRONG = 0.08, 0.04, 0.03
MOST_SPLITS = 4  # kinds of splits in a made-up table, so that it stays small
MADE_UP: tuple[
    tuple[int, str, Pass, float], ...
] = (  # compute capability, case, pass, ATen's time by the best tile's
    (90, "vgg16 256-256 3x3 @56 N32 bf16 K", "forward", 1.15),
    (90, "resnet50 256-256 3x3 @14 N32 bf16 K", "weight gradient", 1.05),
    (90, "resnet50 512-512 3x3 @7 N32 bf16 K/4", "forward", 1.4),
    (80, "resnet50 128-128 3x3 @28 N32 tf32 K", "input gradient", 1.3),
    (80, "resnet50 1024-256 1x1 @14 N32 bf16 K/4", "forward", 0.9),
)


@dataclass(frozen=True)
class Table:
    """A recorded pass: its ``tiles`` with their rough cost, and what came of each."""

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
        return (
            min(
                row["us"]
                for choice, row in self.rows.items()
                if "us" in row and choice != "aten"
            )
            * 1e-6
        )

    @property
    def bad(self) -> set[str]:
        return {choice for choice, row in self.rows.items() if "us" not in row}

    def again(self) -> Table:
        """The same, asked nothing yet."""
        return replace(self, asked=[])


def load(path: Path = FILE) -> list[Table]:
    """The passes whose every tile was recorded."""
    found = json.loads(path.read_text(encoding="utf-8"))
    documents = found if isinstance(found, list) else [found]
    return [
        table(row, chip_of(d))
        for d in documents
        for row in d["cases"]
        if "tiles" in row and "cudnn_us" in row
    ]


def table(row: Mapping[str, Any], chip: Chip) -> Table:
    case, what = Case(**{f.name: row[f.name] for f in fields(Case)}), row["pass"]
    work = gemm_shapes(case, what)
    rows = {r["tile"]: r for r in row["tiles"]} | {"aten": {"us": row["cudnn_us"]}}
    costs = {t: cost for t, cost in space(work, chip).items() if str(t) in rows}
    return Table(
        f"{row['name']}, {what}, sm_{chip.arch}", costs, heuristic(work, chip), rows
    )


def chip_of(document: Mapping[str, Any]) -> Chip:
    arch = int(document["capability"].replace(".", ""))
    return replace(
        CHIPS[max(a for a in CHIPS if a <= arch)], arch=arch, sms=document["sms"]
    )


def made_up() -> list[dict[str, Any]]:
    """Documents as `bench kernels` writes them, one per chip."""
    named = {case.name: case for case in cases()}
    documents = []
    for arch in sorted({arch for arch, *_ in MADE_UP}, reverse=True):
        rows = [
            _case(named[n], what, CHIPS[arch], aten)
            for a, n, what, aten in MADE_UP
            if a == arch
        ]
        head = {
            "suite": "kernels",
            "source": SOURCE,
            "capability": f"{arch / 10}",
            "sms": CHIPS[arch].sms,
        }
        documents.append(head | {"cases": rows})
    return documents


def _case(case: Case, what: Pass, chip: Chip, aten: float) -> dict[str, Any]:
    (work,), default = gemm_shapes(case, what), heuristic(gemm_shapes(case, what), chip)
    splits = sorted(
        {t.split_k for t in space([work], chip)},
        key=lambda z: (z != default.split_k, z),
    )[:MOST_SPLITS]
    dice = random.Random(f"{case.name} {what} {chip.arch}")
    rows: list[dict[str, Any]] = []
    for tile in (t for t in space([work], chip) if t.split_k in splits):
        us, fate = (
            seconds(tile, work, chip) * 1e6 * (1 + NOISE * dice.uniform(-1, 1)),
            dice.random(),
        )
        what_came: dict[str, Any] = {"us": round(us, 2)}
        if tile != default and fate < FAILED + WRONG:
            what_came = (
                {"failed": "OutOfResources"} if fate < FAILED else {"wrong": "made up"}
            )
        rows.append({"tile": str(tile)} | what_came)
    best = min(r["us"] for r in rows if "us" in r)
    return asdict(case) | {
        "pass": what,
        "tile": str(default),
        "cudnn_us": round(best * aten, 2),
        "tiles": rows,
    }


def seconds(tile: Tile, work: GemmShape, chip: Chip) -> float:
    """What a tile might take: another model than `tiles.estimated_cycles`, and no truer. Clock of
    1.6 GHz, 2.5 TB/s of memory.
    """
    item, hopper = ITEMSIZE[work.dtype], chip.arch >= 90
    resident = max(
        min(
            chip.shared // (tile.stages * (tile.m + tile.n) * tile.k * item),
            32 // tile.warps,
            4,
        ),
        1,
    )
    rate = (
        (2048 if hopper else 1024)
        * 2
        / item
        * (1.0 if tile.kind == "tma" or not hopper else 0.6)
    )
    rate *= (
        tile.m
        / (tile.m + 24)
        * tile.n
        / (tile.n + 40)
        * (0.9 if tile.m * tile.n > 2**14 else 1.0)
    )
    each = ceil(work.steps(tile) / tile.split_k)
    programs = work.tiles(tile) * tile.split_k
    together = min(resident, ceil(programs / chip.sms))
    moved = (tile.m + tile.n) * tile.k * item
    wave = min(programs, chip.sms * together) * moved * min(each, 64)
    bandwidth = (
        60 if wave < 24 << 20 else 34
    )  # bytes per cycle and SM, within and beyond the level-2 cache
    latency = 900 / (tile.stages * together)
    step = (
        max(
            tile.m * tile.n * tile.k / rate * together,
            moved / bandwidth * together,
            latency,
        )
        + 40
    )
    waves = ceil(programs / (chip.sms * together))
    cycles = waves * (each * step + 1500 + tile.m * tile.n / 16)
    results = work.m * work.n * work.repeats
    partial = (
        (8 * tile.split_k + item) * results / 2.5e12 + 4e-6 if tile.split_k > 1 else 0.0
    )
    return max(cycles / 1.6e9, item * results / 2.5e12) + partial


def _lines(documents: list[dict[str, Any]]) -> str:
    """JSON with a line per tile."""
    text = json.dumps(documents)
    return (
        text.replace('{"tile": "', '\n{"tile": "').replace('{"name"', '\n{"name"')
        + "\n"
    )


if __name__ == "__main__":
    FILE.write_text(_lines(made_up()), encoding="utf-8")
