"""``python -m bench.readme`` writes the README's table of kernels from the newest results of each GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench.machine import RESULTS, ROOT
from hetconv.errors import HetConvError

START, END = "<!-- bench.readme -->", "<!-- /bench.readme -->"
README = ROOT / "README.md"
NOTHING = "There is no measurement on a GPU yet: `make gpu` makes one on a machine that has one."


def rendered(results: Path = RESULTS) -> str:
    """A table for each GPU with a ``<gpu>/<date>-kernels.json``, of its newest; else a sentence."""
    newest = {path.parent: path for path in sorted(results.glob("*/*-kernels.json"))}
    tables = [_table(path, json.loads(path.read_text(encoding="utf-8"))) for _, path in sorted(newest.items())]
    return "\n\n".join(tables) or NOTHING


def _table(path: Path, document: dict[str, Any]) -> str:
    rate = document["ceilings"]
    where = f"[results](bench/results/{path.parent.name}/{path.name})"
    made = f"{document['date'][:10]}, torch {document['torch']}, triton {document['triton']}"
    rates = f"a large bf16 matrix product {rate['bf16'] / 1e12:.0f} TFLOP/s, a copy {rate['copy'] / 1e9:.0f} GB/s"
    lines = [
        f"{document['device']} ({made}; {rates}; {where}):",
        "",
        "| pass | filters | type | cases | cuDNN's time over Triton's, geometric mean | from | to |",
        "|---|---|---|---|---|---|---|",
    ]
    for g in document["summary"]:
        kind = "all" if g["part"] == "K" else g["part"]
        ratios = f"{g['geomean']:.2f}× | {g['least']:.2f}× | {g['most']:.2f}×"
        lines.append(f"| {g['pass']} | {kind} | {g['dtype']} | {g['cases']} | {ratios} |")
    wrong = sum("wrong" in r for r in document["cases"])
    if wrong:
        lines += ["", f"{wrong} cases gave a wrong result and have no time."]
    return "\n".join(lines)


def updated(readme: str, body: str) -> str:
    """The README with ``body`` between the markers."""
    head, start, rest = readme.partition(START)
    _, end, tail = rest.partition(END)
    if not start or not end:
        raise HetConvError(f"README.md has no {START} ... {END} to write between; put them back")
    return f"{head}{START}\n{body}\n{END}{tail}"


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        print(rendered())
    else:
        README.write_text(updated(README.read_text(encoding="utf-8"), rendered()), encoding="utf-8")
