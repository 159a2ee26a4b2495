"""``python -m bench pair``: see `bench.pair`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from bench import pair as pair_bench
from bench.cases import Stack
from hetconv.autotune.launch import parse_devices
from hetconv.errors import HetConvError

app = typer.Typer(
    help="Benchmarks of hetconv.", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


@app.callback()
def benchmarks() -> None:
    """Ratios measured side by side in one run; the last line of output is one JSON document."""


@app.command()
def pair(
    devices: Annotated[str, typer.Option(help="One per rank.")] = "cpu,cpu@0.5",
    size: Annotated[int, typer.Option(min=8, help="Height and width of the image.")] = Stack.size,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also write the results here.")] = None,
) -> None:
    """One device alone, an even split, the tuned split, and the tuned shares without communication."""
    pair_bench.run(parse_devices(devices), Stack(size=size), output)


if __name__ == "__main__":
    try:
        app()
    except HetConvError as e:
        print(f"bench: {e}", file=sys.stderr)
        sys.exit(2)
