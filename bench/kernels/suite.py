"""Time Triton's convolution kernels against cuDNN's, after a check of their results."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from bench.kernels import cases as kernel_cases
from bench.kernels.cases import PASSES, Case
from bench.kernels.checks import (
    Tensors,
    by_aten,
    by_triton,
    default_tile,
    drawn,
    errors,
    is_wrong,
    read_bytes,
    slots,
)
from bench.kernels.processes import checks_in_processes
from bench.shared import verdict
from bench.shared.machine import facts, need_cuda, save
from bench.shared.report import add_run_arguments
from bench.shared.timing import (
    Timed,
    ceilings,
    host_seconds,
    prepared,
    raced,
    sets_for,
    tried,
)
from hetconv import kernels
from hetconv.errors import KernelError
from hetconv.kernels.tiles import Pass

ROUNDS, TILE_ROUNDS = 9, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quick", action="store_true", help="the cases that a few minutes suffice for"
    )
    parser.add_argument(
        "--filter",
        metavar="REGEX",
        default="",
        help="only cases whose name matches somewhere",
    )
    parser.add_argument(
        "--passes",
        default=",".join(PASSES),
        help="separated by commas (default: %(default)s)",
    )
    add_run_arguments(parser)


@dataclass
class Report:
    """All that a run found; `write` is called after every case, so that a run that is
    killed leaves its results.
    """

    output: Path | None
    where: torch.device
    machine: dict[str, Any]
    ceilings: dict[str, float] = field(default_factory=dict)
    host_us: dict[str, float] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    stopped: str | None = None

    def document(self, with_cases: bool = True) -> dict[str, Any]:
        held = (
            [
                asdict(d) | {"met": d.met}
                for d in verdict.demands(self.rows, self.ceilings)
            ]
            if self.ceilings
            else []
        )
        found = {
            "suite": "kernels",
            **self.machine,
            "ceilings": self.ceilings,
            "host_us": self.host_us,
        }
        found |= {
            "stopped": self.stopped,
            "must_hold": held,
            "summary": verdict.summary(self.rows),
        }
        return found | ({"cases": self.rows} if with_cases else {})

    def write(self) -> None:
        if self.output is not None:
            save(self.output, self.document())


def run(args: argparse.Namespace) -> None:
    """Prints ceilings, a line per case, the summary, and one JSON document last,
    without the cases if a file has them.

    Raises `KernelError` without a GPU, `SystemExit` with status 1 if a result was wrong
    or a case failed.
    """
    chosen = selected(args)
    device = need_cuda("kernels")
    deadline = (
        time.monotonic() + args.budget if args.budget is not None else float("inf")
    )
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.conv.fp32_precision = "tf32"  # type: ignore[attr-defined]
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    report = Report(args.output, device, facts())
    try:
        _measure_machine(report)
        with checks_in_processes() as check:  # which compile what is timed then
            check([(case, what, None) for case, what in chosen])
        for case, what in chosen:
            if time.monotonic() > deadline:
                report.stopped = f"after the budget of {args.budget:.0f} s"
                break
            row = attempted(
                case,
                what,
                lambda c=case, w=what: measured(c, w, report),  # type: ignore[misc]
            )
            report.rows.append(row)
            print(line(row), flush=True)
            report.write()
            if not _is_alive():
                report.stopped = f"as the device was lost in {case.name}, {what}"
                break
    finally:
        report.write()
    _print_verdict(report)
    print(json.dumps(report.document(with_cases=args.output is None)))
    if any("wrong" in r or "failed" in r for r in report.rows):
        raise SystemExit(1)


def selected(args: argparse.Namespace) -> list[tuple[Case, Pass]]:
    """The cases and passes that were asked for. Raises `KernelError` where there are none."""
    asked = [p.strip() for p in args.passes.split(",")]
    if not set(asked) <= set(PASSES):
        raise KernelError(
            f"--passes {args.passes!r} is not known; give some of {', '.join(PASSES)}"
        )
    suite = kernel_cases.quick() if args.quick else kernel_cases.cases()
    chosen = kernel_cases.matching(suite, args.filter)
    return [(c, p) for c in chosen for p in c.passes if p in asked]


def attempted(
    case: Case, what: Pass, measure: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """What ``measure`` found, or how it failed."""
    row = {"name": case.name, "pass": what, "part": case.part, "dtype": case.dtype}
    row |= {k: v for k, v in asdict(case).items() if k not in row}
    return row | tried(measure)


def measured(case: Case, what: Pass, report: Report) -> dict[str, Any]:
    """One pass of one case: its errors, and if they are small its times."""
    device, spec = report.where, case.spec
    first = drawn(case, what, device)
    other = by_aten(case, what, first)
    found = errors(case, what, first, other)
    row: dict[str, Any] = {"errors": {k: tuple(e) for k, e in found.items()}}
    row["tile"] = str(default_tile(case, what, device))
    if is_wrong(case, found):
        row["wrong"] = f"{found}"
    count = sets_for(read_bytes(case, what), report.machine["l2_bytes"])
    sets = [first, *(drawn(case, what, device, first) for _ in range(count - 1))]
    if "wrong" in row:
        return row
    del other
    row |= raced(
        {
            "triton": prepared(
                lambda i: by_triton(case, what, sets[i]),
                len(sets),
                _floor(case, report),
            ),
            "cudnn": prepared(
                lambda i: by_aten(case, what, sets[i]), len(sets), _floor(case, report)
            ),
        },
        ROUNDS,
    )
    if what == "forward" and case.is_slice:
        row["slot"] = raced(_into_slots(case, sets, report), ROUNDS)
    t = row["triton_us"] * 1e-6
    row |= {
        "flops_per_s": spec.flops / t,
        "bytes_per_s": spec.bytes / t,
        "of_bound": _floor(case, report) / t,
    }
    row["bound"] = (
        "copy"
        if spec.bytes / report.ceilings["copy"] >= _floor(case, report)
        else "matmul"
    )
    return row


def _into_slots(case: Case, sets: list[Tensors], report: Report) -> dict[str, Timed]:
    slot, least = slots(case, report.where, len(sets)), _floor(case, report)
    return {
        "triton": prepared(
            lambda i: by_triton(case, "forward", sets[i], out=slot(i)), len(sets), least
        ),
        "cudnn": prepared(
            lambda i: by_aten(case, "forward", sets[i], out=slot(i)), len(sets), least
        ),
    }


def _floor(case: Case, report: Report) -> float:
    """Seconds below which no version runs much: arithmetic or bytes at the measured ceilings."""
    return max(
        case.spec.flops / report.ceilings[case.dtype],
        case.spec.bytes / report.ceilings["copy"],
    )


def line(row: dict[str, Any]) -> str:
    head = f"{row['name']:42} {row['pass']:15}"
    for how in ("wrong", "failed", "skipped"):
        if how in row:
            return f"{head} {how.upper() if how == 'wrong' else how}: {row[how]}"
    slot = f"  into a slot {row['slot']['ratio']:.2f}x" if "slot" in row else ""
    loop = "" if row["mode"] == "graph" else f"  ({row['mode']})"
    return (
        f"{head} {row['flops_per_s'] / 1e12:5.0f} TFLOP/s {row['bytes_per_s'] / 1e9:5.0f} GB/s "
        f"{row['of_bound']:4.0%} of {row['bound']:6} {row['triton_us']:9.1f} us, cuDNN "
        f"{row['cudnn_us']:9.1f}: "
        f"{row['ratio']:.2f}x{slot}{loop}"
    )


def _measure_machine(report: Report) -> None:
    device = report.where
    report.ceilings = ceilings(device)
    rates = ", ".join(
        f"{n} {v / 1e12:.0f} TFLOP/s" for n, v in report.ceilings.items() if n != "copy"
    )
    print(
        f"{report.machine['device']}: {rates}, copy {report.ceilings['copy'] / 1e9:.0f} GB/s",
        flush=True,
    )
    x, w = (
        torch.randn(s, device=device, dtype=torch.float16)
        for s in ((1, 8, 8, 16), (16, 3, 3, 16))
    )
    x, w = x.permute(0, 3, 1, 2), w.permute(0, 3, 1, 2)
    geometry = ((1, 1), ((1, 1), (1, 1)), (1, 1), 1)
    calls: dict[str, Callable[[], Any]] = {
        "triton": lambda: kernels.conv2d_forward(
            x, w, None, *geometry, backend="triton"
        ),
        "torch": lambda: F.conv2d(x, w, None, padding=1),
    }
    report.host_us = {name: host_seconds(call) * 1e6 for name, call in calls.items()}
    said = ", ".join(f"{name} {us:.1f} us" for name, us in report.host_us.items())
    print(f"host time of a call on a tiny problem: {said}", flush=True)


def _print_verdict(report: Report) -> None:
    print("\n".join(_verdict_lines(report)), flush=True)


def _verdict_lines(report: Report) -> Iterator[str]:
    stopped = f"; stopped {report.stopped}" if report.stopped else ""
    yield f"\n{len(verdict.timed(report.rows))} of {len(report.rows)} timed{stopped}"
    for g in verdict.summary(report.rows):
        yield (
            f"{g['pass']:15} {g['part']:5} {g['dtype']}  {g['geomean']:.2f}x of cuDNN "
            f"({g['least']:.2f} to {g['most']:.2f}, {g['cases']} cases)"
        )
    yield "worst:"
    yield from (f"  {line(dict(r))}" for r in verdict.worst(report.rows))
    yield from (line(r) for r in report.rows if "wrong" in r or "failed" in r)
    yield "must hold:"
    yield from (f"  {d}" for d in verdict.demands(report.rows, report.ceilings))


def _is_alive() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
