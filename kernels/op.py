"""`conv2d`, one operator for autograd and torch.compile, and its two halves, which split layers call themselves."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..errors import KernelError
from ..spec import Conv2dSpec, Pair, pads_per_side
from . import aten
from .choice import Answer, Backend, Question, choose
from .launch import chip_of
from .tiles import Pass, Tile

Sides = tuple[Pair, Pair]
_backend: Backend = "auto"


def set_backend(backend: Backend) -> None:
    """What ``backend="auto"`` means in this process from now on: "triton", "aten", or "auto", as `choice` says."""
    global _backend
    choose(Question("forward", Conv2dSpec(1, 1, 1, 1, 1, 1, 1), "ieee", "cpu"), backend)
    _backend = backend


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
    """A 2-D convolution y (N, K, P, Q) of x (N, C, H, W) with weight (K, C / groups, R, S), as torch's own.

    ``padding`` may also be given per side, ((top, bottom), (left, right)), without a copy of x. Triton wants x and
    weight in memory as NHWC and KRSC (channels_last), at any strides of samples, rows and columns and so as slices of
    larger tensors; what lies otherwise is converted, once per call. Its sums are in float32, in an order that is the
    same every time. float32 inputs are multiplied as torch.backends.cudnn says (tf32 or ieee).

    ``out`` receives the result, say a slice of the channels of a larger tensor; such a call is not differentiable.
    ``backend``: "aten", "triton", or "auto", ATen on a CPU and on CUDA the faster one where it is known (`choice`).
    ``tile`` is the Triton kernel's in the forward pass, by default `tiles.default`.

    Raises `KernelError` for shapes, dtypes and devices that do not fit, and where Triton is asked for and cannot;
    `HetConvError` for a ``padding`` that is none.
    """
    x, weight, bias = autocast(x, weight, bias)
    steps, reach = _pair(stride, "stride"), _pair(dilation, "dilation")
    sides = _sides(padding, weight, steps, reach)
    if out is not None:
        return _into(out, x, weight, bias, steps, sides, reach, groups, tile, backend)
    spec_of(x, weight, bias, steps, sides, reach, groups)
    name = str(tile) if tile is not None else ""
    flat = [*sides[0], *sides[1]]
    y: Tensor = torch.ops.hetconv.conv2d(x, weight, bias, steps, flat, reach, groups, backend, name)
    return y


def conv2d_forward(
    x_NCHW: Tensor,
    w_KCRS: Tensor,
    bias_K: Tensor | None,
    stride: Pair,
    padding: Sides,
    dilation: Pair,
    groups: int,
    *,
    out: Tensor | None = None,
    tile: Tile | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """`conv2d` without autograd."""
    spec = spec_of(x_NCHW, w_KCRS, bias_K, stride, padding, dilation, groups)
    answer = _ask("forward", spec, x_NCHW.device, tile, backend)
    if answer.triton:
        from . import triton_backend

        return triton_backend.forward(spec, x_NCHW, w_KCRS, bias_K, out, precision(spec), answer.tile)
    y = aten.conv2d(x_NCHW, w_KCRS, bias_K, stride, padding, dilation, groups)
    return y if out is None else out.copy_(y)


def conv2d_backward(
    g_NKPQ: Tensor,
    x_NCHW: Tensor,
    w_KCRS: Tensor,
    stride: Pair,
    padding: Sides,
    dilation: Pair,
    groups: int,
    wanted: tuple[bool, bool, bool] = (True, True, True),
    *,
    tile: Tile | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of input, filters and bias, where ``wanted``, of `conv2d` called with the same arguments."""
    spec = spec_of(x_NCHW, w_KCRS, None, stride, padding, dilation, groups)
    if tuple(g_NKPQ.shape) != spec.y_shape or g_NKPQ.dtype != x_NCHW.dtype or g_NKPQ.device != x_NCHW.device:
        raise KernelError(
            f"the gradient is {_said(g_NKPQ)}, but the convolution's output is {spec.y_shape} in {x_NCHW.dtype} "
            f"on {x_NCHW.device}"
        )
    passes: tuple[Pass, Pass] = ("input gradient", "weight gradient")
    asked = [_ask(p, spec, x_NCHW.device, tile, backend) if w else None for p, w in zip(passes, wanted, strict=False)]
    by_triton = [a is not None and a.triton for a in asked]
    by_aten = [w and not t for w, t in zip(wanted, [*by_triton, any(by_triton)], strict=True)]
    found: list[Tensor | None] = [None, None, None]
    if any(by_aten):
        args = (g_NKPQ, x_NCHW, w_KCRS, stride, padding, dilation, groups, tuple(by_aten))
        found = list(aten.conv2d_backward(*args))  # type: ignore[arg-type]
    if any(by_triton):
        from . import triton_backend

        if asked[0] is not None and asked[0].triton:
            found[0] = triton_backend.input_gradient(spec, g_NKPQ, x_NCHW, w_KCRS, precision(spec), asked[0].tile)
        if asked[1] is not None and asked[1].triton:
            found[1] = triton_backend.weight_gradient(spec, g_NKPQ, x_NCHW, w_KCRS, precision(spec), asked[1].tile)
        if wanted[2]:
            found[2] = g_NKPQ.sum((0, 2, 3))
    return found[0], found[1], found[2]


def spec_of(
    x: Tensor, w: Tensor, bias: Tensor | None, stride: Pair, padding: Sides, dilation: Pair, groups: int
) -> Conv2dSpec:
    """What is asked for, in integers. Raises `KernelError` for tensors that do not fit each other."""
    if x.dim() != 4 or w.dim() != 4:
        raise KernelError(
            f"a 2-D convolution takes x (N, C, H, W) and weight (K, C / groups, R, S), not {_said(x)} and {_said(w)}"
        )
    (N, C, H, W), (K, c, R, S) = x.shape, w.shape
    if groups < 1 or c * groups != C or K % groups:
        raise KernelError(
            f"x has {C} channels, so in {groups} groups weight (K, C / groups, R, S) needs {C} / {groups} channels and "
            f"a multiple of {groups} filters, but it is {tuple(w.shape)}"
        )
    others = [("weight", w)] + ([("bias", bias)] if bias is not None else [])
    for name, t in others:
        if t.dtype != x.dtype or t.device != x.device:
            raise KernelError(f"{name} is {_said(t)}, but x is {_said(x)}; give both in one dtype and on one device")
    if bias is not None and tuple(bias.shape) != (K,):
        raise KernelError(f"bias has shape {tuple(bias.shape)}, but there are {K} filters; give one number for each")
    if min(R, S, *stride, *dilation) < 1 or min(*padding[0], *padding[1]) < 0:
        raise KernelError(
            f"filter {R} x {S}, stride {stride} and dilation {dilation} must be at least 1, "
            f"and padding {padding} at least 0"
        )
    spec = Conv2dSpec(N, C, H, W, K, R, S, stride, padding, dilation, groups, str(x.dtype)[6:])
    if min(spec.P, spec.Q) < 1:
        raise KernelError(
            f"an image of {H} x {W} with padding {padding} is smaller than the filter, {R} x {S} at dilation {dilation}"
        )
    return spec


def precision(spec: Conv2dSpec) -> str:
    """How float32 is multiplied: "tf32" where torch lets cuDNN use it, else "ieee"."""
    return "tf32" if spec.dtype == "float32" and torch.backends.cudnn.conv.fp32_precision == "tf32" else "ieee"  # type: ignore[attr-defined]


def _ask(what: Pass, spec: Conv2dSpec, device: torch.device, tile: Tile | None, backend: Backend) -> Answer:
    name = _device_name(device) if device.type == "cuda" else device.type
    question = Question(what, spec, precision(spec), name, _obstacle(device), tile)
    return choose(question, _backend if backend == "auto" else backend)


def _obstacle(device: torch.device) -> str | None:
    """What keeps Triton from running there, or None."""
    if not _has_triton():
        return "triton is not installed"
    if device.type == "cuda":
        chip = chip_of(device)
        return (
            None
            if chip.arch >= 80
            else f"the kernels need compute capability 8.0, and this device has {chip.arch / 10}"
        )
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return f"Triton runs on CUDA tensors, not on {device.type} (on the CPU in its interpreter: TRITON_INTERPRET=1)"


@lru_cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@lru_cache
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


def _into(
    out: Tensor, x: Tensor, w: Tensor, bias: Tensor | None, stride: Pair, padding: Sides, dilation: Pair, groups: int,
    tile: Tile | None, backend: Backend,
) -> Tensor:  # fmt: skip
    spec = spec_of(x, w, bias, stride, padding, dilation, groups)
    if tuple(out.shape) != spec.y_shape or out.dtype != x.dtype or out.device != x.device:
        raise KernelError(f"out is {_said(out)}, but the output is {spec.y_shape} in {x.dtype} on {x.device}")
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (out, x, w, bias)):
        raise KernelError(
            "out= is not differentiable, but an argument requires a gradient; call it under torch.no_grad()"
        )
    return conv2d_forward(x, w, bias, stride, padding, dilation, groups, out=out, tile=tile, backend=backend)


def autocast(x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The arguments in autocast's dtype, where it is on; as in torch, float64 stays."""
    kind = x.device.type
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)  # a meta tensor has none
    if not on or x.dtype == torch.float64:
        return x, w, b
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), w.to(dtype), b.to(dtype) if b is not None else None


def _sides(padding: Any, w: Tensor, stride: Pair, dilation: Pair) -> Sides:
    if not isinstance(padding, (str, int)) and len(padding) == 2 and not isinstance(padding[0], int):
        (top, bottom), (left, right) = padding
        return (top, bottom), (left, right)
    kernel = (w.shape[-2], w.shape[-1]) if w.dim() == 4 else (1, 1)  # another dimension is refused later
    return pads_per_side(padding, kernel, stride, dilation)


def _pair(value: int | Sequence[int], name: str) -> Pair:
    pair = (value, value) if isinstance(value, int) else tuple(value) * (2 // max(len(value), 1) or 1)
    if len(pair) != 2:
        raise KernelError(f"{name}={value!r} does not fit a 2-D convolution; give one or two integers")
    return pair[0], pair[1]


def _said(t: Tensor) -> str:
    return f"{tuple(t.shape)} in {t.dtype} on {t.device}"


def _memory_format(x: Tensor, w: Tensor, backend: str, tile: str) -> torch.memory_format:
    """The output's: the same whoever computes it, so that a compiled graph may rely on it."""
    last = torch.channels_last
    by_triton = tile or (_backend if backend == "auto" else backend) == "triton"
    return (
        last
        if by_triton or any(t.is_contiguous(memory_format=last) and not t.is_contiguous() for t in (x, w))
        else torch.contiguous_format
    )


_ARGUMENTS = (
    "Tensor x, Tensor weight, {}, int[] stride, int[] padding, int[] dilation, int groups, str backend, str tile"
)
_FORWARD = f"({_ARGUMENTS.format('Tensor? bias')}) -> Tensor"
_BACKWARD = f"(Tensor g, {_ARGUMENTS.format('bool[] wanted')}) -> (Tensor, Tensor, Tensor)"


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
    shape = spec_of(x, weight, bias, *_unflat(stride, padding, dilation), groups).y_shape
    return x.new_empty(shape).contiguous(memory_format=_memory_format(x, weight, backend, tile))


@torch.library.custom_op("hetconv::conv2d_backward", mutates_args=(), schema=_BACKWARD)
def _conv2d_backward(g, x, weight, wanted, stride, padding, dilation, groups, backend, tile):
    args = _unflat(stride, padding, dilation)
    found = conv2d_backward(g, x, weight, *args, groups, tuple(wanted), backend=backend)
    return tuple(
        _kept(t, like) if t is not None else g.new_empty(0) for t, like in zip(found, (x, weight, g), strict=True)
    )


@_conv2d_backward.register_fake
def _(g, x, weight, wanted, stride, padding, dilation, groups, backend, tile):
    likes = (x, weight, weight.new_empty(weight.shape[0]))
    return tuple(_kept(torch.empty_like(t), t) if w else g.new_empty(0) for t, w in zip(likes, wanted, strict=True))


def _kept(t: Tensor, like: Tensor) -> Tensor:
    """A gradient in the memory format of what it is the gradient of."""
    if t.dim() != 4:
        return t
    last = like.is_contiguous(memory_format=torch.channels_last) and not like.is_contiguous()
    return t.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, *ctx.arguments = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight)


def _gradients(ctx: Any, g: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    wanted = [*ctx.needs_input_grad[:2], ctx.has_bias and ctx.needs_input_grad[2]]
    found = torch.ops.hetconv.conv2d_backward(g, x, weight, wanted, *ctx.arguments)
    return (*(t if w else None for t, w in zip(found, wanted, strict=True)), *(None for _ in ctx.arguments))


_conv2d.register_autograd(_gradients, setup_context=_setup)
