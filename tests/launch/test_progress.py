"""Progress of a job, on terminals of every kind."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from hetconv.autotune.launch import progress
from hetconv.autotune.launch.progress import Reporter


def shown(monkeypatch: pytest.MonkeyPatch, **options: bool | float) -> list[str]:
    """Returns the lines of two stages, ten seconds apart."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setenv("TERM", "dumb" if options.pop("dumb", False) else "xterm")
    terminal, quiet, budget = (
        options.pop("terminal"),
        options.get("quiet", False),
        options.get("budget"),
    )
    console = Console(file=io.StringIO(), force_terminal=bool(terminal), width=100)
    with Reporter(
        "autotune",
        budget=budget,
        quiet=bool(quiet),
        verbose=bool(options.get("verbose")),
        console=console,
    ) as reporter:
        reporter.stage("operators", 2)
        now[0] = 10.0
        reporter.advance("a [conv]")
        reporter.stage("ratio", 4)
        for value in (1.0, 0.875, 0.9, None):
            reporter.advance(f"tried {value}", value)
        reporter.detail("a detail")
        reporter.line("a line [of its own]")
        now[0] = 200.0
    assert isinstance(console.file, io.StringIO)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())
    return [line.rstrip() for line in re.split(r"[\r\n]+", plain) if line.strip()]


@pytest.mark.parametrize("dumb", [False, True])
def test_plain_lines_without_a_terminal(
    dumb: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shown(monkeypatch, terminal=dumb, dumb=dumb, budget=60.0) == [
        "[  0.0 of 60 s] autotune: operators, 2 to do",
        "[ 10.0 of 60 s] autotune: operators 1/2 a [conv]",
        "[ 10.0 of 60 s] autotune: ratio, 4 to do",
        "[ 10.0 of 60 s] autotune: a line [of its own]",
    ]


@pytest.mark.parametrize("terminal", [False, True])
def test_every_step_and_detail_when_verbose(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "\n".join(shown(monkeypatch, terminal=terminal, verbose=True))
    for text in (
        "ratio 1/4 tried 1.0, best 1.000x",
        "ratio 2/4 tried 0.875, best 0.875x",
        "ratio 4/4 tried None, best 0.875x",
        "a detail",
        "a line [of its own]",
    ):
        assert text in lines


def test_a_bar_shows_the_stage_its_best_and_the_time_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = shown(monkeypatch, terminal=True, budget=60.0)
    assert "a line [of its own]" in lines
    last = lines[-1]
    assert re.fullmatch(
        r"autotune: ratio ━+ 4/4 best 0.875x 0 s left +tried None", last
    ), last
    assert all(len(line) <= 100 for line in lines)


def test_without_a_budget_the_time_spent_is_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert " 200 s " in shown(monkeypatch, terminal=True)[-1]
    assert shown(monkeypatch, terminal=False)[1].startswith("[ 10.0 s] autotune")


@pytest.mark.parametrize("terminal", [False, True])
def test_a_quiet_reporter_shows_nothing(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shown(monkeypatch, terminal=terminal, quiet=True) == []


def test_only_rank_0_shows_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert shown(monkeypatch, terminal=True) == []
