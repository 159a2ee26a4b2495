"""Options that several commands have, and the console.

Importing this module and those of the commands imports no torch, which takes seconds:
a command imports what it needs when it is called.
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from platformdirs import user_data_path
from rich.console import Console

from hetconv.schemas.output_file import check_output

MAX_PIPED_COLUMNS = 160

# Whether an error in the user's code is shown with its whole traceback.
SHOW_TRACEBACK = ContextVar("show_traceback", default=False)

DEFAULT_PROFILE = user_data_path("hetconv") / "cluster.json"


class ModeName(StrEnum):
    """What a step is."""

    train = "train"
    infer = "infer"


class Dtype(StrEnum):
    """Data types that a model is brought to."""

    float32 = "float32"
    float64 = "float64"
    float16 = "float16"
    bfloat16 = "bfloat16"


Model = Annotated[
    str,
    typer.Option(
        metavar="MODULE:CALLABLE",
        help="What makes the model: package.module:callable or file.py:callable; or a model of "
        "random weights of torchvision, timm, diffusers or transformers, as in "
        "torchvision:resnet50, diffusers:AutoencoderKL or "
        "transformers:ResNetForImageClassification.",
        show_default=False,
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
        metavar="MODULE:CALLABLE",
        help="In place of --input, what makes the arguments: a callable as for --model "
        "that returns (args, kwargs).",
        show_default=False,
    ),
]

DtypeOption = Annotated[
    Dtype | None,
    typer.Option(
        "--dtype",
        help="What the model is converted to, and every --input that names no other.",
        show_default=False,
    ),
]


def _show_traceback(given: bool) -> None:
    SHOW_TRACEBACK.set(given)


Traceback = Annotated[
    bool,
    typer.Option(
        "--traceback",
        help="If the model raises an error, show all of its traceback.",
        callback=_show_traceback,
    ),
]

Mode = Annotated[
    ModeName,
    typer.Option(help="What a step is: forward and backward, or forward alone."),
]


def _checked(path: Path | None) -> Path | None:
    """Refuses what cannot be written before anything is measured or planned."""
    if path is not None:
        check_output(path)
    return path


def output_option(*names: str, help: str) -> Any:
    """Returns the option for a file that the command writes."""
    return typer.Option(*names, help=help, callback=_checked)


Seed = Annotated[int, typer.Option(help="Of weights, inputs and the study.")]


def make_console() -> Console:
    """Returns a console as wide as the terminal, or wide enough for names of layers."""
    return Console(width=None if sys.stdout.isatty() else MAX_PIPED_COLUMNS)
