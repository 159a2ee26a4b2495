"""The three passes of a convolution on tensors by Triton, decided once per signature."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from hetconv.errors import KernelError
from hetconv.kernels.checks import check_channels_contiguous
from hetconv.kernels.chip import Chip, chip_of
from hetconv.kernels.epilogue import IDENTITY, Epilogue
from hetconv.kernels.launch import (
    VECTOR_BYTES,
    LaunchSequence,
    StridedLayout,
    krsc,
    nhwc,
)
from hetconv.kernels.tiles import GemmShape, Tile, default_tile, fits
from hetconv.sharding.conv_spec import ConvSpec

from . import dgrad, fprop, gemm_launch, wgrad

T = TypeVar("T")
Tiles = tuple[Tile | None, ...]
"""Tiles in the order in which they are tried; None is the default one."""
Alignments = tuple[int, ...]
RunAgain = Callable[[dict[str, Tensor]], None]


class Forward:
    """Forward pass on tensors of one signature: shapes, strides, data type and device.

    Args:
        spec: The convolution.
        x: Input of the signature, as are w and out; their numbers are not read.
        w: Filters.
        out: Tensor that receives the result, if any.
        precision: "tf32" or "ieee", how float32 is multiplied.
        tiles: Tiles of the kernel, of which the first one that runs is taken.

    Raises:
        KernelError: Out's channels lie apart.
    """

    def __init__(
        self,
        spec: ConvSpec,
        x: Tensor,
        w: Tensor,
        out: Tensor | None,
        precision: str,
        tiles: Tiles,
    ):
        check_channels_contiguous(out)
        self._spec, self._precision, self._tiles = spec, precision, tiles
        self._converts_x, self._converts_w = nhwc(x) is not x, krsc(w) is not w
        self._y = StridedLayout.packed(spec.y_shape, spec.dtype)
        self._is_empty = 0 in (*spec.y_shape, *spec.w_shape)
        self._launches: dict[Alignments, RunAgain] = {}

    def __call__(
        self,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        epilogue: Epilogue,
        out: Tensor | None,
    ) -> Tensor:
        """Returns the forward pass.

        Args:
            x: Input.
            w: Filters.
            bias: Bias, if any.
            epilogue: What is applied to the convolution.
            out: Tensor that receives the result, if any.

        Raises:
            KernelError: No tile can compute this.
        """
        x = nhwc(x) if self._converts_x else x
        w = krsc(w) if self._converts_w else w
        y = out
        if y is None:
            y = x.new_empty_strided(self._y.shape, self._y.strides)
        if self._is_empty:
            epilogue = epilogue.with_bias(bias)
            return y.copy_(epilogue.apply(y.zero_())) if y.numel() else y
        tensors = {"x": x, "w": w, "y": y}
        if epilogue is not IDENTITY:
            epilogue = epilogue.with_bias(bias).for_triton()
            tensors |= epilogue.tensors
        elif bias is not None:
            epilogue = Epilogue(shift=bias.contiguous())
            tensors |= epilogue.tensors
        key = _alignments(*tensors.values())
        launch = self._launches.get(key)
        if launch is not None:
            launch(tensors)
        else:
            sequence = self._sequence(x, w, y, epilogue)
            self._launches[key] = sequence.run_first(tensors)
        return y

    def _sequence(
        self, x: Tensor, w: Tensor, y: Tensor, epilogue: Epilogue
    ) -> LaunchSequence:
        layouts = StridedLayout.of(x), StridedLayout.of(w), StridedLayout.of(y)
        gemm = fprop.forward(self._spec, *layouts, self._precision, epilogue.spec)
        chip = chip_of(x.device)
        return by_first_tile(
            self._tiles,
            lambda t: gemm_launch.launches(gemm, usable_tile(t, gemm.shape, chip)),
        )


class InputGradient:
    """Gradient of the input of tensors with one signature.

    Args:
        spec: See `Forward`, as are the other arguments.
        g: Gradient of the result.
        w: Filters.
    """

    def __init__(
        self, spec: ConvSpec, g: Tensor, w: Tensor, precision: str, tiles: Tiles
    ):
        self._spec, self._precision, self._tiles = spec, precision, tiles
        self._converts_g, self._converts_w = nhwc(g) is not g, krsc(w) is not w
        self._dx = StridedLayout.packed(spec.x_shape, spec.dtype)
        self._is_zero = 0 in (*spec.x_shape, *spec.y_shape)
        self._launches: dict[Alignments, tuple[bool, list[RunAgain]]] = {}

    def __call__(self, g: Tensor, w: Tensor) -> Tensor:
        """Returns the gradient of the input.

        Raises:
            KernelError: No tile can compute this.
        """
        g = nhwc(g) if self._converts_g else g
        w = krsc(w) if self._converts_w else w
        dx = g.new_empty_strided(self._dx.shape, self._dx.strides)
        if self._is_zero:
            return dx.zero_()
        tensors = {"x": g, "w": w, "y": dx}
        key = _alignments(g, w, dx)
        known = self._launches.get(key)
        if known is None:
            self._launches[key] = self._run_first(tensors)
            return dx
        is_covered, launches = known
        if not is_covered:
            dx.zero_()
        for launch in launches:
            launch(tensors)
        return dx

    def _run_first(self, tensors: dict[str, Tensor]) -> tuple[bool, list[RunAgain]]:
        """Whether the launches write all of the gradient, and those of its phases."""
        g, w, dx = tensors["x"], tensors["w"], tensors["y"]
        layouts = StridedLayout.of(g), StridedLayout.of(w), StridedLayout.of(dx)
        phases = dgrad.phases(self._spec, *layouts, self._precision)
        gemms = [(p.gemm, p.slices) for p in phases if p.gemm is not None]
        chip = chip_of(g.device)

        def sequences(tile: Tile | None) -> list[LaunchSequence]:
            return [
                gemm_launch.launches(gemm, usable_tile(tile, gemm.shape, chip), slices)
                for gemm, slices in gemms
            ]

        found = by_first_tile(self._tiles, sequences)
        is_covered = len(gemms) == len(phases)
        if not is_covered:
            dx.zero_()
        return is_covered, [sequence.run_first(tensors) for sequence in found]


class WeightGradient:
    """Gradient of the filters of tensors with one signature.

    Args:
        spec: See `Forward`, as are the other arguments.
        g: Gradient of the result.
        x: Input.
    """

    def __init__(
        self, spec: ConvSpec, g: Tensor, x: Tensor, precision: str, tiles: Tiles
    ):
        self._spec, self._precision, self._tiles = spec, precision, tiles
        self._converts_g, self._converts_x = nhwc(g) is not g, nhwc(x) is not x
        self._dw = StridedLayout.packed(spec.w_shape, spec.dtype)
        self._is_zero = 0 in (*spec.x_shape, *spec.w_shape, *spec.y_shape)
        self._launches: dict[Alignments, RunAgain] = {}

    def __call__(self, g: Tensor, x: Tensor) -> Tensor:
        """Returns the gradient of the filters.

        Raises:
            KernelError: No tile can compute this.
        """
        g = nhwc(g) if self._converts_g else g
        x = nhwc(x) if self._converts_x else x
        dw = x.new_empty_strided(self._dw.shape, self._dw.strides)
        if self._is_zero:
            return dw.zero_()
        tensors = {"x": x, "g": g, "dw": dw}
        key = _alignments(g, x, dw)
        launch = self._launches.get(key)
        if launch is not None:
            launch(tensors)
        else:
            self._launches[key] = self._sequence(g, x).run_first(tensors)
        return dw

    def _sequence(self, g: Tensor, x: Tensor) -> LaunchSequence:
        of_g, of_x = StridedLayout.of(g), StridedLayout.of(x)
        gradient = wgrad.weight_gradient(
            self._spec, of_x, self._dw, of_g, self._precision
        )
        chip = chip_of(x.device)
        return by_first_tile(
            self._tiles,
            lambda t: wgrad.launches(gradient, usable_tile(t, gradient.shape, chip)),
        )


def forward_tile(
    spec: ConvSpec, x: Tensor, w: Tensor, precision: str, tiles: Tiles
) -> Tile:
    """Returns the tile by which `Forward` computes a packed result without epilogue.

    Args:
        spec: See `Forward`, as are the other arguments.
        x: Input as `nhwc` returns it.
        w: Filters as `krsc` returns them.

    Raises:
        KernelError: No tile can compute this.
    """
    y = StridedLayout.packed(spec.y_shape, spec.dtype)
    layouts = StridedLayout.of(x), StridedLayout.of(w), y
    shape = fprop.forward(spec, *layouts, precision).shape
    chip = chip_of(x.device)
    return by_first_tile(tiles, lambda tile: usable_tile(tile, shape, chip))


def by_first_tile(tiles: Tiles, build: Callable[[Tile | None], T]) -> T:
    """Returns what is built with the first tile that can compute something.

    Args:
        tiles: Tiles in the order in which they are tried.
        build: Function of a tile, which raises `KernelError` for one that cannot.

    Raises:
        KernelError: None of the tiles can.
    """
    *preferred, last = tiles
    for tile in preferred:
        try:
            return build(tile)
        except KernelError:
            continue
    return build(last)


def _alignments(*tensors: Tensor) -> Alignments:
    """Returns what launches depend on beside a signature."""
    return tuple([t.data_ptr() % VECTOR_BYTES for t in tensors])


def is_usable(tile: Tile, shape: GemmShape, chip: Chip) -> bool:
    """Returns whether a tile can compute a matrix product, see `usable_tile`."""
    try:
        return usable_tile(tile, shape, chip) == tile
    except KernelError:
        return False


def usable_tile(tile: Tile | None, shape: GemmShape, chip: Chip) -> Tile:
    """Returns the tile that was asked for, or the default one.

    Args:
        tile: Tile that was asked for, if any.
        shape: Matrix product that is computed.
        chip: GPU that computes it.

    Raises:
        KernelError: The tile cannot compute this.
    """
    if tile is None:
        return default_tile(shape, chip)
    if tile.kind == "tma" and (not shape.supports_tma or chip.arch < 90):
        raise KernelError(
            f"tile {tile} reads by TMA, which takes a Hopper GPU, 16-byte aligned "
            "channels_last operands, stride 1 (or 2 on even images) and half precision or "
            "tf32; give a tile of pointers, or none"
        )
    if tile.kind == "tma" and shape.k_divides_channels and shape.channels % tile.k:
        raise KernelError(
            f"tile {tile} steps by {tile.k}, which must divide the {shape.channels} channels "
            "here; give such a tile, or none"
        )
    if not fits(tile, shape, chip):
        raise KernelError(
            f"tile {tile} needs more shared memory than the {chip.shared} bytes here; give "
            "fewer stages"
        )
    return tile
