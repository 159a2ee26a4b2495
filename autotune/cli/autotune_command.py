"""``hetconv autotune``: measures a cluster and writes its profile."""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from hetconv.autotune.launch.launcher import parse_devices, run_on
from hetconv.autotune.measure.model_inputs import InputSpec
from hetconv.autotune.measure.models import build_model
from hetconv.autotune.search.job import Job
from hetconv.autotune.search.journal import claimed, journal_of
from hetconv.autotune.search.record import Record
from hetconv.autotune.search.tune import tune
from hetconv.tracing.tracer import capture

from .options import (
    DEFAULT_PROFILE,
    Input,
    Inputs,
    Mode,
    Model,
    ModelArgs,
    ModeName,
    Seed,
    make_console,
    output_option,
)
from .report_command import PAGE, checked_folder
from .summary import show_result


def autotune(
    devices: Annotated[
        str,
        typer.Option(
            help="One device per rank: cuda:0,cuda:1, or cpu,cpu@0.5 (slowed to half speed)."
        ),
    ],
    model: Model,
    input: Input = None,
    inputs: Inputs = None,
    model_args: ModelArgs = "{}",
    mode: Mode = ModeName.train,
    trials: Annotated[
        int, typer.Option(min=0, help="Maximum number of trials of the split ratio.")
    ] = 12,
    budget: Annotated[
        float,
        typer.Option(
            min=1,
            help="Approximate seconds for operators, plans, ratios and, on GPUs, tiles.",
        ),
    ] = 150,
    output: Annotated[
        Path, output_option("--output", "-o", help="The profile to write.")
    ] = DEFAULT_PROFILE,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue an interrupted run with the same options.",
        ),
    ] = False,
    storage: Annotated[
        str | None,
        typer.Option(
            help="Database of the studies' trials, as in sqlite:///FILE or "
            "postgresql://USER@HOST/NAME.",
            show_default="the journal beside the profile",
        ),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead of a table.")
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(
            help=f"Folder to write a page about the result to, as {PAGE}.",
            callback=checked_folder,
            show_default=False,
        ),
    ] = None,
    seed: Seed = 0,
) -> None:
    """Measure devices, links and whole steps, and write the cluster's profile after each stage.

    Starts one local rank per device, or uses torchrun's where RANK is set. What was
    measured is kept beside the profile, whatever happens: --resume goes on from there.
    """
    named = parse_devices(devices)
    asked = InputSpec.parse(input or (), inputs)
    with redirect_stdout(sys.stderr):  # whatever a model prints
        given = asked.make(seed)
        capture(
            build_model(model, model_args, seed), *given.args, **given.kwargs
        )  # what is wrong is said at once
    job = Job(
        tuple(named),
        model,
        model_args,
        asked,
        mode.value,
        trials,
        budget,
        output.resolve(),
        seed,
        resume,
        storage,
        quiet,
    )
    if (
        "RANK" not in os.environ
    ):  # torchrun's ranks could find each other here; rank 0 looks again
        with claimed(job.output):
            pass
    try:
        record: Record | None = run_on(named, tune, job)
    except KeyboardInterrupt:
        print(
            f"hetconv: interrupted; what was measured is in {journal_of(job.output)}: add --resume",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None
    if record is not None:  # this is rank 0, or the process that started it
        show_result(record, job, make_console(), as_json=as_json, folder=report)
