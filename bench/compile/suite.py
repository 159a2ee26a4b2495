"""Compile every tile for every GPU: registers, spills, instructions. No GPU needed.

Each tile is compiled for each pass, dtype and chip on one convolution; special forms
(stride 2, 1x1, slices of the filters, splits and their sum, 64-bit addresses, an
image's 3 channels) with the largest tile of those that pad least, and an image in parts
with its default one. The passes of norms and the concatenation of channels, which have
no tiles, are compiled as well.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import multiprocessing
import os
import platform
import sys
import textwrap
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import astuple, fields
from typing import Any

import torch
import triton

from bench.concat.launches import concat_items
from bench.norms.launches import norm_items
from bench.shared.machine import add_output_argument
from bench.shared.selection import whole_number
from hetconv.errors import KernelError
from hetconv.kernels.chip import CHIPS
from hetconv.kernels.triton import (
    concat,
    device_functions,
    implicit_gemm,
    wgrad,
)
from hetconv.kernels.triton.compile_report import Report, report
from hetconv.kernels.triton.norms import elementwise, statistics
from hetconv.kernels.triton.norms import tiles as norm_tiles
from hetconv.schemas.output_file import write

from .cases import DTYPES, AnyItem, items, launch_of

COLUMNS = tuple(f.name for f in fields(Report))


def add_arguments(parser: ArgumentParser) -> None:
    archs = ",".join(map(str, CHIPS))
    parser.add_argument(
        "--archs",
        default=archs,
        metavar="LIST",
        help="compute capabilities (default: %(default)s)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="bf16 alone, and a tile per form"
    )
    parser.add_argument(
        "--workers",
        type=whole_number(1),
        metavar="N",
        default=2,
        help="compilers at a time, 2 if not given",
    )
    add_output_argument(parser)


def run(args: Namespace) -> None:
    """Prints a line per launch, and the results as one JSON document last. Raises
    `KernelError` if one fails.
    """
    archs = args.archs.split(",")
    if not set(archs) <= set(map(str, CHIPS)):
        raise KernelError(
            f"--archs {args.archs} is not known; give some of {','.join(map(str, CHIPS))}"
        )
    found = all_items(tuple(map(int, archs)), args.quick)
    before = digest(found)
    reports = compiled(found, args.workers)
    if digest(found) != before:
        raise KernelError(
            "the kernels were changed while they were compiled; run this again"
        )
    width = max(len(str(i)) for i in found)
    print(" " * width, *COLUMNS)
    for item in found:
        print(
            f"{item!s:{width}}",
            *(
                f"{v:{len(c)}}"
                for c, v in zip(COLUMNS, astuple(reports[item]), strict=True)
            ),
        )
    setup = {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }
    entries = {str(item): list(astuple(reports[item])) for item in found}
    results = {
        "suite": "compile",
        "setup": setup | {"digest": before},
        "columns": COLUMNS,
        "entries": entries,
    }
    if args.output is not None:
        write(args.output, _lines(results).encode())
    print(json.dumps(results))


def all_items(
    archs: Sequence[int] = tuple(CHIPS), quick: bool = False
) -> list[AnyItem]:
    """What is compiled, in the order of the tables: convolutions, norms, concatenation."""
    of_norms, of_concat = norm_items(archs, quick), concat_items(archs, quick)
    return [*sorted(items(archs, quick)), *sorted(of_norms), *sorted(of_concat)]


def compiled(found: Sequence[AnyItem], workers: int) -> dict[AnyItem, Report]:
    reports: dict[AnyItem, Report] = {}
    failed = []
    with (
        _compiling(),
        ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool,
    ):
        waiting = {pool.submit(compile_one, item): item for item in found}
        for done, future in enumerate(as_completed(waiting), 1):
            item = waiting[future]
            try:
                reports[item] = future.result()
            except Exception as e:
                failed.append(f"{item}: {type(e).__name__}: {e}")
            if done % 25 == 0 or done == len(found):
                print(f"{done} of {len(found)} compiled", file=sys.stderr, flush=True)
    if failed:
        raise KernelError(
            f"{len(failed)} of {len(found)} did not compile:\n" + "\n".join(failed)
        )
    return reports


@contextmanager
def _compiling() -> Iterator[None]:
    """Processes that start meanwhile do not run Triton's interpreter, which compiles nothing."""
    before = os.environ.pop("TRITON_INTERPRET", None)
    try:
        yield
    finally:
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before


def compile_one(item: AnyItem) -> Report:
    return report(launch_of(item), DTYPES[item.dtype][0], item.arch)


def digest(found: Sequence[AnyItem]) -> str:
    """Hash of all that the compiler is given: the kernels' code and every launch.

    It tells whether a table was made from other kernels. Comments, docstrings and line
    breaks do not change it.
    """
    launches = [launch_of(item) for item in found]
    modules = (
        device_functions,
        implicit_gemm,
        wgrad,
        norm_tiles,
        statistics,
        elementwise,
        concat,
    )
    helpers = [f for m in modules for f in vars(m).values() if hasattr(f, "fn")]
    functions = {launch.kernel.fn for launch in launches} | {f.fn for f in helpers}
    sources = sorted(_code(function) for function in functions)
    arguments = [
        (str(i), launch.scalars, launch.constants, launch.descriptors)
        for i, launch in zip(found, launches, strict=True)
    ]
    return hashlib.sha256(repr((sources, arguments)).encode()).hexdigest()[:16]


def _code(function: Any) -> str:
    """Syntax tree of a function without its docstring."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    (definition,) = tree.body
    assert isinstance(definition, ast.FunctionDef)
    if ast.get_docstring(definition) is not None:
        del definition.body[0]
    return ast.dump(tree)


def _lines(results: dict[str, Any]) -> str:
    """JSON with a line per entry."""
    head = json.dumps({k: v for k, v in results.items() if k != "entries"})
    rows = ",\n".join(
        f"{json.dumps(k)}: {json.dumps(v)}" for k, v in results["entries"].items()
    )
    return f'{head[:-1]}, "entries": {{\n{rows}\n}}}}\n'
