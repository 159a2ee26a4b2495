"""The command line: a function for each command of ``hetconv``."""

from __future__ import annotations

import json
import os
import sys
from contextlib import redirect_stdout
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from platformdirs import user_data_path
from rich.console import Console

from hetconv.autotune.launch.launcher import parse_devices, run_on
from hetconv.autotune.measure.device_info import here
from hetconv.autotune.measure.model_inputs import InputSpec
from hetconv.autotune.measure.models import build_model
from hetconv.autotune.search.job import Job
from hetconv.autotune.search.journal import claimed, journal_of
from hetconv.autotune.search.record import Record
from hetconv.autotune.search.tune import tune
from hetconv.cost.estimator import StepEstimator
from hetconv.cost.timeline import Event, chrome_trace
from hetconv.errors import HetConvError, PlanError, ProfileError
from hetconv.planner.make_plan import make_plan
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.json_files import write
from hetconv.schemas.plan import Plan
from hetconv.sharding.split import KINDS
from hetconv.tracing.graph import Graph
from hetconv.tracing.tracer import capture

from .devices import show_devices
from .diff import show_diff
from .doctor import examine, show_report, visible
from .merge import merge as merge_profiles
from .outdated import stale
from .picture import draw
from .plots import prepare
from .show import show_gathers, show_layer, show_plan, show_profile
from .summary import report


def write_trace(path: Path, graph: Graph, profile: ClusterProfile, plan: Plan) -> None:
    """Simulates the plan's step on the cluster and writes when each device computes,
    sends and receives, and waits.
    """
    events: list[Event] = []
    StepEstimator(graph, profile, plan.mode).of(plan.chosen).estimate(
        plan.splits, events.append
    )
    write(path, (json.dumps(chrome_trace(plan.devices, events)) + "\n").encode())


app = typer.Typer(
    help="Model-parallel convolution on devices of unequal speed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
PIPED = 160  # columns
DEFAULT_PROFILE = user_data_path("hetconv") / "cluster.json"


class ModeName(StrEnum):
    train = "train"
    infer = "infer"


class FileKind(StrEnum):
    profile = "profile"
    plan = "plan"


Model = Annotated[
    str,
    typer.Option(
        help="What makes the model: package.module:callable.", show_default=False
    ),
]
ModelArgs = Annotated[str, typer.Option(help="Its arguments: a JSON object or list.")]
Input = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[NAME=]SHAPE[:DTYPE]",
        help="A tensor that the model is called with, once for each argument: positional ones "
        "in their order, as in "
        "1x3x256x256 or 2:int64, and named ones, as in timestep=2:int64. Numbers are random, "
        "float32 by default; "
        "integers are zeros.",
        show_default=False,
    ),
]
Inputs = Annotated[
    str | None,
    typer.Option(
        help="In place of --input, what makes the arguments: package.module:callable, which "
        "returns (args, kwargs).",
        show_default=False,
    ),
]
Mode = Annotated[
    ModeName,
    typer.Option(help="What a step is: forward and backward, or forward alone."),
]
Seed = Annotated[int, typer.Option(help="Of weights, inputs and the study.")]


@app.command()
def autotune(
    devices: Annotated[
        str,
        typer.Option(
            help="One per rank: cuda:0,cuda:1 or cpu,cpu@0.5 (emulated at half speed)."
        ),
    ],
    model: Model,
    input: Input = None,
    inputs: Inputs = None,
    model_args: ModelArgs = "{}",
    mode: Mode = ModeName.train,
    trials: Annotated[
        int, typer.Option(min=0, help="Of a study of whole steps, the most.")
    ] = 12,
    budget: Annotated[
        float,
        typer.Option(
            min=1,
            help="Seconds, about; for operators, split ratios, plans, and on GPUs tiles.",
        ),
    ] = 150,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The profile to write.")
    ] = DEFAULT_PROFILE,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on where an earlier run with the same options was interrupted.",
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
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw trials, measured layers and links into this folder.",
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
    if plot is not None:
        prepare(plot)
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
        report(record, job, _console(), as_json=as_json, plot=plot)


@app.command()
def plan(
    model: Model,
    input: Input = None,
    inputs: Inputs = None,
    model_args: ModelArgs = "{}",
    profile: Annotated[
        Path | None,
        typer.Option(
            help="The profile that autotune wrote.", show_default=str(DEFAULT_PROFILE)
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            help="In place of a profile, of what hetconv devices lists: T4,2xL4 or, on two "
            "nodes, 4xT4/2xL4."
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            help="Joins a node's devices, pcie4-x16 by default; or one per node: nvlink2/pcie3-x16."
        ),
    ] = None,
    between: Annotated[
        str | None, typer.Option(help="Joins the nodes, as in ethernet-100g.")
    ] = None,
    mode: Mode = ModeName.train,
    kinds: Annotated[
        str, typer.Option(help=f"The only kinds to use, of {','.join(KINDS)}.")
    ] = ",".join(KINDS),
    memory_limit: Annotated[
        float | None, typer.Option(help="GB per device; the profile's by default.")
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The plan to write.")
    ] = Path("plan.json"),
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Also write the simulated step, to be opened at ui.perfetto.dev."
        ),
    ] = None,
    seed: Seed = 0,
) -> None:
    """Choose how to cut every layer, and write the plan."""
    cluster = _cluster(profile, devices, link, between)
    given = InputSpec.parse(input or (), inputs).make(seed)
    built = build_model(model, model_args, seed).train(mode is ModeName.train)
    with torch.set_grad_enabled(mode is ModeName.train):
        graph = capture(built, *given.args, **given.kwargs)
    limit = memory_limit * 1e9 if memory_limit is not None else None
    chosen: Any = tuple(kinds.split(","))
    made = make_plan(graph, cluster, mode=mode.value, memory_limit=limit, kinds=chosen)
    made.save(output)
    show_plan(made, _console())
    if devices is not None:
        print(", ".join(f"{what} {name}" for what, name in cluster.fingerprint.items()))
    print(f"wrote {output}")
    if trace is not None:
        write_trace(trace, graph, cluster, made)
        print(f"wrote {trace}")


def _cluster(
    profile: Path | None, devices: str | None, link: str | None, between: str | None
) -> ClusterProfile:
    """What was measured, or put together from the catalogue."""
    if devices is None:
        if link is not None or between is not None:
            raise ProfileError(
                "--link and --between describe devices of the catalogue; name them with --devices"
            )
        if profile is None and not DEFAULT_PROFILE.exists():
            raise ProfileError(
                f"there is no profile at {DEFAULT_PROFILE}; measure one with hetconv autotune, "
                "give another with "
                "--profile, or plan for devices of the catalogue with --devices"
            )
        cluster = ClusterProfile.load(profile or DEFAULT_PROFILE)
        for line in stale(cluster, here()):
            print(f"warning: {profile or DEFAULT_PROFILE}: {line}", file=sys.stderr)
        return cluster
    if profile is not None:
        raise ProfileError(
            f"--profile {profile} and --devices {devices} were given; give one, measured or "
            "catalogued"
        )
    joined = {"link": link} if link is not None else {}
    return ClusterProfile.from_devices(devices, **joined, between=between)


@app.command("devices")
def list_devices() -> None:
    """List the devices and links that a plan can be made for without having them."""
    show_devices(_console())


@app.command()
def show(
    file: Annotated[
        Path, typer.Argument(help="A plan or a profile.", show_default=False)
    ],
    gathers: Annotated[
        bool,
        typer.Option("--gathers", help="Only what a plan runs on gathered tensors."),
    ] = False,
    layer: Annotated[
        str | None,
        typer.Option(help="Only what was considered for this layer, and why it lost."),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(help="Draw a plan into this .svg, .png or .pdf instead."),
    ] = None,
) -> None:
    """Show a plan or a profile as a table."""
    console = _console()
    options = {"--gathers": gathers or None, "--layer": layer, "--picture": picture}
    asked = [option for option, given in options.items() if given is not None]
    if len(asked) > 1:
        raise PlanError(f"{' and '.join(asked)} were given; give one of them")
    if _format(file) == "hetconv-profile":
        if asked:
            raise PlanError(f"{file} is a profile; give a plan with {asked[0]}")
        show_profile(ClusterProfile.load(file), console)
    elif gathers:
        show_gathers(Plan.load(file), console)
    elif layer is not None:
        show_layer(Plan.load(file), layer, console)
    elif picture is not None:
        draw(Plan.load(file), picture)
        print(f"wrote {picture}")
    else:
        show_plan(Plan.load(file), console)


@app.command()
def diff(
    first: Annotated[Path, typer.Argument(help="A plan.", show_default=False)],
    second: Annotated[Path, typer.Argument(help="Another plan.", show_default=False)],
) -> None:
    """Show where two plans differ. Exit status is 0 if they do not, 1 if they do, 2 if
    one cannot be read.
    """
    if show_diff(Plan.load(first), Plan.load(second), _console()):
        raise typer.Exit(1)


@app.command()
def merge(
    files: Annotated[
        list[Path],
        typer.Argument(help="Profiles that autotune wrote.", show_default=False),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="The profile to write.", show_default=False
        ),
    ],
    between: Annotated[
        str | None,
        typer.Option(
            help="Joins hosts between which nothing was measured, as in ethernet-100g."
        ),
    ] = None,
) -> None:
    """Write one profile of what several measured: of the same devices the newest, and
    of several hosts one cluster.
    """
    merged, left_out = merge_profiles(
        {str(file): ClusterProfile.load(file) for file in files}, between
    )
    merged.save(output)
    show_profile(merged, _console())
    for line in (*left_out, *stale(merged)):
        print(f"warning: {line}", file=sys.stderr)
    print(f"wrote {output}")


@app.command()
def doctor(
    devices: Annotated[
        str | None,
        typer.Option(
            help="One per rank: cpu,cuda:0,cuda:1.", show_default="the CPU and all GPUs"
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds that each operation of a pair gets.")
    ] = 10,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead of tables.")
    ] = False,
) -> None:
    """Show what there is to compute on, and try for real which backends join which
    pairs of devices.

    Exit status is 0 if each pair has a backend that works, 1 if one has none, 2 if a
    device is not there.
    """
    report = examine(
        parse_devices(devices) if devices is not None else visible(), timeout
    )
    if as_json:
        print(json.dumps(report.to_json(), indent=1))
    else:
        show_report(report, _console())
    if not report.healthy:
        raise typer.Exit(1)


@app.command()
def schema(
    kind: Annotated[
        FileKind, typer.Argument(help="Of which files.", show_default=False)
    ],
) -> None:
    """Print the JSON schema of the files that autotune or plan writes."""
    print(
        json.dumps(
            (ClusterProfile if kind is FileKind.profile else Plan).schema(), indent=1
        )
    )


def _format(file: Path) -> str:
    try:
        return str(json.loads(file.read_text(encoding="utf-8")).get("format"))
    except (OSError, ValueError, AttributeError) as e:
        raise PlanError(f"{file}: cannot be read as a plan or a profile: {e}") from e


def _console() -> Console:
    """As wide as the terminal; what goes elsewhere has room for the names of layers."""
    return Console(width=None if sys.stdout.isatty() else PIPED)


def main() -> None:
    """Runs a command; what the user can mend is one line and exit status 2."""
    try:
        app()
    except HetConvError as e:
        print(f"hetconv: {e}", file=sys.stderr)
        sys.exit(2)
