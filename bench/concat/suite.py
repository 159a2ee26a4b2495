"""Concatenate channels and apply the epilogue in one pass, against torch's passes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from bench.concat.works import (
    EXACT,
    LARGE,
    LIMITS,
    WORKS,
    Case,
    What,
    by_torch,
    by_triton,
    cases,
    drawn,
    quick,
    worst_error,
)
from bench.kernels.checks import poisoned
from bench.shared.machine import facts, need_cuda
from bench.shared.report import Report, add_run_arguments, untimed
from bench.shared.timing import ceilings, prepared, raced, sets_for
from bench.shared.verdict import Demand, Row, timed
from hetconv import kernels

ROUNDS = 7


def measured(case: Case, what: What, report: Report) -> dict[str, Any]:
    """One work of one case: its error, and if that is small its times."""
    first = drawn(case, what, report.where)
    with poisoned():
        found = worst_error(what, case, first, by_triton(what, case, first))
    row: dict[str, Any] = {"error": tuple(found)}
    if not found.within(LIMITS[case.dtype] if "finished" in what else EXACT):
        return row | {"wrong": f"{found}"}
    count, least = (
        sets_for(case.read_bytes(what), report.machine["l2_bytes"]),
        case.moved_bytes(what),
    )
    sets = [first, *(drawn(case, what, report.where) for _ in range(count - 1))]
    contenders: dict[str, Callable[[int], Any]] = {
        "triton": lambda i: by_triton(what, case, sets[i]),
        "torch": lambda i: by_torch(what, case, sets[i]),
    }
    least_seconds = least / report.ceilings["copy"]
    row |= raced(
        {n: prepared(call, count, least_seconds) for n, call in contenders.items()},
        ROUNDS,
    )
    rate = least / (row["triton_us"] * 1e-6)
    return row | {"bytes_per_s": rate, "of_copy": rate / report.ceilings["copy"]}


def demands(rows: Sequence[Row]) -> list[Demand]:
    """What must hold of every case that was timed."""

    def least(what: What, figure: str, megabytes: int = 0) -> float | None:
        found = [
            r[figure]
            for r in timed(rows)
            if r["work"] == what and r["megabytes"] >= megabytes
        ]
        return min(found, default=None)

    return [
        Demand("concat, of torch.cat's speed, any size", 1.0, least("concat", "ratio")),
        Demand(
            "finished, of torch.cat, batch norm and ReLU's speed, any size",
            2.0,
            least("finished", "ratio"),
        ),
        *(
            Demand(
                f"{w}, of the copy's bandwidth, {LARGE} MB and more",
                0.85,
                least(w, "of_copy", LARGE),
            )
            for w in WORKS
        ),
    ]


def verdict(report: Report) -> dict[str, Any]:
    held = [asdict(d) | {"met": d.met} for d in demands(report.rows)]
    return {"copy_bytes_per_s": report.ceilings.get("copy"), "must_hold": held}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quick", action="store_true", help="the cases that a minute suffices for"
    )
    add_run_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Prints the ceiling, a line per work, what must hold, and one JSON document last,
    without cases if in a file.

    Raises `KernelError` without a GPU, `SystemExit` with status 1 if a result was wrong
    or a case failed.
    """
    where = need_cuda("concat")
    report = Report("concat", verdict, line, where, facts(), args.output, args.budget)
    torch.manual_seed(0)
    try:
        _measure_machine(report)
        report.fill(
            (
                {"name": case.name, "work": what, **asdict(case)},
                partial(measured, case, what, report),
            )
            for case in (quick() if args.quick else cases())
            for what in WORKS
        )
    finally:
        report.write()
    report.end(["must hold:", *(f"  {d}" for d in demands(report.rows))])


def _measure_machine(report: Report) -> None:
    report.ceilings = ceilings(report.where)
    print(
        f"{report.machine['device']}: copy {report.ceilings['copy'] / 1e9:.0f} GB/s",
        flush=True,
    )
    tiny = [
        torch.zeros(1, 4, 4, k, device=report.where, dtype=torch.float16).permute(
            0, 3, 1, 2
        )
        for k in (16, 8)
    ]
    report.time_host(
        {
            "triton": lambda: kernels.concat_channels(tiny, backend="triton"),
            "torch": lambda: torch.cat(tiny, 1),
        }
    )


def line(row: Row) -> str:
    head = f"{row['name']:24} {row['work']:17}"
    if (why := untimed(row)) is not None:
        return f"{head} {why}"
    loop = "" if row["mode"] == "graph" else f"  ({row['mode']})"
    return (
        f"{head} {row['bytes_per_s'] / 1e9:6.0f} GB/s {row['of_copy']:4.0%} of the copy's, "
        f"{row['triton_us']:8.1f} us, "
        f"torch {row['torch_us']:8.1f}: {row['ratio']:.2f}x{loop}"
    )
