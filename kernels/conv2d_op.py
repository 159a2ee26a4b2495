"""`conv2d`, one operator for autograd and torch.compile, over the two halves in `dispatch`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hetconv.errors import KernelError
from hetconv.sharding.conv_spec import Pair, pads_per_side

from .backend_choice import Backend
from .dispatch import Sides, conv2d_backward, conv2d_forward, preferred, said, spec_of
from .tiles import Tile


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] | Sides = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    out: Tensor | None = None,
    tile: Tile | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """A 2-D convolution y (N, K, P, Q) of x (N, C, H, W) with weight (K, C / groups, R,
    S), as torch's own.

    ``padding`` may also be given per side, ((top, bottom), (left, right)), without a
    copy of x. Triton wants x and weight in memory as NHWC and KRSC (channels_last), at
    any strides of samples, rows and columns and so as slices of larger tensors; what
    lies otherwise is converted, once per call. Its sums are in float32, in an order
    that is the same every time. float32 inputs are multiplied as torch.backends.cudnn
    says (tf32 or ieee).

    ``out`` receives the result, say a slice of the channels of a larger tensor; such a
    call is not differentiable. ``backend``: "aten", "triton", or "auto", ATen on a CPU
    and on CUDA the faster one where it is known, see `backend_choice`. ``tile`` is the
    Triton kernel's in the forward pass, by default `tiles.default`.

    Raises `KernelError` for shapes, dtypes and devices that do not fit, and where
    Triton is asked for and cannot; `HetConvError` for a ``padding`` that is none.
    """
    x, weight, bias = autocast(x, weight, bias)
    steps, reach = pair_of(stride, "stride"), pair_of(dilation, "dilation")
    sides = sides_of(padding, weight, steps, reach)
    if out is not None:
        return _into(out, x, weight, bias, steps, sides, reach, groups, tile, backend)
    spec_of(x, weight, bias, steps, sides, reach, groups)
    name = str(tile) if tile is not None else ""
    flat = [*sides[0], *sides[1]]
    y: Tensor = torch.ops.hetconv.conv2d(
        x, weight, bias, steps, flat, reach, groups, backend, name
    )
    return y


def _into(
    out: Tensor,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Sides,
    dilation: Pair,
    groups: int,
    tile: Tile | None,
    backend: Backend,
) -> Tensor:
    spec = spec_of(x, w, bias, stride, padding, dilation, groups)
    if (
        tuple(out.shape) != spec.y_shape
        or out.dtype != x.dtype
        or out.device != x.device
    ):
        raise KernelError(
            f"out is {said(out)}, but the output is {spec.y_shape} in {x.dtype} on {x.device}"
        )
    if torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (out, x, w, bias)
    ):
        raise KernelError(
            "out= is not differentiable, but an argument requires a gradient; call it under "
            "torch.no_grad()"
        )
    return conv2d_forward(
        x,
        w,
        bias,
        stride,
        padding,
        dilation,
        groups,
        out=out,
        tile=tile,
        backend=backend,
    )


def autocast(
    x: Tensor, w: Tensor, b: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The arguments in autocast's dtype, where it is on; as in torch, float64 stays."""
    kind = x.device.type
    on = kind != "meta" and torch.is_autocast_enabled(kind)  # a meta tensor has none
    if not on or x.dtype == torch.float64:
        return x, w, b
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), w.to(dtype), b.to(dtype) if b is not None else None


def sides_of(padding: Any, w: Tensor, stride: Pair, dilation: Pair) -> Sides:
    if (
        not isinstance(padding, (str, int))
        and len(padding) == 2
        and not isinstance(padding[0], int)
    ):
        (top, bottom), (left, right) = padding
        return (top, bottom), (left, right)
    kernel = (
        (w.shape[-2], w.shape[-1]) if w.dim() == 4 else (1, 1)
    )  # another dimension is refused later
    rows, columns = pads_per_side(padding, kernel, stride, dilation)
    return rows, columns


def pair_of(value: int | Sequence[int], name: str) -> Pair:
    pair = (
        (value, value)
        if isinstance(value, int)
        else tuple(value) * (2 // max(len(value), 1) or 1)
    )
    if len(pair) != 2:
        raise KernelError(
            f"{name}={value!r} does not fit a 2-D convolution; give one or two integers"
        )
    return pair[0], pair[1]


def _memory_format(
    x: Tensor, w: Tensor, backend: Backend, tile: str
) -> torch.memory_format:
    """The output's: the same whoever computes it, so that a compiled graph may rely on it."""
    last = torch.channels_last
    by_triton = tile or preferred(backend) == "triton"
    return (
        last
        if by_triton
        or any(
            t.is_contiguous(memory_format=last) and not t.is_contiguous()
            for t in (x, w)
        )
        else torch.contiguous_format
    )


_ARGUMENTS = (
    "Tensor x, Tensor weight, {}, int[] stride, int[] padding, int[] dilation, int "
    "groups, str backend, str tile"
)
_FORWARD = f"({_ARGUMENTS.format('Tensor? bias')}) -> Tensor"
_BACKWARD = (
    f"(Tensor g, {_ARGUMENTS.format('bool[] wanted')}) -> (Tensor, Tensor, Tensor)"
)


def _unflat(stride: Any, padding: Any, dilation: Any) -> tuple[Pair, Sides, Pair]:
    top, bottom, left, right = padding
    return tuple(stride), ((top, bottom), (left, right)), tuple(dilation)


@torch.library.custom_op("hetconv::conv2d", mutates_args=(), schema=_FORWARD)
def _conv2d(x, weight, bias, stride, padding, dilation, groups, backend, tile):
    asked = Tile.parse(tile) if tile else None
    args = _unflat(stride, padding, dilation)
    y = conv2d_forward(x, weight, bias, *args, groups, tile=asked, backend=backend)
    return y.contiguous(memory_format=_memory_format(x, weight, backend, tile))


@_conv2d.register_fake
def _(x, weight, bias, stride, padding, dilation, groups, backend, tile):
    shape = spec_of(
        x, weight, bias, *_unflat(stride, padding, dilation), groups
    ).y_shape
    return x.new_empty(shape).contiguous(
        memory_format=_memory_format(x, weight, backend, tile)
    )


@torch.library.custom_op("hetconv::conv2d_backward", mutates_args=(), schema=_BACKWARD)
def _conv2d_backward(
    g, x, weight, wanted, stride, padding, dilation, groups, backend, tile
):
    args = _unflat(stride, padding, dilation)
    found = conv2d_backward(g, x, weight, *args, groups, tuple(wanted), backend=backend)
    return tuple(
        _kept(t, like) if t is not None else g.new_empty(0)
        for t, like in zip(found, (x, weight, g), strict=True)
    )


@_conv2d_backward.register_fake
def _(g, x, weight, wanted, stride, padding, dilation, groups, backend, tile):
    likes = (x, weight, weight.new_empty(weight.shape[0]))
    return tuple(
        _kept(torch.empty_like(t), t) if w else g.new_empty(0)
        for t, w in zip(likes, wanted, strict=True)
    )


def _kept(t: Tensor, like: Tensor) -> Tensor:
    """A gradient in the memory format of what it is the gradient of."""
    if t.dim() != 4:
        return t
    last = (
        like.is_contiguous(memory_format=torch.channels_last)
        and not like.is_contiguous()
    )
    return t.contiguous(
        memory_format=torch.channels_last if last else torch.contiguous_format
    )


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, *ctx.arguments = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight)


def _gradients(ctx: Any, g: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    wanted = [*ctx.needs_input_grad[:2], ctx.has_bias and ctx.needs_input_grad[2]]
    found = torch.ops.hetconv.conv2d_backward(g, x, weight, wanted, *ctx.arguments)
    return (
        *(t if w else None for t, w in zip(found, wanted, strict=True)),
        *(None for _ in ctx.arguments),
    )


_conv2d.register_autograd(_gradients, setup_context=_setup)
