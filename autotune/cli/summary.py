"""Prints the result of a tuning job: the plan beside an even split and the fastest device."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hetconv.autotune.report.contents import Tuning
from hetconv.autotune.report.page import write_report
from hetconv.autotune.report.step_times import WAY_HEADS, Summary, summarize, way_cells
from hetconv.autotune.report.text import format_text
from hetconv.autotune.search.job import Job
from hetconv.autotune.search.record import Record
from hetconv.planner.make_plan import make_plan
from hetconv.sharding.split import ratio_text

from .report_command import PAGE


def show_result(
    record: Record, job: Job, console: Console, *, as_json: bool, folder: Path | None
) -> None:
    """Prints the result of a tuning job, and writes its page.

    Args:
        record: what the job measured.
        job: its options.
        console: for the table.
        as_json: whether to print one JSON document instead.
        folder: for the page, if any.
    """
    summary = summarize(record.graph, record.profile, job.mode)
    page = folder / PAGE if folder is not None else None
    if page is not None:
        plan = make_plan(record.graph, record.profile, mode=job.mode)
        write_report(page, record.profile, plan, Tuning(record, summary))
    if as_json:
        files = {"output": str(job.output), "report": str(page) if page else None}
        print(
            json.dumps(
                files | {"stage_seconds": record.stage_s} | summary.to_json(), indent=1
            )
        )
    elif not job.quiet:
        show_summary(summary, console)
        if page is not None:
            print(f"wrote {page}")


def show_summary(summary: Summary, console: Console) -> None:
    """The plan and its shares, then a row for each way."""
    s = summary
    console.print(
        f"[bold]{s.model}[/bold], {s.mode}, on {', '.join(s.devices)}", highlight=False
    )
    if s.ratio is not None:
        weights = ratio_text(s.ratio.weights)
        computed = ratio_text(s.ratio.computed_weights)
        gain = s.ratio.computed_step_s / s.ratio.step_s
        said = (
            f"{weights}, {gain:.3f}x as fast as the computed {computed}"
            if weights != computed
            else computed
        )
        console.print(
            f"{s.ratio.kind} ratio {said}; {s.ratio.trials} trials", highlight=False
        )
    if s.tuned is None:
        console.print(
            "no whole plan was measured: hetconv plan will go by what is predicted"
            if len(s.devices) > 1
            else "one device was measured, and nothing is split",
            highlight=False,
        )
    else:
        cut = ", ".join(
            f"{n} by {kind}" if kind != "replicate" else f"{n} not cut"
            for kind, n in s.layers.items()
        )
        shares = (
            " : ".join(f"{share:.0%}" for share in s.shares) or "all by every device"
        )
        tried = f"{s.trials} plan{'s' * (s.trials != 1)} measured"
        console.print(
            f"layers: {cut or 'none is cut'}; work: {shares}; {tried}", highlight=False
        )
    console.print(f"memory format: {format_text(s.memory_format)}", highlight=False)
    console.print(_table(s))
    for warning in s.warnings:
        console.print(f"warning: {warning}", style="yellow", highlight=False)


def _table(s: Summary) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("")
    table.add_column("what", overflow="fold")
    for head in WAY_HEADS[2:]:
        table.add_column(head, justify="right", no_wrap=True)
    for cells in way_cells(s.ways):
        table.add_row(*cells)
    return table
