"""The three passes of a convolution on tensors by Triton: layouts, cached launches."""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from hetconv.errors import KernelError
from hetconv.kernels.checks import check_channels_contiguous
from hetconv.kernels.chip import Chip, chip_of
from hetconv.kernels.epilogue import Epilogue, EpilogueSpec
from hetconv.kernels.launch import LaunchSequence, StridedLayout, empty, krsc, nhwc
from hetconv.kernels.tiles import GemmShape, Tile, default_tile, fits
from hetconv.sharding.conv_spec import ConvSpec

from . import dgrad, fprop, gemm_launch, wgrad


def forward(
    spec: ConvSpec,
    x: Tensor,
    w: Tensor,
    out: Tensor | None,
    precision: str,
    epilogue: Epilogue,
    tile: Tile | None,
) -> Tensor:
    """Returns the forward pass.

    Args:
        spec: The convolution; all tensors fit it.
        x: Input.
        w: Filters.
        out: Tensor that receives the result.
        precision: "tf32" or "ieee", how float32 is multiplied.
        epilogue: What is applied to the result, bias included.
        tile: Tile of the kernel; None for the default one.

    Raises:
        KernelError: The tile cannot compute this, or out's channels lie apart.
    """
    x, w = nhwc(x), krsc(w)
    check_channels_contiguous(out)
    y = out if out is not None else empty(spec.y_shape, x)
    if y.numel() == 0:
        return y
    if w.numel() == 0:
        return y.copy_(epilogue.apply(y.zero_()))
    epilogue = epilogue.for_triton()
    layouts = StridedLayout.of(x), StridedLayout.of(w), StridedLayout.of(y)
    chip = chip_of(x.device)
    launch = _forward(spec, *layouts, precision, epilogue.spec, tile, chip)
    launch.run(x=x, w=w, y=y, **epilogue.tensors)
    return y


def forward_tile(
    spec: ConvSpec, x: Tensor, w: Tensor, precision: str, tile: Tile | None
) -> Tile:
    """Returns the tile by which `forward` computes a packed result without epilogue.

    Args:
        spec: See `forward`, as are the other arguments.

    Raises:
        KernelError: The tile cannot compute this.
    """
    y = StridedLayout.packed(spec.y_shape, spec.dtype)
    layouts = StridedLayout.of(x), StridedLayout.of(w), y
    shape = fprop.forward(spec, *layouts, precision).shape
    return usable_tile(tile, shape, chip_of(x.device))


def input_gradient(
    spec: ConvSpec, g: Tensor, x: Tensor, w: Tensor, precision: str, tile: Tile | None
) -> Tensor:
    """Returns the gradient of the input.

    Args:
        spec: The convolution; all tensors fit it.
        g: Gradient of the result.
        x: Input.
        w: Filters.
        precision: "tf32" or "ieee", how float32 is multiplied.
        tile: Tile of the kernels; None for the default ones.

    Raises:
        KernelError: The tile cannot compute this.
    """
    g, w = nhwc(g), krsc(w)
    dx = empty(spec.x_shape, x)
    if dx.numel() == 0 or g.numel() == 0:
        return dx.zero_()
    layouts = StridedLayout.of(g), StridedLayout.of(w), StridedLayout.of(dx)
    chip = chip_of(x.device)
    is_covered, launches = _input_gradient(spec, *layouts, precision, tile, chip)
    if not is_covered:
        dx.zero_()
    for launch in launches:
        launch.run(x=g, w=w, y=dx)
    return dx


def weight_gradient(
    spec: ConvSpec, g: Tensor, x: Tensor, w: Tensor, precision: str, tile: Tile | None
) -> Tensor:
    """Returns the gradient of the filters.

    Args:
        spec: See `input_gradient`, as are the other arguments.

    Raises:
        KernelError: The tile cannot compute this.
    """
    g, x = nhwc(g), nhwc(x)
    K, C, R, S = spec.w_shape
    dw = w.new_empty(K, R, S, C)
    if g.numel() == 0 or dw.numel() == 0 or x.numel() == 0:
        dw.zero_()
    else:
        layouts = StridedLayout.of(g), StridedLayout.of(x)
        launch = _weight_gradient(spec, *layouts, precision, tile, chip_of(x.device))
        launch.run(x=x, g=g, dw=dw)
    return dw.permute(0, 3, 1, 2)


@lru_cache(4096)
def _forward(
    spec: ConvSpec,
    x: StridedLayout,
    w: StridedLayout,
    y: StridedLayout,
    precision: str,
    epilogue: EpilogueSpec,
    tile: Tile | None,
    chip: Chip,
) -> LaunchSequence:
    gemm = fprop.forward(spec, x, w, y, precision, epilogue)
    return gemm_launch.launches(gemm, usable_tile(tile, gemm.shape, chip))


@lru_cache(4096)
def _input_gradient(
    spec: ConvSpec,
    g: StridedLayout,
    w: StridedLayout,
    dx: StridedLayout,
    precision: str,
    tile: Tile | None,
    chip: Chip,
) -> tuple[bool, tuple[LaunchSequence, ...]]:
    """Whether the launches write all of dx, and the launches of its phases."""
    phases = dgrad.phases(spec, g, w, dx, precision)
    found = tuple(
        gemm_launch.launches(p.gemm, usable_tile(tile, p.gemm.shape, chip), p.slices)
        for p in phases
        if p.gemm is not None
    )
    return len(found) == len(phases), found


@lru_cache(4096)
def _weight_gradient(
    spec: ConvSpec,
    g: StridedLayout,
    x: StridedLayout,
    precision: str,
    tile: Tile | None,
    chip: Chip,
) -> LaunchSequence:
    w = StridedLayout.packed(spec.w_shape, x.dtype)
    gradient = wgrad.weight_gradient(spec, x, w, g, precision)
    return wgrad.launches(gradient, usable_tile(tile, gradient.shape, chip))


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
