"""``hetconv autotune``: measures a cluster and writes its profile."""

from __future__ import annotations

import os
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import (
    DEFAULT_PROFILE,
    DtypeOption,
    Input,
    Inputs,
    Mode,
    Model,
    ModelArgs,
    ModeName,
    Seed,
    Traceback,
    make_console,
    output_option,
)
from .report_command import PAGE, checked_folder

if TYPE_CHECKING:
    from hetconv.autotune.search.record import Record

MAX_BUDGET = 7 * 24 * 3600.0


def autotune(
    devices: Annotated[
        str,
        typer.Option(
            help="One device per rank, as in cuda:0,cuda:1. @0.5 slows a device to half of its "
            "speed, to try an unequal pair on equal devices: cpu,cpu@0.5."
        ),
    ],
    model: Model,
    input: Input = None,
    inputs: Inputs = None,
    model_args: ModelArgs = "{}",
    dtype: DtypeOption = None,
    mode: Mode = ModeName.train,
    trials: Annotated[
        int, typer.Option(min=0, help="Maximum number of trials of the split ratio.")
    ] = 12,
    budget: Annotated[
        float,
        typer.Option(
            min=1,
            max=MAX_BUDGET,
            help="Seconds that the command may take, about: for operators, plans, ratios and, on "
            "GPUs, tiles.",
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
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            "-v",
            help="Print everything that is measured as it is measured.",
        ),
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
    traceback: Traceback = False,
) -> None:
    """Measure devices, links and whole steps, and write the cluster's profile after each stage.

    Starts one local rank per device, or uses torchrun's where RANK is set. What was
    measured is kept beside the profile, whatever happens: --resume goes on from there.
    """
    began = time.monotonic()  # the imports take seconds, of a torch for CUDA above all
    from hetconv.autotune.launch.launcher import parse_devices, run_on
    from hetconv.autotune.models.build import build_model, trace_model
    from hetconv.autotune.models.inputs import InputSpec
    from hetconv.autotune.search.job import Job
    from hetconv.autotune.search.journal import claimed, journal_of
    from hetconv.autotune.search.tune import tune

    from .summary import show_result

    named = parse_devices(devices)
    asked = InputSpec.parse(input or (), inputs, dtype)
    with redirect_stdout(sys.stderr):  # whatever a model prints
        built = build_model(model, model_args, seed, dtype)
        # What is wrong is said before ranks start.
        trace_model(built, asked.make(seed), mode is ModeName.train)
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
        verbose,
        dtype,
        began,
    )
    # torchrun's ranks could find each other here; rank 0 looks again.
    if "RANK" not in os.environ:
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
