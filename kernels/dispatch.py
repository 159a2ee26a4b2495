"""The two halves of a convolution, on plain tensors and without autograd, by whoever
`backend_choice` says.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from hetconv.errors import KernelError
from hetconv.sharding.conv_spec import Conv2dSpec, Pair

from . import aten
from .backend_choice import Answer, Backend, Question, choose
from .epilogue import Finish, shift_with
from .launch import chip_of, krsc, nhwc
from .tiles import Pass, Tile, any_tuned

T = TypeVar("T")
Sides = tuple[Pair, Pair]
_backend: Backend = "auto"
listeners: list[Callable[[Question], None]] = []
"""Each is called with every pass that is about to be computed."""


def set_backend(backend: Backend) -> None:
    """Says what ``backend="auto"`` means in this process: "triton", "aten", or "auto",
    as `backend_choice` has it.
    """
    global _backend
    choose(Question("forward", Conv2dSpec(1, 1, 1, 1, 1, 1, 1), "ieee", "cpu"), backend)
    _backend = backend


def conv2d_forward(
    x_NCHW: Tensor,
    w_KCRS: Tensor,
    bias_K: Tensor | None,
    stride: Pair,
    padding: Sides,
    dilation: Pair,
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
    """`conv2d` without autograd, finished: activation(scale * y + shift + residual),
    each as wanted.

    ``scale`` and ``shift`` (K), say of a folded batch norm, are in float32, or in
    float64 as x; ``residual`` is like y; ``activation`` is one of relu, relu6,
    leaky_relu (with ``slope``), silu, gelu and gelu_tanh. Triton's kernels do it as
    they store, ATen in place, with scale and shift in the filters where these are fewer
    than the results.
    """
    spec = spec_of(
        x_NCHW, w_KCRS, bias_K, stride, padding, dilation, groups, cached=True
    )
    check_finish(spec, x_NCHW, scale, shift, residual)
    answer = _ask("forward", spec, x_NCHW.device, tile, backend)
    if answer.triton:
        from .triton import backend as triton_backend

        shift = shift_with(bias_K, scale, shift)
        finish = Finish.of(scale, shift, activation, slope)
        args, rest = (
            (spec, x_NCHW, w_KCRS, out, precision(spec)),
            (scale, shift, residual, finish),
        )
        return _tiled(lambda t: triton_backend.forward(*args, t, *rest), answer, tile)
    finish = Finish.of(scale, shift, activation, slope)
    geometry, ends = (
        (stride, padding, dilation, groups),
        (scale, shift, residual, finish),
    )
    y = aten.forward(x_NCHW, w_KCRS, bias_K, *geometry, spec.y_shape, *ends)
    return y if out is None else out.copy_(y)


class Route(NamedTuple):
    """Who computes, and Triton by which tile: arguments of `conv2d_forward`."""

    backend: Backend = "auto"
    tile: Tile | None = None


def route(
    x_NCHW: Tensor,
    w_KCRS: Tensor,
    stride: Pair,
    padding: Sides,
    dilation: Pair,
    groups: int,
) -> Route:
    """As a convolution is computed that is asked of nobody in particular.

    Parts of its batch that take the same route add in the same order.
    """
    spec = spec_of(x_NCHW, w_KCRS, None, stride, padding, dilation, groups, cached=True)
    answer = _ask("forward", spec, x_NCHW.device, None, "auto")
    if not answer.triton:
        return Route("aten")
    from .triton import backend as triton_backend

    args = (spec, nhwc(x_NCHW), krsc(w_KCRS), precision(spec))
    return Route(
        "triton",
        _tiled(lambda tile: triton_backend.forward_tile(*args, tile), answer, None),
    )


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
    """The gradients of input, filters and bias, where ``wanted``, of `conv2d` called
    with the same arguments.
    """
    spec = spec_of(x_NCHW, w_KCRS, None, stride, padding, dilation, groups, cached=True)
    if (
        tuple(g_NKPQ.shape) != spec.y_shape
        or g_NKPQ.dtype != x_NCHW.dtype
        or g_NKPQ.device != x_NCHW.device
    ):
        raise KernelError(
            f"the gradient is {said(g_NKPQ)}, but the convolution's output is {spec.y_shape} "
            f"in {x_NCHW.dtype} "
            f"on {x_NCHW.device}"
        )
    passes: tuple[Pass, Pass] = ("input gradient", "weight gradient")
    asked = [
        _ask(p, spec, x_NCHW.device, tile, backend) if w else None
        for p, w in zip(passes, wanted, strict=False)
    ]
    by_triton = [a is not None and a.triton for a in asked]
    by_aten = [
        w and not t for w, t in zip(wanted, [*by_triton, any(by_triton)], strict=True)
    ]
    found: list[Tensor | None] = [None, None, None]
    if any(by_aten):
        args = (
            g_NKPQ,
            x_NCHW,
            w_KCRS,
            stride,
            padding,
            dilation,
            groups,
            tuple(by_aten),
        )
        found = list(aten.backward(*args))  # type: ignore[arg-type]
    if any(by_triton):
        from .triton import backend as triton_backend

        operands = (spec, g_NKPQ, x_NCHW, w_KCRS, precision(spec))
        if asked[0] is not None and asked[0].triton:
            found[0] = _tiled(
                lambda t: triton_backend.input_gradient(*operands, t), asked[0], tile
            )
        if asked[1] is not None and asked[1].triton:
            found[1] = _tiled(
                lambda t: triton_backend.weight_gradient(*operands, t), asked[1], tile
            )
        if wanted[2]:
            found[2] = aten.summed_pixels(g_NKPQ)
    return found[0], found[1], found[2]


def spec_of(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Sides,
    dilation: Pair,
    groups: int,
    cached: bool = False,
) -> Conv2dSpec:
    """What is asked for, in integers. Raises `KernelError` for tensors that do not fit each other.

    ``cached``: it may be an earlier one; not for tensors that are being traced, whose
    sizes are symbols.
    """
    if x.dim() != 4 or w.dim() != 4:
        raise KernelError(
            "a 2-D convolution takes x (N, C, H, W) and weight (K, C / groups, R, S), not "
            f"{said(x)} and {said(w)}"
        )
    for name, t in (("weight", w), ("bias", bias)):
        if t is not None and (t.dtype != x.dtype or t.device != x.device):
            raise KernelError(
                f"{name} is {said(t)}, but x is {said(x)}; give both in one dtype and on one device"
            )
    biases = tuple(bias.shape) if bias is not None else None
    spec = _cached_spec if cached else _spec
    return spec(
        tuple(x.shape),
        tuple(w.shape),
        biases,
        x.dtype,
        stride,
        padding,
        dilation,
        groups,
    )


def _spec(
    x: tuple[int, ...],
    w: tuple[int, ...],
    bias: tuple[int, ...] | None,
    dtype: torch.dtype,
    stride: Pair,
    padding: Sides,
    dilation: Pair,
    groups: int,
) -> Conv2dSpec:
    (N, C, H, W), (K, c, R, S) = x, w
    if groups < 1 or c * groups != C or K % groups:
        raise KernelError(
            f"x has {C} channels, so in {groups} groups weight (K, C / groups, R, S) needs {C} "
            f"/ {groups} channels and "
            f"a multiple of {groups} filters, but it is {w}"
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
    spec = Conv2dSpec(
        N, C, H, W, K, R, S, stride, padding, dilation, groups, str(dtype)[6:]
    )
    if min(spec.P, spec.Q) < 1:
        raise KernelError(
            f"an image of {H} x {W} with padding {padding} is smaller than the filter, {R} x "
            f"{S} at dilation {dilation}"
        )
    return spec


_cached_spec = lru_cache(4096)(_spec)


def check_finish(
    spec: Conv2dSpec,
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    residual: Tensor | None,
) -> None:
    exact = torch.promote_types(x.dtype, torch.float32)
    for name, t in (("scale", scale), ("shift", shift)):
        if t is not None and (
            tuple(t.shape) != (spec.K,) or t.dtype != exact or t.device != x.device
        ):
            raise KernelError(
                f"{name} is {said(t)}, but must be ({spec.K},) in {exact} on {x.device}"
            )
    r = residual
    if r is not None and (
        tuple(r.shape) != spec.y_shape or r.dtype != x.dtype or r.device != x.device
    ):
        raise KernelError(
            f"residual is {said(r)}, but the output is {spec.y_shape} in {x.dtype} on {x.device}"
        )


def precision(spec: Conv2dSpec) -> str:
    """How float32 is multiplied: "tf32" where torch lets cuDNN use it, else "ieee"."""
    return (
        "tf32"
        if spec.dtype == "float32"
        and torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]
        else "ieee"
    )


def _ask(
    what: Pass,
    spec: Conv2dSpec,
    device: torch.device,
    tile: Tile | None,
    backend: Backend,
) -> Answer:
    question = Question(
        what, spec, precision(spec), device_name(device), obstacle(device), tile
    )
    for listener in listeners:
        listener(question)
    return choose(question, preferred(backend))


def _tiled(run: Callable[[Tile | None], T], answer: Answer, asked: Tile | None) -> T:
    """By the answer's tile. One from the table was tuned on channels_last: if it cannot
    run here, by the default.
    """
    try:
        return run(answer.tile)
    except KernelError:
        if answer.tile is None or asked is not None:
            raise
        return run(None)


def preferred(backend: Backend) -> Backend:
    """What was asked for, where "auto" is what `set_backend` made of it."""
    return _backend if backend == "auto" else backend


def only_aten() -> bool:
    """Whether ATen computes whatever is asked of nobody in particular, and nobody listens."""
    return not listeners and (
        _backend == "aten" or (_backend == "auto" and not any_tuned())
    )


def wants_triton(like: Tensor, backend: Backend = "auto") -> bool:
    """Whether Triton is asked to move numbers (not to multiply them): on CUDA it is,
    unless told otherwise.
    """
    chosen = preferred(backend)
    return chosen == "triton" or (chosen == "auto" and like.is_cuda)


def obstacle(device: torch.device) -> str | None:
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
    return (
        f"Triton runs on CUDA tensors, not on {device.type} (on the CPU in its interpreter: "
        "TRITON_INTERPRET=1)"
    )


@lru_cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@lru_cache
def device_name(device: torch.device) -> str:
    """A GPU's name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def said(t: Tensor) -> str:
    return f"{tuple(t.shape)} in {t.dtype} on {t.device}"
