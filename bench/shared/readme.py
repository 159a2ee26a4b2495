"""Writes the tables of README.md and of docs from the result files."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from bench.autotune import CASES, OF_COMPUTING, PAIRS
from bench.shared.machine import RESULTS, ROOT
from bench.shared.plan_gains import OF_SILENT
from hetconv.errors import HetConvError
from hetconv.schemas.plan import SINGLE_DEVICE

NOTHING = "There is no measurement on a GPU yet: `make gpu` makes one on a machine that has one."
MODES = {"infer": "inference", "train": "training"}


class Table(NamedTuple):
    """What stands in ``file`` between markers of this ``name``; ``rendered`` from a
    folder of results, with links from the root.
    """

    file: Path
    name: str
    rendered: Callable[[Path], str]

    @property
    def markers(self) -> tuple[str, str]:
        return (
            f"<!-- bench readme {self.name} -->",
            f"<!-- /bench readme {self.name} -->",
        )

    def updated(self, text: str, results: Path = RESULTS) -> str:
        """The file's ``text`` with the table between its markers."""
        start, end = self.markers
        head, found, rest = text.partition(start)
        _, closed, tail = rest.partition(end)
        if not found or not closed:
            raise HetConvError(
                f"{self.file.name} has no {start} ... {end} to write between; put them back"
            )
        up = "../" * (len(self.file.relative_to(ROOT).parts) - 1)
        table = self.rendered(results).replace("](bench/", f"]({up}bench/")
        return f"{head}{start}\n{table}\n{end}{tail}"


def kernels(results: Path) -> str:
    """A table for each GPU with a ``<gpu>/kernels.json``; else a sentence."""
    return (
        "\n\n".join(
            _kernels(path, _read(path))
            for path in sorted(results.glob("*/kernels.json"))
        )
        or NOTHING
    )


def _kernels(path: Path, document: dict[str, Any]) -> str:
    rate = document["ceilings"]
    where = f"[results](bench/results/{path.parent.name}/{path.name})"
    made = f"{document['date'][:10]}, torch {document['torch']}, triton {document['triton']}"
    rates = (
        f"a large bf16 matrix product {rate['bf16'] / 1e12:.0f} TFLOP/s, a copy "
        f"{rate['copy'] / 1e9:.0f} GB/s"
    )
    lines = [
        f"{document['device']} ({made}; {rates}; {where}):",
        "",
        (
            "| pass | filters | type | cases | cuDNN's time over Triton's, geometric mean | from "
            "| to |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    for g in document["summary"]:
        kind = "all" if g["part"] == "K" else g["part"]
        ratios = f"{g['geomean']:.2f}× | {g['least']:.2f}× | {g['most']:.2f}×"
        lines.append(
            f"| {g['pass']} | {kind} | {g['dtype']} | {g['cases']} | {ratios} |"
        )
    wrong = sum("wrong" in r for r in document["cases"])
    if wrong:
        lines += ["", f"{wrong} cases gave a wrong result and have no time."]
    return "\n".join(lines)


def pair(results: Path) -> str:
    """Of ``cpu/pair.json``."""
    path = results / "cpu" / "pair.json"
    document = _read(path)
    lines = [
        (
            f"| [ms](bench/results/cpu/{path.name}) | alone | even | tuned | against alone | "
            "against even | of the bound |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    for name in MODES.values():
        r = document[name]
        ms = " | ".join(f"{r[f'{way}_ms']:.0f}" for way in ("alone", "even", "tuned"))
        lines.append(
            f"| {name} | {ms} | {r['vs_alone']:.2f}× | {r['vs_even']:.2f}× | {r['vs_bound']:.2f} |"
        )
    return "\n".join(lines)


def networks(results: Path) -> str:
    """A row for each network of ``cpu/networks.json``."""
    path = results / "cpu" / "networks.json"
    rows: dict[str, dict[str, Any]] = {}
    for case in _read(path)["cases"]:
        rows.setdefault(case["network"], {})[case["mode"]] = case
    columns = (
        f"[network](bench/results/cpu/{path.name})",
        *(
            f"{name}: {what}"
            for name in MODES.values()
            for what in ("gain", "of the bound")
        ),
        "memory",
    )
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for network, by_mode in rows.items():
        cells = [network]
        for mode in MODES:
            r = by_mode[mode]
            cells += [f"{r['vs_plain']:.2f}×", f"{r['vs_bound']:.2f}"]
        r = by_mode["train"]
        cells.append(f"{max(r['rank_bytes']) / r['plain_bytes']:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def predictions(results: Path) -> str:
    """A row for each pair, network and mode of ``cpu/autotune.json``."""
    networks = [case.name for case in CASES]

    def place(case: dict[str, Any]) -> tuple[int, int, str]:
        return PAIRS.index(case["pair"]), networks.index(case["model"]), case["mode"]

    columns = (
        "devices",
        "network",
        "mode",
        "steps off",
        "nine in ten",
        "layers off",
        "order",
        "alone",
        "even",
        "of computing",
        "of no messages",
        "off the best",
    )
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    cases = sorted(_read(results / "cpu" / "autotune.json")["cases"], key=place)
    return "\n".join([*lines, *map(_predicted, cases)])


def _predicted(r: dict[str, Any]) -> str:
    def gain(name: str) -> str:
        possible = f" ({r[f'possible {name}']:.2f})" if f"possible {name}" in r else ""
        return f"{r[name]:.2f}×{possible}"

    split = not r["chosen"].startswith(SINGLE_DEVICE)
    alone = gain("vs_alone") if split else "—"
    bounds = [
        f"{r[name]:.2f}×" if split and name in r else "—"
        for name in (OF_COMPUTING, OF_SILENT)
    ]
    cells = (
        f"`{r['pair']}`",
        r["model"],
        MODES[r["mode"]],
        f"{r['median error']:.0%}",
        f"{r['p90 error']:.0%}",
        f"{r['median error of layers']:.0%} ({r['of layers measured again']:.0%})",
        f"{r['tau']:.2f} ({r['tau of rounds']:.2f})",
        alone,
        gain("vs_even"),
        *bounds,
        f"{r['regret']:.0%}",
    )
    return f"| {' | '.join(cells)} |"


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


MEASUREMENTS = ROOT / "docs" / "explanation" / "measurements.md"
TABLES = (
    Table(ROOT / "README.md", "pair", pair),
    Table(MEASUREMENTS, "pair", pair),
    Table(MEASUREMENTS, "networks", networks),
    Table(MEASUREMENTS, "kernels", kernels),
    Table(ROOT / "docs" / "predictions.md", "predictions", predictions),
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--print",
        action="store_true",
        help="print the tables, and leave the documents as they are",
    )


def run(args: Namespace) -> None:
    for table in TABLES:
        if args.print:
            print(table.rendered(RESULTS))
        else:
            table.file.write_text(
                table.updated(table.file.read_text(encoding="utf-8")), encoding="utf-8"
            )
