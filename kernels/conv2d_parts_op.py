"""`conv2d_parts`: the convolution of an image whose channels lie in several tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from hetconv.errors import KernelError
from hetconv.sharding.conv_spec import Conv2dSpec

from .backend_choice import Backend, Question, known, unable
from .concat import MOST_PARTS, check_parts, concat_channels, parts_of
from .conv2d_op import pair_of, sides_of
from .dispatch import (
    Sides,
    check_finish,
    conv2d_forward,
    device_name,
    obstacle,
    precision,
    preferred,
    said,
    spec_of,
)
from .epilogue import Finish, shift_with
from .launch import Chip, Memory, Program, chip_of, empty, krsc, nhwc
from .tiles import Tile


def conv2d_parts(
    parts: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] | Sides = 0,
    dilation: int | Sequence[int] = 1,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    slope: float = 0.01,
    out: Tensor | None = None,
    tile: Tile | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """activation(scale * y + shift + residual), (N, K, P, Q), of y =
    `conv2d(cat(parts), weight, bias, ...)`.

    ``parts``: tensors (N, C_i, H, W), of which any may have no channels; weight is (K,
    sum of C_i, R, S). The other arguments are those of `conv2d` and `conv2d_forward`.
    Forward alone, without autograd.

    Under ``backend="triton"``, given here or to `set_backend`, one kernel reads up to
    16 parts where they lie, as channels_last at any strides of samples, rows and
    columns (what lies otherwise is converted first). Its reduction starts anew for each
    part, in steps of ``tile.k`` channels; ``tile`` is one of pointers without splits.
    Parts of a multiple of 16 bytes of channels, at such addresses, are read 16 bytes at
    a time, and so are their filters. Else `concat_channels` joins the parts, and
    `conv2d_forward` convolves them: nobody has measured yet which is faster.

    Raises `KernelError` for arguments that do not fit each other, where one of them
    requires a gradient, and where Triton is asked for here and cannot.
    """
    found = parts_of(list(parts), None, None)
    check_parts(found, (), None, None, None, None, None)
    like, C = found[0], sum(p.shape[1] for p in found)
    x = like.new_empty(()).expand(
        like.shape[0], C, *like.shape[2:]
    )  # what the parts are together, but for its numbers
    steps, reach = pair_of(stride, "stride"), pair_of(dilation, "dilation")
    sides = sides_of(padding, weight, steps, reach)
    spec = spec_of(x, weight, bias, steps, sides, reach, 1)
    check_finish(spec, x, scale, shift, residual)
    _check_out(spec, x, out)
    finish = Finish.of(scale, shift, activation, slope)
    if torch.is_grad_enabled():
        given = [*found, weight, bias, scale, shift, residual, out]
        if any(t is not None and t.requires_grad for t in given):
            raise KernelError(
                "conv2d_parts is not differentiable, but an argument requires a gradient; "
                "call it under torch.no_grad()"
            )
    why = _refusal(spec, x, len(found), tile)
    if known(backend) == "triton" and why is not None:
        raise KernelError(
            f"a convolution of parts was asked of Triton, but {why}; use backend='auto'"
        )
    if (
        preferred(backend) == "triton"
        and why is None
        and 0 not in (*spec.w_shape, *spec.y_shape)
    ):
        return by_triton(
            spec, found, weight, bias, scale, shift, residual, finish, out, tile
        )
    return conv2d_forward(
        concat_channels(found, backend=backend),
        weight,
        bias,
        steps,
        sides,
        reach,
        1,
        scale=scale,
        shift=shift,
        residual=residual,
        activation=activation,
        slope=slope,
        out=out,
        tile=tile,
        backend=backend,
    )


def by_triton(
    spec: Conv2dSpec,
    parts: Sequence[Tensor],
    w: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    residual: Tensor | None,
    finish: Finish,
    out: Tensor | None,
    tile: Tile | None,
) -> Tensor:
    """The same by one launch; y and the filters have numbers."""
    ready = [nhwc(p) for p in parts if p.shape[1]]
    given = {f"x{i}": p for i, p in enumerate(ready)} | {"w": krsc(w)}
    shift = shift_with(bias, scale, shift)
    given |= {
        name: t.contiguous()
        for name, t in (("scale", scale), ("shift", shift))
        if t is not None
    }
    added = None
    if residual is not None:
        given["residual"] = residual = nhwc(residual)
        added = Memory.of(residual)
    given["y"] = y = out if out is not None else empty(spec.y_shape, ready[0])
    lies = tuple(map(Memory.of, ready)), Memory.of(given["w"]), Memory.of(y), added
    finish = finish._replace(shifted=shift is not None)
    _program(spec, *lies, precision(spec), finish, tile, chip_of(y.device)).run(**given)
    return y


@lru_cache(4096)
def _program(
    spec: Conv2dSpec,
    parts: tuple[Memory, ...],
    w: Memory,
    y: Memory,
    residual: Memory | None,
    precision: str,
    finish: Finish,
    tile: Tile | None,
    chip: Chip,
) -> Program:
    from .triton import backend as triton_backend
    from .triton import conv2d_parts as parts_kernel

    s = parts_kernel.forward(spec, parts, w, y, precision, residual)
    tile = triton_backend.suited(
        tile or parts_kernel.default(s.extents, chip), s.extents, chip
    )
    return parts_kernel.program(s, tile, finish)


def _refusal(spec: Conv2dSpec, x: Tensor, parts: int, tile: Tile | None) -> str | None:
    """Why the kernel cannot compute this, or None."""
    if parts > MOST_PARTS:
        return f"it takes up to {MOST_PARTS} parts, not {parts}"
    if tile is not None and (tile.path != "pointers" or tile.splits > 1):
        return f"it takes tiles of pointers without splits, not {tile}"
    return unable(
        Question(
            "forward",
            spec,
            precision(spec),
            device_name(x.device),
            obstacle(x.device),
            tile,
        )
    )


def _check_out(spec: Conv2dSpec, x: Tensor, out: Tensor | None) -> None:
    if out is None:
        return
    if (
        tuple(out.shape) != spec.y_shape
        or out.dtype != x.dtype
        or out.device != x.device
    ):
        raise KernelError(
            f"out is {said(out)}, but the output is {spec.y_shape} in {x.dtype} on {x.device}"
        )
    if out.numel() and out.stride(1) != 1 and out.shape[1] > 1:
        raise KernelError(
            f"out has strides {out.stride()}, but its channels must lie beside each other"
        )
