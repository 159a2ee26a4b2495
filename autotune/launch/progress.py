"""Progress of the measurements: a bar on a terminal, lines elsewhere; rank 0 alone prints."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
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


class Reporter:
    """``with Reporter("autotune") as say: say.stage("operators", 12); say.advance("conv2d ...")``.

    ``budget``: seconds, of which is said how many are left. ``quiet``: nothing is said at all.
    """

    def __init__(
        self,
        title: str,
        *,
        budget: float | None = None,
        quiet: bool = False,
        console: Console | None = None,
    ):
        self._title, self._budget = title, budget
        self._speaks = not quiet and os.environ.get("RANK", "0") == "0"
        self._console = console or Console(stderr=True)
        self._start = time.monotonic()
        self._bar = (
            _bar(self._console, self._left)
            if self._speaks and _draws(self._console)
            else None
        )
        self._total = self._done = 0
        self._stage, self._best = "", float("inf")

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
        """A new stage of ``total_cost`` steps."""
        self._stage, self._total, self._done, self._best = name, total, 0, float("inf")
        log_last_action(f"began {name}")
        if self._bar is not None:
            for task in self._bar.task_ids:
                self._bar.update(task, visible=False)
            self._bar.add_task(f"{self._title}: {name}", total=total, best="", note="")

    def advance(self, note: str = "", value: float | None = None) -> None:
        """Counts one step of the stage.

        Args:
            note: what was done.
            value: relative seconds of a trial; the lowest is shown.
        """
        self._done += 1
        log_last_action(f"{self._stage} {self._done}/{self._total} {note}")
        self._best = min(self._best, value) if value is not None else self._best
        best = f"best {self._best:.3f}x" if self._best < float("inf") else ""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[-1], advance=1, best=best, note=note)
        elif self._speaks:
            self.line(
                f"{self._stage} {self._done}/{self._total} {note}{f', {best}' * bool(best)}"
            )

    def line(self, text: str) -> None:
        """A line of its own, on standard error."""
        log_last_action(text)
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        elif self._speaks:
            limit = f" of {self._budget:.0f}" if self._budget else ""
            spent = f"{time.monotonic() - self._start:5.1f}{limit}"
            print(
                f"[{spent} s] {self._title}: {text}",
                file=self._console.file,
                flush=True,
            )

    def _left(self) -> str:
        spent = time.monotonic() - self._start
        return (
            f"{spent:.0f} s"
            if self._budget is None
            else f"{max(self._budget - spent, 0):.0f} s left"
        )


def _draws(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal


class _Time(ProgressColumn):
    """Asked for at every refresh, also where no step is done."""

    def __init__(self, text: Callable[[], str]):
        super().__init__(Column(no_wrap=True))
        self._text = text

    def render(self, task: Task) -> Text:
        return Text(self._text(), style="progress.remaining")


def _bar(console: Console, left: Callable[[], str]) -> Progress:
    """Where the terminal is narrow, the note is cut off."""
    note = TextColumn(
        "{task.fields[note]}", markup=False, table_column=Column(no_wrap=True, ratio=1)
    )
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(12),
        MofNCompleteColumn(),
        TextColumn("{task.fields[best]}"),
        _Time(left),
        note,
        console=console,
        expand=True,
    )
