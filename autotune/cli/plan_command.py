"""``hetconv plan``: makes a plan from a profile, or from data sheets."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetconv.errors import ProfileError
from hetconv.sharding.split import KINDS

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

if TYPE_CHECKING:
    from hetconv.schemas.cluster_profile import ClusterProfile
    from hetconv.schemas.plan import Plan


def plan(
    model: Model,
    input: Input = None,
    inputs: Inputs = None,
    model_args: ModelArgs = "{}",
    dtype: DtypeOption = None,
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
        float | None,
        typer.Option(min=0.001, help="GB per device; the profile's by default."),
    ] = None,
    output: Annotated[
        Path, output_option("--output", "-o", help="The plan to write.")
    ] = Path("plan.json"),
    trace: Annotated[
        Path | None,
        output_option(
            "--trace",
            help="Also write the simulated step, to be opened at ui.perfetto.dev.",
        ),
    ] = None,
    seed: Seed = 0,
    traceback: Traceback = False,
) -> None:
    """Choose how to cut every layer, and write the plan."""
    from hetconv.autotune.models.build import build_model, trace_model
    from hetconv.autotune.models.inputs import InputSpec
    from hetconv.planner.make_plan import make_plan

    from .show import show_plan

    cluster = _cluster(profile, devices, link, between)
    asked = InputSpec.parse(input or (), inputs, dtype)
    built = build_model(model, model_args, seed, dtype)
    graph = trace_model(built, asked.make(seed), mode is ModeName.train)
    limit = memory_limit * 1e9 if memory_limit is not None else None
    chosen: Any = tuple(kinds.split(","))
    made = make_plan(graph, cluster, mode=mode.value, memory_limit=limit, kinds=chosen)
    made.save(output)
    show_plan(made, make_console())
    if devices is not None:
        print(", ".join(f"{what} {name}" for what, name in cluster.fingerprint.items()))
    print(f"wrote {output}")
    if trace is not None:
        write_trace(trace, made)
        print(f"wrote {trace}")


def _cluster(
    profile: Path | None, devices: str | None, link: str | None, between: str | None
) -> ClusterProfile:
    """What was measured, or put together from the catalogue."""
    from hetconv.autotune.measure.device_info import here
    from hetconv.schemas.cluster_profile import ClusterProfile

    from .outdated import stale

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


def write_trace(path: Path, plan: Plan) -> None:
    """Writes the simulated step of a plan as a Chrome trace.

    Args:
        path: the file.
        plan: a plan that `make_plan` made.
    """
    from hetconv.cost.timeline import chrome_trace
    from hetconv.schemas.output_file import write

    events = plan.timeline.events() if plan.timeline is not None else ()
    write(path, (json.dumps(chrome_trace(plan.devices, events)) + "\n").encode())
