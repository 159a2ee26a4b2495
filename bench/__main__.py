"""``python -m bench COMMAND``: each command is the module of its name."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import bench
from hetconv.errors import HetConvError

# The first line of each one's module, which is imported only to run: `kernels` needs no
# more than torch and triton.
COMMANDS = {
    "pair": "Time two unequal devices on one model: one alone, an even split, the tuned split.",
    "networks": "Time networks of public libraries on two equal ranks, against half of each alone.",
    "operators": "Time each operator on parts of an image, against the same on half of it.",
    "kernels": "Time Triton's convolution kernels against cuDNN's, after a check of their results.",
    "concat": "Concatenate channels and apply the epilogue in one pass, against torch's passes.",
    "norms": "Time norms of one part by Triton's passes against torch's fused norms.",
    "overlap": "Time messages that overlap with computation against messages that are waited for.",
    "tiles": "Time tiles of convolutions beside cuDNN, or fit the predicted time to such a file.",
    "overhead": "Time what Python costs per operator of a split model, and per call of a kernel.",
    "planner": "Plan known architectures on modelled devices: seconds to plan, predicted gain.",
    "autotune": "Autotune pairs of this machine: errors of prediction, gain of the plan.",
    "kills": "Kill or stop `hetconv autotune` at random moments: what was measured must survive.",
    "rebalance": "Slow one of two equal ranks while it trains, with and without a rebalancer.",
    "workers": "Time a VAE's decoder under Workers and on torchrun's ranks; start Workers often.",
    "one-rank": "Time a network split on one rank of a GPU against plain, eager and in graphs.",
    "gpu": "Run all that needs a GPU, in minutes: tests and benchmarks as separate processes.",
    "readme": "Writes the tables of README.md and of docs from the result files.",
    "compile": "Compile every tile for every GPU: registers, spills, instructions. No GPU needed.",
}
MODULES = {
    "compile": "bench.compile.suite",
    "concat": "bench.concat.suite",
    "gpu": "bench.gpu.suite",
    "kernels": "bench.kernels.suite",
    "norms": "bench.norms.suite",
    "one-rank": "bench.gpu.one_rank",
    "overhead": "bench.overhead.suite",
    "readme": "bench.shared.readme",
    "rebalance": "bench.rebalance.suite",
    "tiles": "bench.tiles.suite",
}
"""Modules of commands that do not have the command's name."""


def module_of(command: str) -> str:
    """The name of a command's module."""
    return MODULES.get(command, f"bench.{command}")


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
