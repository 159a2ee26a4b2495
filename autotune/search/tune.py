"""The tuning job, run on every rank: a profile is written after each stage."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout

from hetconv.autotune.launch.progress import Reporter
from hetconv.schemas.cluster_profile import ClusterProfile

from .job import Job, Run
from .plan_search import plans
from .race import step_of
from .record import Record, samples_of, studies_of
from .stages import chunks, operators, tiles

__all__ = ["Job", "step_of", "tune"]

REFINING: dict[str, Callable[[Run, ClusterProfile], ClusterProfile]] = {
    "plans": plans,
    "chunks": chunks,
    "tiles": tiles,
}
OF_SPLITS = ("plans", "chunks")
MAX_START = 0.3  # of the budget, that leaves enough to measure


def tune(job: Job) -> Record:
    """Measures, stage by stage, and writes the profile on rank 0. Collective.

    Args:
        job: what was asked for.

    Returns:
        The profile and how it came about; samples and studies on rank 0 alone.

    Raises:
        HetConvError: on every rank, if another process is writing the profile, or what
            is to be resumed is another job's.
    """
    with (
        ExitStack() as stack,
        Reporter(
            "autotune",
            budget=job.budget,
            quiet=job.quiet,
            verbose=job.verbose,
            began=job.began,
        ) as say,
    ):
        stack.enter_context(redirect_stdout(sys.stderr))  # whatever a model prints
        run = Run(job, say, stack)
        named = ", ".join(f"{d}{' (emulated)' * d.emulated}" for d in job.devices)
        say.line(f"{run.graph.model}, {job.mode}, on {named}")
        alone = len(job.devices) == 1
        if alone:
            say.line(
                "one device: there is nothing to split; hetconv merge joins its profile with "
                "those of other devices"
            )
        if run.seconds > MAX_START * job.budget:
            say.line(
                f"--budget {job.budget:g} is short, since starting took {run.seconds:.0f} s of it: "
                "the least is measured, and it will take longer"
            )
        profile = run.finished("operators")
        resumed = profile is not None
        profile = (
            profile if profile is not None else run.finish("operators", operators(run))
        )
        took = {"operators": None if resumed else run.seconds}
        for name, refined in REFINING.items():
            if alone and name in OF_SPLITS:
                continue
            start, known = run.seconds, run.finished(name) if resumed else None
            resumed = known is not None
            profile = (
                known if known is not None else run.finish(name, refined(run, profile))
            )
            took[name] = None if resumed else run.seconds - start
        if run.store is None:
            return Record(profile, run.graph, took, {}, ())
        profile.save(job.output)  # as it was left, or removed since
        say.line(f"wrote {job.output} after {run.seconds:.0f} s")
        return Record(
            profile, run.graph, took, samples_of(run.store), studies_of(run.store)
        )
