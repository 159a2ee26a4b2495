"""Options that several commands have, and the console."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated

import typer
from platformdirs import user_data_path
from rich.console import Console

MAX_PIPED_COLUMNS = 160

DEFAULT_PROFILE = user_data_path("hetconv") / "cluster.json"


class ModeName(StrEnum):
    """What a step is."""

    train = "train"
    infer = "infer"


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


def make_console() -> Console:
    """Returns a console as wide as the terminal, or wide enough for names of layers."""
    return Console(width=None if sys.stdout.isatty() else MAX_PIPED_COLUMNS)
