"""A convolution of gathered channels, read where they lie against joined first.

Three contenders: one kernel that reads the parts where they lie; `concat_channels`, then cuDNN; the same, then Triton.
Each is checked first, and timed only if right, in turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import parts_cases
from bench.kernel_checks import read_bytes
from bench.machine import facts, need_cuda
from bench.parts_cases import CONTENDERS, OURS, RIVALS, Case, drawn, errors, wrong
from bench.report import Report, untimed
from bench.timing import ceilings, prepared, raced, sets_for
from bench.verdict import Row, geomean, timed, worst

ROUNDS = 7
TINY = Case((16, 8), 16, 3, 8, 1, "fp16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="the cases that half a minute suffices for")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="stop then, with what was measured")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the results here, after every case")


def run(args: argparse.Namespace) -> None:
    """Prints ceilings, a line per case, what they come to, and one JSON document last, without cases if in a file.

    Raises `KernelError` without a GPU, `SystemExit` with status 1 if a result was wrong or a case failed.
    """
    report = Report("parts", verdict, line, need_cuda("parts"), facts(), args.output, args.budget)
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.conv.fp32_precision = "tf32"  # type: ignore[attr-defined]
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        _measure_machine(report)
        report.fill(
            ({"name": case.name, **asdict(case)}, partial(measured, case, report))
            for case in (parts_cases.quick() if args.quick else parts_cases.cases())
        )
    finally:
        report.write()
    report.end(_verdict_lines(report.rows))


def measured(case: Case, report: Report) -> dict[str, Any]:
    """One case: every contender's errors, and if all are small their times."""
    first = drawn(case, report.where)
    found = errors(case, first)
    row: dict[str, Any] = {"errors": {name: tuple(e) for name, e in found.items()}}
    if large := wrong(case, found):
        return row | {"wrong": f"{large}"}
    count, spec = sets_for(read_bytes(case.conv, "forward"), report.machine["l2_bytes"]), case.conv.spec
    sets = [first, *(drawn(case, report.where) for _ in range(count - 1))]
    least = max(spec.flops / report.ceilings[case.dtype], spec.bytes / report.ceilings["copy"])
    calls = {name: lambda i, c=contender: c(case, sets[i]) for name, contender in CONTENDERS.items()}
    row |= raced({name: prepared(call, count, least) for name, call in calls.items()}, ROUNDS)
    return row | {"of_bound": least / (row[f"{OURS}_us"] * 1e-6)}


def summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The geometric mean of each other's time over that of parts read in place, of all cases and by size of filter."""
    found = []
    for rival in RIVALS:
        for sizes in ((3, 1), (3,), (1,)):
            ratios = [r["against"][rival]["ratio"] for r in timed(rows) if r["kernel"] in sizes]
            if ratios:
                what = {"against": rival, "filters": sizes, "cases": len(ratios), "geomean": geomean(ratios)}
                found.append(what | {"least": min(ratios), "most": max(ratios)})
    return found


def verdict(report: Report) -> dict[str, Any]:
    slowest = [r["name"] for r in worst(report.rows, 1)]
    found = {"ceilings": report.ceilings, "summary": summary(report.rows)}
    return found | {"worst": slowest[0] if slowest else None}


def line(row: Row) -> str:
    head = f"{row['name']:46}"
    if (why := untimed(row)) is not None:
        return f"{head} {why}"
    rivals = ", ".join(f"{name} {row[f'{name}_us']:8.1f}: {row['against'][name]['ratio']:.2f}x" for name in RIVALS)
    loop = "" if row["mode"] == "graph" else f"  ({row['mode']})"
    return f"{head} {OURS} {row[f'{OURS}_us']:8.1f} us, {row['of_bound']:4.0%} of the bound, {rivals}{loop}"


def _measure_machine(report: Report) -> None:
    report.ceilings = ceilings(report.where)
    rates = ", ".join(f"{n} {v / 1e12:.0f} TFLOP/s" for n, v in report.ceilings.items() if n != "copy")
    print(f"{report.machine['device']}: {rates}, copy {report.ceilings['copy'] / 1e9:.0f} GB/s", flush=True)
    tiny = drawn(TINY, report.where)
    report.time_host({name: partial(contender, TINY, tiny) for name, contender in CONTENDERS.items()})


def _verdict_lines(rows: Sequence[Row]) -> Iterator[str]:
    for g in summary(rows):
        which = " and ".join(f"{k}x{k}" for k in g["filters"])
        yield (
            f"{g['against']:16} over {OURS}, {which:11} {g['geomean']:.2f}x "
            f"({g['least']:.2f} to {g['most']:.2f}, {g['cases']} cases)"
        )
    yield from (f"worst: {line(r)}" for r in worst(rows, 1))
