"""Compile every tile for every GPU: registers, spills, instructions. No GPU needed.

Each tile is compiled for each pass, dtype and chip on one convolution; special forms
(stride 2, 1x1, slices of the filters, splits and their sum, 64-bit addresses, an
image's 3 channels) with the largest tile of those that pad least, and an image in parts
with its default one.
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
from dataclasses import astuple, dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import torch
import triton

from hetconv.errors import KernelError
from hetconv.kernels import tiles
from hetconv.kernels.epilogue import PLAIN, Finish
from hetconv.kernels.launch import CHIPS, Memory, Program, Recipe
from hetconv.kernels.tiles import Extents, Pass, Tile
from hetconv.kernels.triton import conv2d_parts, fprop, wgrad
from hetconv.kernels.triton.compile_report import Report, report
from hetconv.sharding.conv_spec import ITEMSIZE, Conv2dSpec

DTYPES = {
    "fp16": ("float16", "ieee"),
    "bf16": ("bfloat16", "ieee"),
    "tf32": ("float32", "tf32"),
    "fp32": ("float32", "ieee"),
}
PASSES: tuple[Pass, ...] = get_args(Pass)
COLUMNS = tuple(f.name for f in fields(Report))

Work = fprop.Correlation | conv2d_parts.Segments | wgrad.WeightGradient

BIAS = Finish(shifted=True)


@dataclass(frozen=True)
class Case:
    """A convolution; ``filters``: of the layer, where K counts a slice of them.
    ``every``: paths all of whose tiles are compiled. ``parts``: of the input's
    channels, each in a tensor of its own; none where they are in one.
    """

    spec: Conv2dSpec
    passes: tuple[Pass, ...] = PASSES
    every: tuple[tiles.Path, ...] = ()
    filters: int | None = None
    splits: int = 1
    finish: Finish = BIAS
    parts: tuple[int, ...] = ()


def _case(
    N: int, C: int, size: int, K: int, R: int, stride: int = 1, **more: Any
) -> Case:
    pads = (R // 2, R // 2)
    return Case(
        Conv2dSpec(N, C, size, size, K, R, R, (stride, stride), (pads, pads)), **more
    )


FORWARD: tuple[Pass, ...] = ("forward",)
WEIGHT: tuple[Pass, ...] = ("weight gradient",)
CASES = {
    "3x3": _case(64, 256, 56, 256, 3, every=("boxes", "pointers")),
    "3x3 of one image": _case(1, 256, 28, 256, 3, passes=WEIGHT, every=("boxes",)),
    "3x3 of small images": _case(32, 256, 14, 256, 3, passes=WEIGHT, every=("boxes",)),
    "3x3 of 48 filters": _case(64, 256, 56, 48, 3, filters=256),
    "3x3 of 160 filters": _case(64, 256, 56, 160, 3, filters=256),
    "3x3 in splits": _case(64, 256, 56, 256, 3, splits=20),
    "3x3, finished": _case(
        64, 256, 56, 256, 3, passes=("forward",), finish=Finish(True, True, "silu")
    ),
    "3x3 in splits, finished": _case(
        64,
        256,
        56,
        256,
        3,
        passes=("forward",),
        splits=20,
        finish=Finish(True, True, "relu"),
    ),
    "3x3 of 2**31 numbers": _case(1024, 256, 112, 256, 3),
    "3x3/2": _case(64, 256, 56, 256, 3, 2),
    "1x1": _case(64, 256, 56, 256, 1),
    "3x3 of parts": _case(64, 256, 56, 256, 3, passes=FORWARD, parts=(96, 160)),
    "3x3 of 3 parts": _case(
        64, 256, 56, 256, 3, passes=FORWARD, parts=(104, 88, 64)
    ),  # the last steps are masked
    "1x1 of parts": _case(64, 256, 56, 256, 1, passes=FORWARD, parts=(96, 160)),
    "7x7/2 of 3 channels": _case(
        64, 3, 224, 64, 7, 2, passes=("forward", "weight gradient")
    ),
}


@dataclass(frozen=True, order=True)
class Item:
    """One launch to compile: the first of the pass, or with ``of_sum`` the one that
    adds its splits.
    """

    arch: int
    what: Pass
    dtype: str
    case: str
    tile: str
    of_sum: bool = False

    def __str__(self) -> str:
        return (
            f"sm_{self.arch} {self.what}{', its sum' if self.of_sum else ''} {self.dtype} "
            f"{self.case} {self.tile}"
        )


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
        type=int,
        metavar="N",
        default=2,
        help="compilers at a time, 2 if not given",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="also write the results here"
    )


def run(args: Namespace) -> None:
    """Prints a line per launch, and the results as one JSON document last. Raises
    `KernelError` if one fails.
    """
    archs = args.archs.split(",")
    if args.workers < 1:
        raise KernelError(f"--workers {args.workers} compile nothing; give at least 1")
    if not set(archs) <= set(map(str, CHIPS)):
        raise KernelError(
            f"--archs {args.archs} is not known; give some of {','.join(map(str, CHIPS))}"
        )
    found = sorted(items(tuple(map(int, archs)), args.quick))
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
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(_lines(results), encoding="utf-8")
    print(json.dumps(results))


def items(archs: Sequence[int] = tuple(CHIPS), quick: bool = False) -> Iterator[Item]:
    """What is compiled for these chips: every tile that `tiles.default` can choose, and
    every form of a kernel.
    """
    for arch, dtype, (name, case) in product(
        archs, ("bf16",) if quick else DTYPES, CASES.items()
    ):
        for what in case.passes:
            work = work_of(case, what, dtype)[0]
            boxes = tiles.takes_boxes(work, CHIPS[arch])
            path: tiles.Path = "boxes" if boxes else "pointers"
            best = min(
                _tiles(work, arch, path, tiles.depths(work, path)[-1:]), key=work.padded
            )
            if isinstance(
                work, conv2d_parts.Segmented
            ):  # fewer tiles do without a spill
                best = conv2d_parts.default(work, CHIPS[arch])
            yield Item(arch, what, dtype, name, str(replace(best, splits=case.splits)))
            if case.splits > 1:
                yield Item(
                    arch,
                    what,
                    dtype,
                    name,
                    str(replace(best, splits=case.splits)),
                    True,
                )
            for path in case.every if not quick else ():
                depths = [k for k in (64, 32, 16) if k * ITEMSIZE[work.dtype] <= 128]
                every = (
                    _tiles(work, arch, path, depths)
                    if boxes or path == "pointers"
                    else ()
                )
                yield from (
                    Item(arch, what, dtype, name, str(t)) for t in every if t != best
                )


def _tiles(
    work: Extents, arch: int, path: tiles.Path, depths: Sequence[int]
) -> Iterator[Tile]:
    """With as many stages as fit, as `tiles.default` has them; larger first."""
    for (m, n, warps, stages), k in product(tiles.shapes(work, path), depths):
        some = (Tile(path, m, n, k, warps, s) for s in range(stages, 1, -1))
        yield from [t for t in some if tiles.fits(t, work, CHIPS[arch])][:1]


def recipe(item: Item) -> Recipe:
    tile = Tile.parse(item.tile)
    correlation: Any = work_of(CASES[item.case], item.what, item.dtype)[1]
    if isinstance(correlation, wgrad.WeightGradient):
        program: Program = wgrad.program(correlation, tile)
    elif isinstance(correlation, conv2d_parts.Segments):
        program = conv2d_parts.program(correlation, tile, CASES[item.case].finish)
    else:
        program = fprop.program(
            correlation,
            tile,
            CASES[item.case].finish if item.what == "forward" else PLAIN,
        )
    return program.recipes[-1 if item.of_sum else 0]


def work_of(case: Case, what: Pass, dtype: str) -> tuple[Extents, Work]:
    """The pass on channels_last tensors; at stride 2 the phase of the input gradient
    that has most taps.
    """
    name, precision = DTYPES[dtype]
    spec = replace(case.spec, dtype=name)
    x, w, y = (_memory(s, name) for s in (spec.x_shape, spec.w_shape, spec.y_shape))
    if case.filters is not None:  # a slot beside those of other slices
        y = y._replace(
            strides=_memory((spec.N, case.filters, spec.P, spec.Q), name).strides
        )
    if what == "weight gradient":
        d = wgrad.weight_gradient(spec, x, w, y, precision)
        return d.extents, d
    if case.parts:
        lying = tuple(_memory((spec.N, C, spec.H, spec.W), name) for C in case.parts)
        s = conv2d_parts.forward(spec, lying, w, y, precision)
        return s.extents, s
    if what == "forward":
        c = fprop.forward(
            spec, x, w, y, precision, y if case.finish.activation else None
        )
    else:
        parts = (p.correlation for p in fprop.phases(spec, y, w, x, precision))
        c = max(
            (p for p in parts if p is not None),
            key=lambda p: p.rows.count * p.cols.count,
        )
    return c.extents, c


def _memory(shape: tuple[int, int, int, int], dtype: str) -> Memory:
    _, C, H, W = shape
    return Memory(shape, (C * H * W, 1, W * C, C), dtype)


def compiled(found: Sequence[Item], workers: int) -> dict[Item, Report]:
    reports: dict[Item, Report] = {}
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


def compile_one(item: Item) -> Report:
    return report(recipe(item), DTYPES[item.dtype][0], item.arch)


def digest(found: Sequence[Item]) -> str:
    """Hash of all that the compiler is given: the kernels' code and every launch.

    It tells whether a table was made from other kernels. Comments, docstrings and line
    breaks do not change it.
    """
    recipes = [recipe(item) for item in found]
    sources = sorted({_code(r.kernel.fn) for r in recipes})
    launches = [
        (str(i), r.scalars, r.constants, r.descriptors)
        for i, r in zip(found, recipes, strict=True)
    ]
    return hashlib.sha256(repr((sources, launches)).encode()).hexdigest()[:16]


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
