"""``python -m bench COMMAND``: each command is the module of its name."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import bench
from hetconv.errors import HetConvError

# The first line of each one's module, which is imported only to run: `kernels` needs no more than torch and triton.
COMMANDS = {
    "pair": "Two unequal devices on a fixed stack of convolutions: "
    "one alone, an even split, the tuned one, and its bound.",
    "kernels": "Triton's kernels against cuDNN on the GPU at hand: "
    "first whether they are right, then how fast both are, in turn.",
    "concat": "Channels joined and finished in one pass against torch's passes: "
    "first whether right, then how fast, in turn.",
    "overlap": "Messages that travel while a device computes against the same ones waited for: "
    "halos, buckets, and chunks.",
    "overhead": "What running on parts costs in Python, per operator: "
    "tiny models on one rank, split and plain, in turn.",
    "planner": "What a plan takes to compute, and what it is predicted to gain: "
    "known architectures on modelled devices.",
    "autotune": "What hetconv autotune finds on pairs of this machine: "
    "how well its profile predicts, and what its plan gains.",
    "kills": "`hetconv autotune`, killed at random moments: "
    "what was measured stays, every file is valid, no process is left.",
    "gpu": "Everything worth doing while a GPU is at hand, in minutes: "
    "stages in processes of their own, a table of them last.",
    "readme": "Writes the tables of README.md and docs/predictions.md from the result files.",
    "compile": "What the compiler makes of every tile that can be chosen, without a GPU: "
    "registers, spills, instructions.",
}  # fmt: skip


def module_of(command: str) -> str:
    """The name of a command's module."""
    return "bench.shared.readme" if command == "readme" else f"bench.{command}"


def main(arguments: Sequence[str]) -> None:
    """Runs a command; exits with status 2 where what it is given does not fit."""
    parser = ArgumentParser(prog="python -m bench", description=bench.__doc__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    module: Any = None
    for name, line in COMMANDS.items():
        command = commands.add_parser(name, help=line, description=line)
        if arguments[:1] == [name]:
            module = import_module(module_of(name))
            module.add_arguments(command)
    if not arguments:
        parser.print_help(sys.stderr)
        sys.exit(2)
    args = parser.parse_args(arguments)
    try:
        module.run(args)
    except HetConvError as e:
        print(f"bench: {e}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
