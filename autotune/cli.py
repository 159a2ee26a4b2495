"""The command line: ``hetconv autotune``, ``hetconv plan``, ``hetconv show``."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from platformdirs import user_data_path
from rich.console import Console

from hetconv.errors import HetConvError, PlanError
from hetconv.plan import Plan
from hetconv.planner import make_plan
from hetconv.profile import ClusterProfile
from hetconv.recorder import capture
from hetconv.rules import KINDS

from .launch import parse_devices, run_on
from .models import build_model, parse_shape, random_input
from .show import show_gathers, show_plan, show_profile
from .tune import Job, tune

app = typer.Typer(
    help="Model-parallel convolution on devices of unequal speed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
DEFAULT_PROFILE = user_data_path("hetconv") / "cluster.json"


class ModeName(StrEnum):
    train = "train"
    infer = "infer"


Model = Annotated[str, typer.Option(help="What makes the model: package.module:callable.", show_default=False)]
ModelArgs = Annotated[str, typer.Option(help="Its arguments: a JSON object or list.")]
Input = Annotated[str, typer.Option(help="Shape of the input, as in 1x3x256x256.", show_default=False)]
Mode = Annotated[ModeName, typer.Option(help="What a step is: forward and backward, or forward alone.")]
Seed = Annotated[int, typer.Option(help="Of weights, inputs and the study.")]


@app.command()
def autotune(
    devices: Annotated[str, typer.Option(help="One per rank: cuda:0,cuda:1 or cpu,cpu@0.5 (emulated at half speed).")],
    model: Model,
    input: Input,
    model_args: ModelArgs = "{}",
    mode: Mode = ModeName.train,
    trials: Annotated[int, typer.Option(min=0, help="Split ratios to try on whole steps.")] = 12,
    budget: Annotated[
        float, typer.Option(min=1, help="Seconds, about; for operators, ratios, and on GPUs tiles.")
    ] = 120,
    output: Annotated[Path, typer.Option("--output", "-o", help="The profile to write.")] = DEFAULT_PROFILE,
    seed: Seed = 0,
) -> None:
    """Measure the devices and links, refine the split ratio, and write the cluster's profile.

    Starts one local rank per device, or uses torchrun's where RANK is set.
    """
    named = parse_devices(devices)
    shape = parse_shape(input)
    capture(
        build_model(model, model_args, seed), random_input(shape, seed)
    )  # what is wrong is said before a rank starts
    job = Job(tuple(named), model, model_args, shape, mode.value, trials, budget, output.resolve(), seed)
    run_on(named, tune, job)


@app.command()
def plan(
    model: Model,
    input: Input,
    model_args: ModelArgs = "{}",
    profile: Annotated[Path, typer.Option(help="The profile that autotune wrote.")] = DEFAULT_PROFILE,
    mode: Mode = ModeName.train,
    kinds: Annotated[str, typer.Option(help=f"The only kinds to use, of {','.join(KINDS)}.")] = ",".join(KINDS),
    memory_limit: Annotated[float | None, typer.Option(help="GB per device; the profile's by default.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The plan to write.")] = Path("plan.json"),
    seed: Seed = 0,
) -> None:
    """Choose how to cut every layer, and write the plan."""
    built = build_model(model, model_args, seed).train(mode is ModeName.train)
    with torch.set_grad_enabled(mode is ModeName.train):
        graph = capture(built, random_input(parse_shape(input), seed))
    limit = memory_limit * 1e9 if memory_limit is not None else None
    chosen: Any = tuple(kinds.split(","))
    made = make_plan(graph, ClusterProfile.load(profile), mode=mode.value, memory_limit=limit, kinds=chosen)
    made.save(output)
    show_plan(made, Console())
    print(f"wrote {output}")


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="A plan or a profile.", show_default=False)],
    gathers: Annotated[bool, typer.Option("--gathers", help="Only what a plan runs on gathered tensors.")] = False,
) -> None:
    """Show a plan or a profile as a table."""
    console = Console()
    if _format(file) == "hetconv-profile":
        if gathers:
            raise PlanError(f"{file} is a profile, which gathers nothing; give a plan with --gathers")
        show_profile(ClusterProfile.load(file), console)
    elif gathers:
        show_gathers(Plan.load(file), console)
    else:
        show_plan(Plan.load(file), console)


def _format(file: Path) -> str:
    try:
        return str(json.loads(file.read_text(encoding="utf-8")).get("format"))
    except (OSError, ValueError, AttributeError) as e:
        raise PlanError(f"{file}: cannot be read as a plan or a profile: {e}") from e


def main() -> None:
    """Runs a command; what the user can mend is one line and exit status 2."""
    try:
        app()
    except HetConvError as e:
        print(f"hetconv: {e}", file=sys.stderr)
        sys.exit(2)
