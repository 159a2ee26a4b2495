"""The three passes on tensors by the Triton kernels: memory formats, cached programs,
their launch.
"""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from hetconv.errors import KernelError
from hetconv.kernels.epilogue import Finish, finished
from hetconv.kernels.launch import Chip, Memory, Program, chip_of, empty, krsc, nhwc
from hetconv.kernels.tiles import Extents, Tile, default, fits
from hetconv.sharding.conv_spec import Conv2dSpec

from . import fprop, wgrad


def forward(
    spec: Conv2dSpec,
    x: Tensor,
    w: Tensor,
    out: Tensor | None,
    precision: str,
    tile: Tile | None,
    scale: Tensor | None,
    shift: Tensor | None,
    residual: Tensor | None,
    finish: Finish,
) -> Tensor:
    """y, written to ``out`` where one is given; all tensors as `dispatch` has checked them."""
    x, w = nhwc(x), krsc(w)
    y = out if out is not None else empty(spec.y_shape, x)
    lies = Memory.of(y)
    if lies.strides[1] != 1 and y.numel():
        raise KernelError(
            f"out has strides {y.stride()}, but its channels must lie beside each other; "
            "give a channels_last tensor, or a slice of one"
        )
    if y.numel() == 0:
        return y
    if w.numel() == 0:
        return y.copy_(
            finished(y.zero_(), scale, shift, residual, finish.activation, finish.slope)
        )
    given = {"x": x, "w": w, "y": y}
    given |= {
        name: t.contiguous()
        for name, t in (("scale", scale), ("shift", shift))
        if t is not None
    }
    added = None
    if residual is not None:
        given["residual"] = residual = nhwc(residual)
        added = Memory.of(residual)
    places = Memory.of(x), Memory.of(w), lies, added
    _forward(spec, *places, precision, finish, tile, chip_of(x.device)).run(**given)
    return y


def forward_tile(
    spec: Conv2dSpec, x: Tensor, w: Tensor, precision: str, tile: Tile | None
) -> Tile:
    """The tile by which `forward` computes a packed y without an epilogue."""
    _, K, P, Q = spec.y_shape
    y = Memory(spec.y_shape, (P * Q * K, 1, Q * K, K), spec.dtype)
    return suited(
        tile,
        fprop.forward(spec, Memory.of(x), Memory.of(w), y, precision).extents,
        chip_of(x.device),
    )


def input_gradient(
    spec: Conv2dSpec, g: Tensor, x: Tensor, w: Tensor, precision: str, tile: Tile | None
) -> Tensor:
    g, w = nhwc(g), krsc(w)
    dx = empty(spec.x_shape, x)
    if dx.numel() == 0 or g.numel() == 0:
        return dx.zero_()
    args = (
        spec,
        Memory.of(g),
        Memory.of(w),
        Memory.of(dx),
        precision,
        tile,
        chip_of(x.device),
    )
    covered, programs = _input_gradient(*args)
    if not covered:
        dx.zero_()
    for program in programs:
        program.run(x=g, w=w, y=dx)
    return dx


def weight_gradient(
    spec: Conv2dSpec, g: Tensor, x: Tensor, w: Tensor, precision: str, tile: Tile | None
) -> Tensor:
    g, x = nhwc(g), nhwc(x)
    K, C, R, S = spec.w_shape
    dw = w.new_empty(K, R, S, C)
    if g.numel() == 0 or dw.numel() == 0 or x.numel() == 0:
        dw.zero_()
    else:
        _weight_gradient(
            spec, Memory.of(g), Memory.of(x), precision, tile, chip_of(x.device)
        ).run(x=x, g=g, dw=dw)
    return dw.permute(0, 3, 1, 2)


@lru_cache(4096)
def _forward(
    spec: Conv2dSpec,
    x: Memory,
    w: Memory,
    y: Memory,
    residual: Memory | None,
    precision: str,
    finish: Finish,
    tile: Tile | None,
    chip: Chip,
) -> Program:
    c = fprop.forward(spec, x, w, y, precision, residual)
    return fprop.program(c, suited(tile, c.extents, chip), finish)


@lru_cache(4096)
def _input_gradient(
    spec: Conv2dSpec,
    g: Memory,
    w: Memory,
    dx: Memory,
    precision: str,
    tile: Tile | None,
    chip: Chip,
) -> tuple[bool, tuple[Program, ...]]:
    phases = fprop.phases(spec, g, w, dx, precision)
    read = [(p.correlation, p.slot) for p in phases if p.correlation is not None]
    return len(read) == len(phases), tuple(
        fprop.program(c, suited(tile, c.extents, chip), slot=s) for c, s in read
    )


@lru_cache(4096)
def _weight_gradient(
    spec: Conv2dSpec,
    g: Memory,
    x: Memory,
    precision: str,
    tile: Tile | None,
    chip: Chip,
) -> Program:
    _, C, R, S = spec.w_shape
    w = Memory(spec.w_shape, (R * S * C, 1, S * C, C), x.dtype)
    d = wgrad.weight_gradient(spec, x, w, g, precision)
    return wgrad.program(d, suited(tile, d.extents, chip))


def suited(tile: Tile | None, work: Extents, chip: Chip) -> Tile:
    """The tile that was asked for, or the default. Raises `KernelError` for one that
    cannot run this.
    """
    if tile is None:
        return default(work, chip)
    if tile.path == "boxes" and (not work.boxes or chip.arch < 90):
        raise KernelError(
            f"tile {tile} fetches boxes, which takes a Hopper GPU, 16-byte aligned "
            "channels_last operands, stride 1 "
            "(or 2 on even images) and half precision or tf32; give a tile of pointers, or none"
        )
    if tile.path == "boxes" and work.whole and work.channels % tile.k:
        raise KernelError(
            f"tile {tile} steps by {tile.k}, which must divide the {work.channels} channels here; "
            "give such a tile, or none"
        )
    if not fits(tile, work, chip):
        raise KernelError(
            f"tile {tile} needs more shared memory than the {chip.shared} bytes here; give "
            "fewer stages"
        )
    return tile
