"""Forward and backward pass of a 2-D convolution, by Triton or ATen, without autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hetconv.sharding.conv_spec import ConvGeometry, ConvSpec, Ints, Padding

from . import aten
from .backend_choice import (
    ANY_ROUTE,
    ATEN,
    Backend,
    KernelQuery,
    Route,
    check_backend,
    choose,
    device_name,
    unavailable_reason,
)
from .checks import check_tensor, spec_of
from .epilogue import Epilogue
from .launch import krsc, nhwc
from .launchers.decisions import generation, remember, signature
from .tiles import Pass, Tile, any_installed

GRADIENTS: tuple[Pass, Pass] = ("input gradient", "weight gradient")
ForwardCall = Callable[[Tensor, Tensor, Tensor | None, Epilogue, Tensor | None], Tensor]
_forward_calls: dict[tuple[Any, ...], ForwardCall] = {}
_backward_calls: dict[tuple[Any, ...], _Backward] = {}
_backend: Backend = "auto"
listeners: list[Callable[[KernelQuery], None]] = []
"""Functions that are called with every pass that is about to be computed."""


def set_backend(backend: Backend) -> None:
    """Sets what ``backend="auto"`` means in this process.

    Args:
        backend: "triton", "aten", or "auto", which is as `backend_choice` has it.

    Raises:
        KernelError: There is no such backend.
    """
    global _backend
    _backend = check_backend(backend)


def conv2d_forward(
    x_NCHW: Tensor,
    w_KCRS: Tensor,
    bias_K: Tensor | None,
    stride: Ints,
    padding: Padding,
    dilation: Ints,
    groups: int,
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
    """Returns activation(scale * y + shift + residual) of a 2-D convolution y.

    Triton's kernels apply this epilogue as they store y, ATen in place, with scale and
    shift in the filters where these are fewer than the results.

    Args:
        x_NCHW: Input (N, C, H, W).
        w_KCRS: Filters (K, C / groups, R, S).
        bias_K: Bias (K), if any.
        stride: Input rows and columns from output to output.
        padding: Zero rows and columns, ((top, bottom), (left, right)).
        dilation: Input rows and columns from tap to tap.
        groups: Number of groups of channels.
        scale: Factor per filter (K), say of a folded batch norm, in float32, or in
            float64 if x is.
        shift: Summand per filter (K), likewise.
        residual: Summand (N, K, P, Q) in the data type of x.
        activation: One of relu, relu6, leaky_relu, silu, gelu and gelu_tanh, or None.
        slope: Slope of leaky_relu below zero.
        out: Tensor (N, K, P, Q) that receives the result.
        tile: Tile of the Triton kernel.
        backend: "aten", "triton" or "auto".

    Raises:
        KernelError: The arguments do not fit each other, or Triton is asked for and
            cannot compute this.
    """
    geometry = ConvGeometry(stride, padding, dilation, groups)
    epilogue = Epilogue.of(scale, shift, residual, activation, slope)
    return forward_2d(
        x_NCHW, w_KCRS, bias_K, geometry, epilogue, out, Route(backend, tile)
    )


def forward_2d(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    geometry: ConvGeometry,
    epilogue: Epilogue,
    out: Tensor | None,
    asked: Route,
) -> Tensor:
    """Returns what `conv2d_forward` does, by arguments that are bundled.

    Args:
        x: Input, as are w, bias and out.
        geometry: Stride, padding, dilation and groups.
        epilogue: Scale, shift, residual and activation.
        asked: Backend and tile that the caller asks for.
    """
    if listeners:
        _tell("forward", spec_of(x, w, bias, geometry, cached=True), x.device, asked)
    key = (
        signature(x),
        signature(w),
        signature(bias),
        signature(out),
        epilogue.signature,
        geometry,
        asked.tile,
        preferred(asked.backend),
        precision_of(x.dtype),
        generation(),
    )
    call = _forward_calls.get(key)
    if call is None:
        call = _forward_call(x, w, bias, geometry, epilogue, out, asked)
        remember(_forward_calls, key, call)
    return call(x, w, bias, epilogue, out)


def _forward_call(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    geometry: ConvGeometry,
    epilogue: Epilogue,
    out: Tensor | None,
    asked: Route,
) -> ForwardCall:
    """Decides who computes the result of all tensors with the same signature."""
    spec = spec_of(x, w, bias, geometry, cached=True)
    epilogue.check(spec.y_shape, x)
    route = _choose("forward", spec, x.device, asked)
    if route.backend == "aten":
        return _AtenForward(geometry, spec.y_shape)
    from .triton import backend as triton_backend

    tiles = _candidates(route, asked)
    return triton_backend.Forward(spec, x, w, out, precision(spec), tiles)


@dataclass(frozen=True)
class _AtenForward:
    geometry: ConvGeometry
    y_shape: Ints

    def __call__(
        self,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        epilogue: Epilogue,
        out: Tensor | None,
    ) -> Tensor:
        y = aten.forward(x, w, bias, self.geometry, self.y_shape, epilogue)
        return y if out is None else out.copy_(y)


def route(
    x_NCHW: Tensor,
    w_KCRS: Tensor,
    stride: Ints,
    padding: Padding,
    dilation: Ints,
    groups: int,
) -> Route:
    """Returns who computes a convolution for which nothing is asked.

    Parts of its batch that take the same route add in the same order. Arguments are
    those of `conv2d_forward`.
    """
    geometry = ConvGeometry(stride, padding, dilation, groups)
    spec = spec_of(x_NCHW, w_KCRS, None, geometry, cached=True)
    chosen = _choose("forward", spec, x_NCHW.device, ANY_ROUTE)
    if chosen.backend == "aten":
        return chosen
    from .triton import backend as triton_backend

    operands = (spec, nhwc(x_NCHW), krsc(w_KCRS), precision(spec))
    tiles = _candidates(chosen, ANY_ROUTE)
    return Route("triton", triton_backend.forward_tile(*operands, tiles))


def conv2d_backward(
    g_NKPQ: Tensor,
    x_NCHW: Tensor,
    w_KCRS: Tensor,
    stride: Ints,
    padding: Padding,
    dilation: Ints,
    groups: int,
    wanted: aten.Wanted = (True, True, True),
    *,
    tile: Tile | None = None,
    backend: Backend = "auto",
) -> aten.Gradients:
    """Returns the gradients of input, filters and bias of a 2-D convolution.

    Args:
        g_NKPQ: Gradient of the result, (N, K, P, Q).
        x_NCHW: The other arguments are those that `conv2d_forward` was given.
        wanted: Which of the three gradients are computed; the others are None.

    Raises:
        KernelError: See `conv2d_forward`.
    """
    geometry = ConvGeometry(stride, padding, dilation, groups)
    return backward_2d(g_NKPQ, x_NCHW, w_KCRS, geometry, wanted, Route(backend, tile))


def backward_2d(
    g: Tensor,
    x: Tensor,
    w: Tensor,
    geometry: ConvGeometry,
    wanted: aten.Wanted,
    asked: Route,
) -> aten.Gradients:
    """Returns what `conv2d_backward` does, by arguments that are bundled.

    Args:
        g: Gradient of the result; x, w and wanted are as there.
        geometry: Stride, padding, dilation and groups.
        asked: Backend and tile that the caller asks for.
    """
    if listeners:
        spec = spec_of(x, w, None, geometry, cached=True)
        for pass_name, is_wanted in zip(GRADIENTS, wanted, strict=False):
            if is_wanted:
                _tell(pass_name, spec, x.device, asked)
    key = (
        signature(g),
        signature(x),
        signature(w),
        geometry,
        *wanted,
        asked.tile,
        preferred(asked.backend),
        precision_of(x.dtype),
        generation(),
    )
    call = _backward_calls.get(key)
    if call is None:
        call = _backward_call(g, x, w, geometry, wanted, asked)
        remember(_backward_calls, key, call)
    return call(g, x, w)


def _backward_call(
    g: Tensor,
    x: Tensor,
    w: Tensor,
    geometry: ConvGeometry,
    wanted: aten.Wanted,
    asked: Route,
) -> _Backward:
    """Decides who computes the gradients of all tensors with the same signature."""
    spec = spec_of(x, w, None, geometry, cached=True)
    check_tensor("the gradient", g, spec.y_shape, x.dtype, x.device)
    routes = [
        _choose(pass_name, spec, x.device, asked) if is_wanted else ATEN
        for pass_name, is_wanted in zip(GRADIENTS, wanted, strict=False)
    ]
    x_by_triton, w_by_triton = (route.backend == "triton" for route in routes)
    any_by_triton = x_by_triton or w_by_triton
    by_aten = (
        wanted[0] and not x_by_triton,
        wanted[1] and not w_by_triton,
        wanted[2] and not any_by_triton,
    )
    of_x = of_w = None
    if any_by_triton:
        from .triton import backend as triton_backend

        x_tiles, w_tiles = (_candidates(route, asked) for route in routes)
        if x_by_triton:
            of_x = triton_backend.InputGradient(spec, g, w, precision(spec), x_tiles)
        if w_by_triton:
            of_w = triton_backend.WeightGradient(spec, g, x, precision(spec), w_tiles)
    return _Backward(geometry, by_aten, of_x, of_w, wanted[2] and any_by_triton)


@dataclass(frozen=True)
class _Backward:
    """Gradients of tensors with one signature.

    Attributes:
        geometry: Stride, padding, dilation and groups.
        by_aten: Which gradients ATen computes.
        of_x: Input gradient by Triton.
        of_w: Weight gradient by Triton.
        sums_bias: Whether the bias's gradient is computed apart from the others.
    """

    geometry: ConvGeometry
    by_aten: aten.Wanted
    of_x: Callable[[Tensor, Tensor], Tensor] | None
    of_w: Callable[[Tensor, Tensor], Tensor] | None
    sums_bias: bool

    def __call__(self, g: Tensor, x: Tensor, w: Tensor) -> aten.Gradients:
        gx = gw = gb = None
        if any(self.by_aten):
            gx, gw, gb = aten.backward(g, x, w, self.geometry, self.by_aten)
        if self.of_x is not None:
            gx = self.of_x(g, w)
        if self.of_w is not None:
            gw = self.of_w(g, x)
        if self.sums_bias:
            gb = aten.summed_pixels(g)
        return gx, gw, gb


def precision(spec: ConvSpec) -> str:
    """Returns how float32 is multiplied: "tf32" where torch lets cuDNN use it, else "ieee"."""
    return precision_of(getattr(torch, spec.dtype))


def precision_of(dtype: torch.dtype) -> str:
    """Returns `precision` of a convolution of tensors of a data type."""
    if dtype != torch.float32:
        return "ieee"
    allowed = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    return "tf32" if allowed == "tf32" else "ieee"


def query_of(
    pass_name: Pass, spec: ConvSpec, device: torch.device, tile: Tile | None
) -> KernelQuery:
    """Returns a pass on a device as `backend_choice` is asked about it."""
    return KernelQuery(
        pass_name,
        spec,
        precision(spec),
        device_name(device),
        unavailable_reason(device),
        tile,
    )


def _choose(
    pass_name: Pass, spec: ConvSpec, device: torch.device, asked: Route
) -> Route:
    query = query_of(pass_name, spec, device, asked.tile)
    return choose(query, preferred(asked.backend))


def _tell(pass_name: Pass, spec: ConvSpec, device: torch.device, asked: Route) -> None:
    query = query_of(pass_name, spec, device, asked.tile)
    for listener in listeners:
        listener(query)


def _candidates(route: Route, asked: Route) -> tuple[Tile | None, ...]:
    """Returns the route's tile, and the default one if that is tuned and not asked for.

    Tiles are tuned on channels_last tensors and may not run on others.
    """
    is_tuned = route.tile is not None and asked.tile is None
    return (route.tile, None) if is_tuned else (route.tile,)


def preferred(backend: Backend) -> Backend:
    """Returns the backend, where "auto" is what `set_backend` made of it."""
    return _backend if backend == "auto" else backend


def only_aten() -> bool:
    """Returns whether ATen computes all for which nothing is asked, and nobody listens."""
    is_certain = _backend == "aten" or (_backend == "auto" and not any_installed())
    return is_certain and not listeners


def prefers_triton(like: Tensor, backend: Backend = "auto") -> bool:
    """Returns whether Triton is to move numbers of such a tensor: on CUDA by default."""
    chosen = preferred(backend)
    return chosen == "triton" or (chosen == "auto" and like.is_cuda)
