"""Channels joined and finished in one pass against torch's passes: first whether right, then how fast, in turn."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.concat_works import (
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
from bench.kernel_checks import poisoned
from bench.machine import facts, need_cuda
from bench.timing import ceilings, host_seconds, prepared, raced, sets_for, tried
from bench.verdict import Demand, Row, timed
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
    count, least = sets_for(case.read_bytes(what), report.machine["l2_bytes"]), case.moved_bytes(what)
    sets = [first, *(drawn(case, what, report.where) for _ in range(count - 1))]
    contenders: dict[str, Callable[[int], Any]] = {
        "triton": lambda i: by_triton(what, case, sets[i]), "torch": lambda i: by_torch(what, case, sets[i]),
    }  # fmt: skip
    least_seconds = least / report.ceilings["copy"]
    row |= raced({n: prepared(call, count, least_seconds) for n, call in contenders.items()}, ROUNDS)
    rate = least / (row["triton_us"] * 1e-6)
    return row | {"bytes_per_s": rate, "of_copy": rate / report.ceilings["copy"]}


def demands(rows: Sequence[Row]) -> list[Demand]:
    """What must hold of every case that was timed."""

    def least(what: What, figure: str, megabytes: int = 0) -> float | None:
        found = [r[figure] for r in timed(rows) if r["work"] == what and r["megabytes"] >= megabytes]
        return min(found, default=None)

    return [
        Demand("concat, of torch.cat's speed, any size", 1.0, least("concat", "ratio")),
        Demand("finished, of torch.cat, batch norm and ReLU's speed, any size", 2.0, least("finished", "ratio")),
        *(
            Demand(f"{w}, of the copy's bandwidth, {LARGE} MB and more", 0.85, least(w, "of_copy", LARGE))
            for w in WORKS
        ),
    ]


@dataclass
class Report:
    """All that a run found; `write` is called after every case, so that a run that is killed leaves its results."""

    output: Path | None
    where: torch.device
    machine: Mapping[str, Any]
    ceilings: dict[str, float] = field(default_factory=dict)
    host_us: dict[str, float] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    stopped: str | None = None

    def document(self, with_cases: bool = True) -> dict[str, Any]:
        held = [asdict(d) | {"met": d.met} for d in demands(self.rows)]
        found = {"suite": "concat", **self.machine, "copy_bytes_per_s": self.ceilings.get("copy")}
        found |= {"host_us": self.host_us, "stopped": self.stopped, "must_hold": held}
        return found | ({"cases": self.rows} if with_cases else {})

    def write(self) -> None:
        if self.output is not None:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            self.output.write_text(json.dumps(self.document(), indent=1) + "\n", encoding="utf-8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="the cases that a minute suffices for")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="stop then, with what was measured")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the results here, after every case")


def run(args: argparse.Namespace) -> None:
    """Prints the ceiling, a line per work, what must hold, and one JSON document last, without cases if in a file.

    Raises `KernelError` without a GPU, `SystemExit` with status 1 if a result was wrong or a case failed.
    """
    report = Report(args.output, need_cuda("concat"), facts())
    deadline = time.monotonic() + args.budget if args.budget is not None else float("inf")
    torch.manual_seed(0)
    try:
        _measure_machine(report)
        for case in quick() if args.quick else cases():
            if time.monotonic() > deadline:
                report.stopped = f"after the budget of {args.budget:.0f} s"
                break
            for what in WORKS:
                row = {"name": case.name, "work": what, **asdict(case)}
                row |= tried(lambda c=case, w=what: measured(c, w, report))  # type: ignore[misc]
                report.rows.append(row)
                print(line(row), flush=True)
            report.write()
    finally:
        report.write()
    print("\n".join(_verdict_lines(report)), flush=True)
    print(json.dumps(report.document(with_cases=args.output is None)))
    if any("wrong" in r or "failed" in r for r in report.rows):
        raise SystemExit(1)


def _measure_machine(report: Report) -> None:
    report.ceilings = ceilings(report.where)
    print(f"{report.machine['device']}: copy {report.ceilings['copy'] / 1e9:.0f} GB/s", flush=True)
    tiny = [torch.zeros(1, 4, 4, k, device=report.where, dtype=torch.float16).permute(0, 3, 1, 2) for k in (16, 8)]
    calls: dict[str, Callable[[], Any]] = {
        "triton": lambda: kernels.concat_channels(tiny, backend="triton"), "torch": lambda: torch.cat(tiny, 1),
    }  # fmt: skip
    report.host_us = {name: host_seconds(call) * 1e6 for name, call in calls.items()}
    said = ", ".join(f"{name} {us:.1f} us" for name, us in report.host_us.items())
    print(f"host time of a call on a tiny problem: {said}", flush=True)


def line(row: Row) -> str:
    head = f"{row['name']:24} {row['work']:17}"
    for how in ("wrong", "failed", "skipped"):
        if how in row:
            return f"{head} {how.upper() if how == 'wrong' else how}: {row[how]}"
    loop = "" if row["mode"] == "graph" else f"  ({row['mode']})"
    return (
        f"{head} {row['bytes_per_s'] / 1e9:6.0f} GB/s {row['of_copy']:4.0%} of the copy's, {row['triton_us']:8.1f} us, "
        f"torch {row['torch_us']:8.1f}: {row['ratio']:.2f}x{loop}"
    )


def _verdict_lines(report: Report) -> Iterator[str]:
    yield f"\n{len(timed(report.rows))} of {len(report.rows)} timed" + (
        f"; stopped {report.stopped}" if report.stopped else ""
    )
    yield from (line(r) for r in report.rows if "wrong" in r or "failed" in r)
    yield "must hold:"
    yield from (f"  {d}" for d in demands(report.rows))
