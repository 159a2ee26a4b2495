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
from dataclasses import astuple, dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import torch
import triton

from bench.concat.launches import ConcatItem, concat_item_launch, concat_items
from bench.norms.launches import NormItem, norm_items, norm_launch
from hetconv.errors import KernelError
from hetconv.kernels import tiles
from hetconv.kernels.chip import CHIPS
from hetconv.kernels.epilogue import EpilogueSpec
from hetconv.kernels.launch import Launch, StridedLayout
from hetconv.kernels.tiles import GemmShape, Pass, Tile
from hetconv.kernels.triton import (
    concat,
    conv2d_parts,
    device_functions,
    dgrad,
    fprop,
    gemm_launch,
    implicit_gemm,
    wgrad,
)
from hetconv.kernels.triton.compile_report import Report, report
from hetconv.kernels.triton.norms import elementwise, statistics
from hetconv.kernels.triton.norms import tiles as norm_tiles
from hetconv.sharding.conv_spec import ITEMSIZE, ConvSpec

DTYPES = {
    "fp16": ("float16", "ieee"),
    "bf16": ("bfloat16", "ieee"),
    "tf32": ("float32", "tf32"),
    "fp32": ("float32", "ieee"),
}
PASSES: tuple[Pass, ...] = get_args(Pass)
COLUMNS = tuple(f.name for f in fields(Report))

Product = gemm_launch.ImplicitGemm | conv2d_parts.MultiInputGemm | wgrad.WeightGradient

BIAS = EpilogueSpec(has_shift=True)
COMPOSITE_ROWS = 960  # a multiple of every composite tile's


@dataclass(frozen=True)
class Case:
    """A convolution; ``filters``: of the layer, where K counts a slice of them.
    ``every``: paths all of whose tiles are compiled. ``parts``: of the input's
    channels, each in a tensor of its own; none where they are in one.
    """

    spec: ConvSpec
    passes: tuple[Pass, ...] = PASSES
    every: tuple[tiles.TileKind, ...] = ()
    filters: int | None = None
    split_k: int = 1
    epilogue: EpilogueSpec = BIAS
    residual: bool = False
    parts: tuple[int, ...] = ()


def _case(
    N: int, C: int, size: int, K: int, R: int, stride: int = 1, **more: Any
) -> Case:
    pads = (R // 2, R // 2)
    return Case(
        ConvSpec(N, C, (size, size), K, (R, R), (stride, stride), (pads, pads), (1, 1)),
        **more,
    )


FORWARD: tuple[Pass, ...] = ("forward",)
WEIGHT: tuple[Pass, ...] = ("weight gradient",)
CASES = {
    "3x3": _case(64, 256, 56, 256, 3, every=("tma", "pointer")),
    "3x3 of one image": _case(1, 256, 28, 256, 3, passes=WEIGHT, every=("tma",)),
    "3x3 of small images": _case(32, 256, 14, 256, 3, passes=WEIGHT, every=("tma",)),
    "3x3 of 48 filters": _case(64, 256, 56, 48, 3, filters=256),
    "3x3 of 160 filters": _case(64, 256, 56, 160, 3, filters=256),
    "3x3 of 192 filters": _case(64, 256, 56, 192, 3, filters=256, split_k=7),
    "3x3 of 320 filters, finished": _case(
        32,
        320,
        64,
        320,
        3,
        passes=("forward",),
        epilogue=EpilogueSpec(True, True, activation="silu"),
        residual=True,
    ),
    "3x3 in splits": _case(64, 256, 56, 256, 3, split_k=20),
    "3x3, finished": _case(
        64,
        256,
        56,
        256,
        3,
        passes=("forward",),
        epilogue=EpilogueSpec(True, True, activation="silu"),
        residual=True,
    ),
    "3x3 in splits, finished": _case(
        64,
        256,
        56,
        256,
        3,
        passes=("forward",),
        split_k=20,
        epilogue=EpilogueSpec(True, True, activation="relu"),
        residual=True,
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


AnyItem = Item | NormItem | ConcatItem


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
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(_lines(results), encoding="utf-8")
    print(json.dumps(results))


def all_items(
    archs: Sequence[int] = tuple(CHIPS), quick: bool = False
) -> list[AnyItem]:
    """What is compiled, in the order of the tables: convolutions, norms, concatenation."""
    of_norms, of_concat = norm_items(archs, quick), concat_items(archs, quick)
    return [*sorted(items(archs, quick)), *sorted(of_norms), *sorted(of_concat)]


def items(archs: Sequence[int] = tuple(CHIPS), quick: bool = False) -> Iterator[Item]:
    """Yields convolutions to compile: every tile that can be a default, every form.

    Args:
        archs: Compute capabilities, as 90 for 9.0.
        quick: Whether bf16 alone is compiled, and one tile for each form.
    """
    dtypes = ("bf16",) if quick else DTYPES
    for arch, dtype, (name, case) in product(archs, dtypes, CASES.items()):
        for what in case.passes:
            shape = product_of(case, what, dtype).shape
            best = _best_tile(shape, arch)
            chosen = str(replace(best, split_k=case.split_k))
            yield Item(arch, what, dtype, name, chosen)
            if case.split_k > 1:
                yield Item(arch, what, dtype, name, chosen, True)
            for kind in case.every if not quick else ():
                for tile in _every_tile(shape, arch, kind):
                    if tile != best:
                        yield Item(arch, what, dtype, name, str(tile))


def _every_tile(shape: GemmShape, arch: int, kind: tiles.TileKind) -> Iterator[Tile]:
    """Tiles of all shapes and depths, also of those that others would beat."""
    chip = CHIPS[arch]
    if kind == "tma" and not tiles.uses_tma(shape, chip):
        return
    deepest = (2 if kind == "tma" else 1) * tiles.STEP_BYTES
    depths = [k for k in (128, 64, 32, 16) if k * ITEMSIZE[shape.dtype] <= deepest]
    composite = replace(shape, m=COMPOSITE_ROWS)
    shapes = tiles.tile_shapes(shape, kind) + tiles.composite_shapes(composite, kind)
    yield from tiles.largest_stages(shape, chip, kind, depths, shapes)


def _best_tile(shape: GemmShape, arch: int) -> Tile:
    """The largest tile of those that pad least; of several inputs the default one."""
    chip = CHIPS[arch]
    if isinstance(
        shape, conv2d_parts.MultiInputShape
    ):  # fewer tiles do without a spill
        return conv2d_parts.default_tile(shape, chip)
    kind: tiles.TileKind = "tma" if tiles.uses_tma(shape, chip) else "pointer"
    shallowest = tiles.tile_depths(shape, kind)[-1:]
    shapes = tiles.tile_shapes(shape, kind) + tiles.composite_shapes(shape, kind)
    found = tiles.largest_stages(shape, chip, kind, shallowest, shapes)
    return min(found, key=shape.padded_results)


def launch_of(item: AnyItem) -> Launch:
    """Returns the launch of an item."""
    if isinstance(item, NormItem):
        return norm_launch(item)
    if isinstance(item, ConcatItem):
        return concat_item_launch(item)
    tile = Tile.parse(item.tile)
    gemm = product_of(CASES[item.case], item.what, item.dtype)
    if isinstance(gemm, wgrad.WeightGradient):
        found = wgrad.launches(gemm, tile)
    elif isinstance(gemm, conv2d_parts.MultiInputGemm):
        found = conv2d_parts.launches(gemm, tile)
    else:
        found = gemm_launch.launches(gemm, tile)
    return found.launches[-1 if item.of_sum else 0]


def product_of(case: Case, what: Pass, dtype: str) -> Product:
    """Returns a pass as a matrix product, on channels_last tensors.

    At stride 2 it is the phase of the input gradient that has most taps.

    Args:
        case: The convolution.
        what: The pass.
        dtype: One of `DTYPES`.
    """
    name, precision = DTYPES[dtype]
    spec = replace(case.spec, dtype=name)
    shapes = (spec.x_shape, spec.w_shape, spec.y_shape)
    x, w, y = (StridedLayout.packed(shape, name) for shape in shapes)
    if case.filters is not None:  # a slot beside those of other slices
        whole = (spec.N, case.filters, spec.P, spec.Q)
        y = y._replace(strides=StridedLayout.packed(whole, name).strides)
    if what == "weight gradient":
        return wgrad.weight_gradient(spec, x, w, y, precision)
    if what == "input gradient":
        phases = dgrad.phases(spec, y, w, x, precision)
        gemms = (phase.gemm for phase in phases if phase.gemm is not None)
        return max(gemms, key=lambda gemm: gemm.rows.count * gemm.cols.count)
    epilogue = case.epilogue._replace(residual=y) if case.residual else case.epilogue
    if case.parts:
        parts = tuple(
            StridedLayout.packed((spec.N, C, spec.H, spec.W), name) for C in case.parts
        )
        return conv2d_parts.forward(spec, parts, w, y, precision, epilogue)
    return fprop.forward(spec, x, w, y, precision, epilogue)


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
