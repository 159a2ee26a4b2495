"""Forward and backward pass of a 2-D convolution, by Triton or ATen, without autograd."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from hetconv.errors import KernelError
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
)
from .checks import check_tensor, describe
from .chip import chip_of
from .epilogue import Epilogue
from .launch import krsc, nhwc
from .tiles import Pass, Tile, any_installed

T = TypeVar("T")
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
    spec = spec_of(x, w, bias, geometry, cached=True)
    epilogue.check(spec.y_shape, x)
    route = _choose("forward", spec, x.device, asked)
    if route.backend == "triton":
        from .triton import backend as triton_backend

        epilogue = epilogue.with_bias(bias)
        operands = (spec, x, w, out, precision(spec), epilogue)
        return _with_tile(lambda t: triton_backend.forward(*operands, t), route, asked)
    y = aten.forward(x, w, bias, geometry, spec.y_shape, epilogue)
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
    tile = _with_tile(
        lambda t: triton_backend.forward_tile(*operands, t), chosen, ANY_ROUTE
    )
    return Route("triton", tile)


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
    spec = spec_of(x, w, None, geometry, cached=True)
    check_tensor("the gradient", g, spec.y_shape, x.dtype, x.device)
    of_x = _choose("input gradient", spec, x.device, asked) if wanted[0] else ATEN
    of_w = _choose("weight gradient", spec, x.device, asked) if wanted[1] else ATEN
    x_by_triton, w_by_triton = of_x.backend == "triton", of_w.backend == "triton"
    any_by_triton = x_by_triton or w_by_triton
    by_aten = (
        wanted[0] and not x_by_triton,
        wanted[1] and not w_by_triton,
        wanted[2] and not any_by_triton,
    )
    gx = gw = gb = None
    if any(by_aten):
        gx, gw, gb = aten.backward(g, x, w, geometry, by_aten)
    if any_by_triton:
        from .triton import backend as triton_backend

        operands = (spec, g, x, w, precision(spec))
        if x_by_triton:
            gx = _with_tile(
                lambda t: triton_backend.input_gradient(*operands, t), of_x, asked
            )
        if w_by_triton:
            gw = _with_tile(
                lambda t: triton_backend.weight_gradient(*operands, t), of_w, asked
            )
        if wanted[2]:
            gb = aten.summed_pixels(g)
    return gx, gw, gb


def spec_of(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    geometry: ConvGeometry,
    cached: bool = False,
) -> ConvSpec:
    """Returns the sizes of a 2-D convolution in integers.

    Args:
        x: Input.
        w: Filters.
        bias: Bias, if any.
        geometry: Stride, padding, dilation and groups.
        cached: Whether the result may be an earlier one; not for tensors that are being
            traced, whose sizes are symbols.

    Raises:
        KernelError: The arguments do not fit each other.
    """
    if x.dim() != 4 or w.dim() != 4:
        raise KernelError(
            "a 2-D convolution takes x (N, C, H, W) and weight (K, C / groups, R, S), not "
            f"{describe(x)} and {describe(w)}"
        )
    for name, t in (("weight", w), ("bias", bias)):
        if t is not None and (t.dtype != x.dtype or t.device != x.device):
            raise KernelError(
                f"{name} is {describe(t)}, but x is {describe(x)}; give both in one dtype and "
                "on one device"
            )
    biases = tuple(bias.shape) if bias is not None else None
    spec = _cached_spec if cached else _spec
    return spec(tuple(x.shape), tuple(w.shape), biases, x.dtype, geometry)


def _spec(
    x: Ints, w: Ints, bias: Ints | None, dtype: torch.dtype, geometry: ConvGeometry
) -> ConvSpec:
    (N, C, H, W), (K, c, R, S) = x, w
    stride, padding, dilation, groups = geometry
    if groups < 1 or c * groups != C or K % groups:
        raise KernelError(
            f"x has {C} channels, so in {groups} groups weight (K, C / groups, R, S) needs {C} "
            f"/ {groups} channels and a multiple of {groups} filters, but it is {w}"
        )
    if bias is not None and bias != (K,):
        raise KernelError(
            f"bias has shape {bias}, but there are {K} filters; give one number for each"
        )
    if min(R, S, *stride, *dilation) < 1 or min(*padding[0], *padding[1]) < 0:
        raise KernelError(
            f"filter {R} x {S}, stride {stride} and dilation {dilation} must be at least 1, "
            f"and padding {padding} at least 0"
        )
    spec = ConvSpec(N, C, (H, W), K, (R, S), *geometry, dtype=str(dtype)[6:])
    if min(spec.P, spec.Q) < 1:
        raise KernelError(
            f"an image of {H} x {W} with padding {padding} is smaller than the filter, {R} x "
            f"{S} at dilation {dilation}"
        )
    return spec


_cached_spec = lru_cache(4096)(_spec)


def precision(spec: ConvSpec) -> str:
    """Returns how float32 is multiplied: "tf32" where torch lets cuDNN use it, else "ieee"."""
    allowed = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    return "tf32" if spec.dtype == "float32" and allowed == "tf32" else "ieee"


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
    for listener in listeners:
        listener(query)
    return choose(query, preferred(asked.backend))


def _with_tile(run: Callable[[Tile | None], T], route: Route, asked: Route) -> T:
    """Runs by the route's tile, or by the default if a tuned one cannot run here.

    Tiles are tuned on channels_last tensors.
    """
    try:
        return run(route.tile)
    except KernelError:
        if route.tile is None or asked.tile is not None:
            raise
        return run(None)


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


def unavailable_reason(device: torch.device) -> str | None:
    """Returns why Triton cannot run on a device, or None if it can."""
    if not _has_triton():
        return "triton is not installed"
    if device.type == "cuda":
        arch = chip_of(device).arch
        if arch >= 80:
            return None
        return (
            f"the kernels need compute capability 8.0, and this device has {arch / 10}"
        )
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return (
        f"Triton runs on CUDA tensors, not on {device.type} (on the CPU in its interpreter: "
        "TRITON_INTERPRET=1)"
    )


@lru_cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@lru_cache
def device_name(device: torch.device) -> str:
    """Returns a GPU's name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
