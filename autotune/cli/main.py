"""The command line: an entry for each command of ``hetconv``."""

from __future__ import annotations

import json
import sys
import traceback
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hetconv.errors import HetConvError, PlanError

from .autotune_command import autotune
from .options import SHOW_TRACEBACK, make_console, output_option
from .plan_command import plan
from .report_command import report

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(autotune)
app.command()(plan)
app.command()(report)


def _show_version(given: bool) -> None:
    if given:
        from hetconv import __version__

        print(f"hetconv {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def show_help(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version.",
            callback=_show_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Model-parallel convolution on devices of unequal speed."""
    if context.invoked_subcommand is None:
        print(context.get_help())


class FileKind(StrEnum):
    """Kinds of files that have a schema."""

    profile = "profile"
    plan = "plan"


@app.command("devices")
def list_devices() -> None:
    """List the devices and links that a plan can be made for without having them."""
    from .devices import show_devices

    show_devices(make_console())


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
) -> None:
    """Show a plan or a profile as a table."""
    from hetconv.schemas.cluster_profile import ClusterProfile
    from hetconv.schemas.plan import Plan

    from .show import show_gathers, show_layer, show_plan, show_profile

    console = make_console()
    options = {"--gathers": gathers or None, "--layer": layer}
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
    else:
        show_plan(Plan.load(file), console)


@app.command()
def diff(
    first: Annotated[Path, typer.Argument(help="A plan.", show_default=False)],
    second: Annotated[Path, typer.Argument(help="Another plan.", show_default=False)],
) -> None:
    """Show where two plans differ.

    Exit status is 0 if they do not differ, 1 if they do, 2 if one cannot be read.
    """
    from hetconv.schemas.plan import Plan

    from .diff import show_diff

    if show_diff(Plan.load(first), Plan.load(second), make_console()):
        raise typer.Exit(1)


@app.command()
def merge(
    files: Annotated[
        list[Path],
        typer.Argument(help="Profiles that autotune wrote.", show_default=False),
    ],
    output: Annotated[
        Path,
        output_option("--output", "-o", help="The profile to write."),
    ],
    between: Annotated[
        str | None,
        typer.Option(
            help="Joins hosts between which nothing was measured, as in ethernet-100g."
        ),
    ] = None,
) -> None:
    """Write one profile of several.

    The newest measurement of each device counts; devices of several hosts become one
    cluster.
    """
    from hetconv.schemas.cluster_profile import ClusterProfile

    from .merge import merge as merge_profiles
    from .outdated import stale
    from .show import show_profile

    merged, left_out = merge_profiles(
        {str(file): ClusterProfile.load(file) for file in files}, between
    )
    merged.save(output)
    show_profile(merged, make_console())
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
    """Show the devices, and try which backends connect which of them.

    Exit status is 0 if each pair has a backend that works, 1 if one has none, 2 if a
    device is not there.
    """
    from hetconv.autotune.launch.launcher import parse_devices

    from .doctor import examine, show_report, visible

    report = examine(
        parse_devices(devices) if devices is not None else visible(), timeout
    )
    if as_json:
        print(json.dumps(report.to_json(), indent=1))
    else:
        show_report(report, make_console())
    if not report.healthy:
        raise typer.Exit(1)


@app.command()
def schema(
    kind: Annotated[
        FileKind, typer.Argument(help="Of which files.", show_default=False)
    ],
) -> None:
    """Print the JSON schema of the files that autotune or plan writes."""
    from hetconv.schemas.cluster_profile import ClusterProfile
    from hetconv.schemas.plan import Plan

    print(
        json.dumps(
            (ClusterProfile if kind is FileKind.profile else Plan).schema(), indent=1
        )
    )


def _format(file: Path) -> str:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise PlanError(f"{file}: cannot be read as a plan or a profile: {e}") from e
    if isinstance(document, dict):
        kind, given = document.get("format"), f"format {document.get('format')!r}"
    else:
        kind, given = None, f"a {type(document).__name__}"
    if kind not in ("hetconv-profile", "hetconv-plan"):
        raise PlanError(
            f"{file} is neither a plan nor a profile: it holds {given}, not an object of "
            "format 'hetconv-plan' or 'hetconv-profile'; give a file that hetconv plan or "
            "hetconv autotune wrote"
        )
    return str(kind)


def main() -> None:
    """Runs a command. An error that the user can mend is one line, and exit status 2."""
    try:
        app()
    except HetConvError as e:
        _show_error(e)
        sys.exit(2)


def _show_error(error: HetConvError) -> None:
    from hetconv.autotune.models.user_code import UserCodeError

    hidden = isinstance(error, UserCodeError) and not SHOW_TRACEBACK.get()
    hint = " (add --traceback to see all of its traceback)" if hidden else ""
    print(f"hetconv: {error}{hint}", file=sys.stderr)
    if isinstance(error, UserCodeError) and not hidden:
        traceback.print_exception(error.__cause__)
