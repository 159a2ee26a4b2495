"""What `bench compile` compiles: convolutions and the launches of their passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, get_args

from bench.concat.launches import ConcatItem, concat_item_launch
from bench.norms.launches import NormItem, norm_launch
from hetconv.kernels import tiles
from hetconv.kernels.chip import CHIPS
from hetconv.kernels.epilogue import EpilogueSpec
from hetconv.kernels.launch import Launch, StridedLayout
from hetconv.kernels.tiles import GemmShape, Pass, Tile
from hetconv.kernels.triton import (
    conv2d_parts,
    dgrad,
    fprop,
    gemm_launch,
    wgrad,
)
from hetconv.kernels.triton.compile_report import Report
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
