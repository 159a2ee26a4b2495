"""What a person sees while ranks measure: a bar on a terminal, plain lines elsewhere; rank 0 alone speaks."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Reporter:
    """``with Reporter("autotune") as say: say.stage("operators", 12); say.advance("conv2d ...")``."""

    def __init__(self, title: str):
        self._title, self._speaks = title, os.environ.get("RANK", "0") == "0"
        self._start = time.monotonic()
        self._bar: Progress | None = None
        self._total = self._done = 0
        self._stage = ""
        if self._speaks and sys.stderr.isatty():
            columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
            self._bar = Progress(*columns, TextColumn("{task.fields[note]}"), console=Console(stderr=True))

    def __enter__(self) -> Reporter:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def stage(self, name: str, total: int) -> None:
        """A new stage of ``total`` steps."""
        self._stage, self._total, self._done = name, total, 0
        if self._bar is not None:
            for task in self._bar.task_ids:
                self._bar.update(task, visible=False)
            self._bar.add_task(f"{self._title}: {name}", total=total, note="")

    def advance(self, note: str = "") -> None:
        """One step of the stage is done."""
        self._done += 1
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[-1], advance=1, note=note)
        elif self._speaks:
            self.line(f"{self._stage} {self._done}/{self._total} {note}")

    def line(self, text: str) -> None:
        """A line of its own, on standard error."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False)
        elif self._speaks:
            print(f"[{time.monotonic() - self._start:5.1f}s] {self._title}: {text}", file=sys.stderr, flush=True)
