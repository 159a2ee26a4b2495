"""What a benchmark finds, case by case: in its file after each, and at the end one JSON
document.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.shared.machine import add_output_argument, save
from bench.shared.timing import host_seconds, tried
from bench.shared.verdict import Row, timed

Measure = Callable[[], dict[str, Any]]


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options for how long a run lasts and where its `Report` goes."""
    parser.add_argument(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="stop then, with what was measured",
    )
    add_output_argument(parser, "write the results here, after every case")


@dataclass
class Report:
    """All that a run found; `write` is called after every case, so that a run that is
    killed leaves its results.

    ``verdict`` says what the cases come to, in the document; ``budget`` is in seconds
    and counts from here.
    """

    suite: str
    verdict: Callable[[Report], dict[str, Any]]
    line: Callable[[Row], str]
    where: torch.device
    machine: Mapping[str, Any]
    output: Path | None = None
    budget: float | None = None
    ceilings: dict[str, float] = field(default_factory=dict)
    host_us: dict[str, float] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    stopped: str | None = None
    start: float = field(default_factory=time.monotonic)

    def document(self, with_cases: bool = True) -> dict[str, Any]:
        found = {
            "suite": self.suite,
            **self.machine,
            "host_us": self.host_us,
            "stopped": self.stopped,
        }
        return {
            **found,
            **self.verdict(self),
            **({"cases": self.rows} if with_cases else {}),
        }

    def write(self) -> None:
        if self.output is not None:
            save(self.output, self.document())

    def time_host(self, calls: Mapping[str, Callable[[], Any]]) -> None:
        self.host_us = {name: host_seconds(call) * 1e6 for name, call in calls.items()}
        said = ", ".join(f"{name} {us:.1f} us" for name, us in self.host_us.items())
        print(f"host time of a call on a tiny problem: {said}", flush=True)

    def fill(self, work: Iterable[tuple[Row, Measure]]) -> None:
        """A row, printed, of each case and what measuring it found, until the budget is spent."""
        for case, measure in work:
            if self.budget is not None and time.monotonic() > self.start + self.budget:
                self.stopped = f"after the budget of {self.budget:.0f} s"
                break
            self.rows.append({**case, **tried(measure)})
            print(self.line(self.rows[-1]), flush=True)
            self.write()

    def end(self, lines: Iterable[str]) -> None:
        """Prints what failed, ``lines``, and the document last, without cases if a file has them.

        Raises `SystemExit` with status 1 if a result was wrong or a case failed.
        """
        print("\n".join([*self._counted(), *lines]), flush=True)
        print(json.dumps(self.document(with_cases=self.output is None)))
        if any(_is_bad(r) for r in self.rows):
            raise SystemExit(1)

    def _counted(self) -> Iterator[str]:
        stopped = f"; stopped {self.stopped}" if self.stopped else ""
        yield f"\n{len(timed(self.rows))} of {len(self.rows)} timed{stopped}"
        yield from (self.line(r) for r in self.rows if _is_bad(r))


def _is_bad(row: Row) -> bool:
    return "wrong" in row or "failed" in row


def untimed(row: Row) -> str | None:
    """Why a row has no time, or None."""
    for how in ("wrong", "failed", "skipped"):
        if how in row:
            return f"{how.upper() if how == 'wrong' else how}: {row[how]}"
    return None
