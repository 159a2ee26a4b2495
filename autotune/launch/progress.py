"""Progress of a job: a bar on a terminal, few lines elsewhere; only rank 0 shows it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from math import inf
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
)
from rich.table import Column
from rich.text import Text

from .supervisor import log_last_action

MIN_LINE_S = 10.0  # between two lines of a stage where there is no bar


class Reporter:
    """Shows the stages of a job, and logs them as the last action of this rank.

    Without a terminal a stage has a line when it begins, and one every 10 seconds.

    Args:
        title: What stands before every line.
        budget: Seconds that the job may take. The bar then shows how many are left.
        quiet: Whether to show nothing.
        verbose: Whether to show every step and detail.
        began: When the job began, by `time.monotonic`; now by default.
        console: Where to show it; standard error by default.

    Examples:
        >>> with Reporter("autotune") as reporter:
        ...     reporter.stage("operators", total=12)
        ...     reporter.advance("conv2d 3x3")
    """

    def __init__(
        self,
        title: str,
        *,
        budget: float | None = None,
        quiet: bool = False,
        verbose: bool = False,
        began: float | None = None,
        console: Console | None = None,
    ):
        self._title, self._budget = title, budget
        self._visible = not quiet and os.environ.get("RANK", "0") == "0"
        self._console = console or Console(stderr=True)
        self._start = time.monotonic() if began is None else began
        draws = self._console.is_terminal and not self._console.is_dumb_terminal
        self._bar: Progress | None = None
        if self._visible and draws:
            self._bar = _progress_bar(self._console, self._time_text)
        self._verbose = verbose
        self._total = self._done = 0
        self._last_line = -inf
        self._stage, self._best = "", inf

    def __enter__(self) -> Reporter:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def stage(self, name: str, total: int) -> None:
        """Begins a stage of ``total`` steps."""
        self._stage, self._total, self._done, self._best = name, total, 0, inf
        log_last_action(f"began {name}")
        if self._bar is not None:
            for task in self._bar.task_ids:
                self._bar.update(task, visible=False)
            self._bar.add_task(f"{self._title}: {name}", total=total, best="", note="")
        else:
            self.line(f"{name}, {total} to do")

    def advance(self, note: str = "", value: float | None = None) -> None:
        """Counts one step of the stage as done.

        Args:
            note: What was done.
            value: Relative seconds of a trial. The least of the stage is shown.
        """
        self._done += 1
        text = f"{self._stage} {self._done}/{self._total} {note}"
        if value is not None:
            self._best = min(self._best, value)
        best = f"best {self._best:.3f}x" if self._best < inf else ""
        log_last_action(text)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[-1], advance=1, best=best, note=note)
        late = self._bar is None and time.monotonic() - self._last_line >= MIN_LINE_S
        if self._verbose or late:
            self._show(f"{text}, {best}" if best else text)

    def detail(self, text: str) -> None:
        """Shows a line of text if all is to be shown."""
        log_last_action(text)
        if self._verbose:
            self._show(text)

    def line(self, text: str) -> None:
        """Shows a line of text, above the bar if there is one."""
        log_last_action(text)
        self._show(text)

    def _show(self, text: str) -> None:
        self._last_line = time.monotonic()
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        elif self._visible:
            limit = f" of {self._budget:.0f}" if self._budget else ""
            spent = f"{time.monotonic() - self._start:5.1f}{limit}"
            print(
                f"[{spent} s] {self._title}: {text}",
                file=self._console.file,
                flush=True,
            )

    def _time_text(self) -> str:
        spent = time.monotonic() - self._start
        if self._budget is None:
            return f"{spent:.0f} s"
        return f"{max(self._budget - spent, 0):.0f} s left"


class _TimeColumn(ProgressColumn):
    """Column that changes at every refresh, not only after a step."""

    def __init__(self, text: Callable[[], str]):
        super().__init__(Column(no_wrap=True))
        self._text = text

    def render(self, task: Task) -> Text:
        return Text(self._text(), style="progress.remaining")


def _progress_bar(console: Console, time_text: Callable[[], str]) -> Progress:
    # The note is cut off where the terminal is narrow.
    note = TextColumn(
        "{task.fields[note]}", markup=False, table_column=Column(no_wrap=True, ratio=1)
    )
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(12),
        MofNCompleteColumn(),
        TextColumn("{task.fields[best]}"),
        _TimeColumn(time_text),
        note,
        console=console,
        expand=True,
    )
