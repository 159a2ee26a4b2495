"""Differentiable 2-D convolution as one operator of torch.library, for torch.compile too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hetconv.errors import KernelError
from hetconv.sharding.conv_spec import ConvGeometry, Padding, Pair, pads_per_side
from hetconv.torch_internals import runs_unobserved

from .aten import Gradients, Wanted
from .backend_choice import Backend, Route
from .checks import check_no_gradients, check_tensor, spec_of
from .dispatch import backward_2d, forward_2d, preferred
from .epilogue import IDENTITY
from .tiles import Tile


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] | Padding = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    out: Tensor | None = None,
    tile: Tile | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Returns a 2-D convolution y (N, K, P, Q), as `torch.nn.functional.conv2d` does.

    Triton reads x and weight in memory as NHWC and KRSC (channels_last), at any strides
    of samples, rows and columns and so as slices of larger tensors; what lies otherwise
    is converted, once per call. Its sums are in float32, in an order that is the same
    every time. float32 inputs are multiplied as torch.backends.cudnn says (tf32 or
    ieee).

    Args:
        x: Input (N, C, H, W).
        weight: Filters (K, C / groups, R, S).
        bias: Bias (K), if any.
        stride: Input rows and columns from output to output.
        padding: PyTorch's argument, or zero rows and columns per side, as in
            ((top, bottom), (left, right)), without a copy of x.
        dilation: Input rows and columns from tap to tap.
        groups: Number of groups of channels.
        out: Tensor that receives the result, say a slice of the channels of a larger
            one; such a call is not differentiable.
        tile: Tile of the Triton kernel in the forward pass; `tiles.default_tile`'s if
            None.
        backend: "aten", "triton", or "auto": ATen on a CPU, and on CUDA the faster one
            where it is known, see `backend_choice`.

    Raises:
        KernelError: The arguments do not fit each other, or Triton is asked for and
            cannot compute this.
        HetConvError: The padding is none.
    """
    x, weight, bias = autocast(x, weight, bias)
    steps, reach = pair_of(stride, "stride"), pair_of(dilation, "dilation")
    sides = padding_of(padding, weight, steps, reach)
    geometry, asked = ConvGeometry(steps, sides, reach, groups), Route(backend, tile)
    if out is not None:
        y_shape = spec_of(x, weight, bias, geometry).y_shape
        check_tensor("out", out, y_shape, x.dtype, x.device)
        check_no_gradients("out=", out, x, weight, bias)
        return forward_2d(x, weight, bias, geometry, IDENTITY, out, asked)
    if not runs_unobserved(x, weight, bias):
        return _by_operator(x, weight, bias, geometry, asked)
    requires_grad = x.requires_grad or weight.requires_grad
    if bias is not None:
        requires_grad = requires_grad or bias.requires_grad
    if not requires_grad or not torch.is_grad_enabled():
        return _forward(x, weight, bias, geometry, asked)
    y: Tensor = _Conv2d.apply(x, weight, bias, geometry, asked)
    return y


def autocast(
    x: Tensor, w: Tensor, b: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns input, filters and bias in autocast's data type, where it is on.

    As in PyTorch, float64 stays.
    """
    kind = x.device.type
    is_on = kind != "meta" and torch.is_autocast_enabled(kind)  # a meta tensor has none
    if not is_on or x.dtype == torch.float64:
        return x, w, b
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), w.to(dtype), b.to(dtype) if b is not None else None


def padding_of(padding: Any, w: Tensor, stride: Pair, dilation: Pair) -> Padding:
    """Returns padding per side, ((top, bottom), (left, right)).

    Args:
        padding: The argument of `conv2d`.
        w: Filters (K, C / groups, R, S).
        stride: Stride per dimension.
        dilation: Dilation per dimension.

    Raises:
        HetConvError: The argument is no padding.
    """
    if isinstance(padding, int) and padding >= 0:
        return (padding, padding), (padding, padding)
    given: Any = () if isinstance(padding, (str, int)) else padding
    if len(given) == 2 and not isinstance(given[0], int):
        (top, bottom), (left, right) = given
        return (top, bottom), (left, right)
    # Filters with another number of dimensions are refused later.
    kernel = (w.shape[-2], w.shape[-1]) if w.dim() == 4 else (1, 1)
    return pads_per_side(padding, kernel, stride, dilation)


def pair_of(value: int | Sequence[int], name: str) -> Pair:
    """Returns an argument for both dimensions.

    Args:
        value: One integer, or one per dimension.
        name: The argument's name.

    Raises:
        KernelError: There are more than two, or none.
    """
    given = (value,) if isinstance(value, int) else tuple(value)
    if len(given) not in (1, 2):
        raise KernelError(
            f"{name}={value!r} does not fit a 2-D convolution; give one or two integers"
        )
    return given[0], given[-1]


def _is_channels_last(t: Tensor) -> bool:
    """Whether a tensor is in channels_last and not, as one of one pixel, in both formats."""
    is_last = t.is_contiguous(memory_format=torch.channels_last)
    return is_last and not t.is_contiguous()


def _in_format(t: Tensor, channels_last: bool) -> Tensor:
    last, first = torch.channels_last, torch.contiguous_format
    return t.contiguous(memory_format=last if channels_last else first)


def _like_output(
    y: Tensor, x: Tensor, w: Tensor, backend: Backend, has_tile: bool
) -> Tensor:
    """Returns y in the output's memory format.

    It does not depend on who computes it, so that a compiled graph may rely on it.
    """
    by_triton = has_tile or preferred(backend) == "triton"
    return _in_format(y, by_triton or _is_channels_last(x) or _is_channels_last(w))


def _like_input(t: Tensor, like: Tensor) -> Tensor:
    """A gradient in the memory format of what it is the gradient of."""
    return _in_format(t, _is_channels_last(like)) if t.dim() == 4 else t


def _forward(
    x: Tensor, w: Tensor, bias: Tensor | None, geometry: ConvGeometry, asked: Route
) -> Tensor:
    y = forward_2d(x, w, bias, geometry, IDENTITY, None, asked)
    return _like_output(y, x, w, asked.backend, asked.tile is not None)


def _backward(
    g: Tensor,
    x: Tensor,
    w: Tensor,
    geometry: ConvGeometry,
    wanted: Wanted,
    backend: Backend,
) -> Gradients:
    gx, gw, gb = backward_2d(g, x, w, geometry, wanted, Route(backend))
    gx = _like_input(gx, x) if gx is not None else None
    gw = _like_input(gw, w) if gw is not None else None
    return gx, gw, gb


class _Conv2d(torch.autograd.Function):
    """The convolution in eager mode, where an operator of torch.library would take longer."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        geometry: ConvGeometry,
        asked: Route,
    ) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.geometry, ctx.asked = geometry, asked
        return _forward(x, w, bias, geometry, asked)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        wanted, geometry = ctx.needs_input_grad[:3], ctx.geometry
        # The operator says that there are no second derivatives.
        is_differentiated = torch.is_grad_enabled()
        if is_differentiated or not runs_unobserved(g, x, w):
            arguments = _flat_arguments(geometry, ctx.asked)
            found = _gradients_by_operator(g, x, w, wanted, arguments)
        else:
            found = _backward(g, x, w, geometry, wanted, ctx.asked.backend)
        return *found, None, None


def _by_operator(
    x: Tensor, w: Tensor, bias: Tensor | None, geometry: ConvGeometry, asked: Route
) -> Tensor:
    arguments = _flat_arguments(geometry, asked)
    y: Tensor = torch.ops.hetconv.conv2d(x, w, bias, *arguments)
    return y


def _gradients_by_operator(
    g: Tensor, x: Tensor, w: Tensor, wanted: Wanted, arguments: tuple[Any, ...]
) -> Gradients:
    found = torch.ops.hetconv.conv2d_backward(g, x, w, list(wanted), *arguments)
    gx, gw, gb = (
        t if is_wanted else None for t, is_wanted in zip(found, wanted, strict=True)
    )
    return gx, gw, gb


_ARGUMENTS = (
    "Tensor x, Tensor weight, {}, int[] stride, int[] padding, int[] dilation, int "
    "groups, str backend, str tile"
)
_FORWARD = f"({_ARGUMENTS.format('Tensor? bias')}) -> Tensor"
_BACKWARD = (
    f"(Tensor g, {_ARGUMENTS.format('bool[] wanted')}) -> (Tensor, Tensor, Tensor)"
)


def _flat_arguments(geometry: ConvGeometry, asked: Route) -> tuple[Any, ...]:
    """Returns the arguments of the operators that follow the tensors."""
    pads = [n for side in geometry.padding for n in side]
    name = str(asked.tile) if asked.tile is not None else ""
    stride, _, dilation, groups = geometry
    return stride, pads, dilation, groups, asked.backend, name


def _geometry(stride: Any, padding: Any, dilation: Any, groups: int) -> ConvGeometry:
    top, bottom, left, right = padding
    sides = ((top, bottom), (left, right))
    return ConvGeometry(tuple(stride), sides, tuple(dilation), groups)


@torch.library.custom_op("hetconv::conv2d", mutates_args=(), schema=_FORWARD)
def _conv2d(x, weight, bias, stride, padding, dilation, groups, backend, tile):
    geometry = _geometry(stride, padding, dilation, groups)
    asked = Route(backend, Tile.parse(tile) if tile else None)
    return _forward(x, weight, bias, geometry, asked)


@_conv2d.register_fake
def _(x, weight, bias, stride, padding, dilation, groups, backend, tile):
    spec = spec_of(x, weight, bias, _geometry(stride, padding, dilation, groups))
    return _like_output(x.new_empty(spec.y_shape), x, weight, backend, bool(tile))


@torch.library.custom_op("hetconv::conv2d_backward", mutates_args=(), schema=_BACKWARD)
def _conv2d_backward(
    g, x, weight, wanted, stride, padding, dilation, groups, backend, tile
):
    geometry = _geometry(stride, padding, dilation, groups)
    found = _backward(g, x, weight, geometry, tuple(wanted), backend)
    return tuple(t if t is not None else g.new_empty(0) for t in found)


@_conv2d_backward.register_fake
def _(g, x, weight, wanted, stride, padding, dilation, groups, backend, tile):
    likes = (x, weight, weight.new_empty(weight.shape[0]))
    return tuple(
        _like_input(torch.empty_like(t), t) if w else g.new_empty(0)
        for t, w in zip(likes, wanted, strict=True)
    )


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, *ctx.arguments = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight)


def _gradients(ctx: Any, g: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    wanted = (*ctx.needs_input_grad[:2], ctx.has_bias and ctx.needs_input_grad[2])
    found = _gradients_by_operator(g, x, weight, wanted, tuple(ctx.arguments))
    return *found, *(None for _ in ctx.arguments)


_conv2d.register_autograd(_gradients, setup_context=_setup)
