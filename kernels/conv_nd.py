"""The two halves of a convolution of any rank: of images as `dispatch` says, of other
ranks by ATen.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hetconv.sharding.conv_spec import ConvSpec, Ints

from . import aten
from .compute_hook import hooked
from .dispatch import Route, conv2d_backward, conv2d_forward, only_aten
from .epilogue import Finish

ANY = Route()
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The memory format that convolutions run fastest in, by a tensor's dimensions."""


@hooked
def conv_forward(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    stride: Ints,
    padding: aten.Sides,
    dilation: Ints,
    groups: int,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    slope: float = 0.01,
    route: Route = ANY,
) -> Tensor:
    """y (N, K, ...) of x (N, C, ...), finished as by `conv2d_forward`; ``route`` says
    who computes that of images.
    """
    geometry: Any = (stride, padding, dilation, groups)
    unfinished = (
        scale is None and shift is None and residual is None and activation is None
    )
    if unfinished and route == ANY and only_aten() and w.numel():
        return aten.conv(x, w, bias, *geometry)
    if x.dim() == 4:
        return conv2d_forward(
            x,
            w,
            bias,
            *geometry,
            scale=scale,
            shift=shift,
            residual=residual,
            activation=activation,
            slope=slope,
            backend=route.backend,
            tile=route.tile,
        )
    y_shape, finish = (
        _y_shape(tuple(x.shape), tuple(w.shape), *geometry),
        Finish.of(scale, shift, activation, slope),
    )
    return aten.forward(
        x,
        w,
        bias,
        stride,
        padding,
        dilation,
        groups,
        y_shape,
        scale,
        shift,
        residual,
        finish,
    )


@hooked
def conv_backward(
    g: Tensor,
    x: Tensor,
    w: Tensor,
    stride: Ints,
    padding: aten.Sides,
    dilation: Ints,
    groups: int,
    wanted: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of input, filters and bias, where ``wanted``, of `conv_forward`
    called with the same arguments.
    """
    args: Any = (g, x, w, stride, padding, dilation, groups, wanted)
    return (
        conv2d_backward(*args)
        if x.dim() == 4 and not only_aten()
        else aten.backward(*args)
    )


@lru_cache(4096)
def _y_shape(
    x: Ints, w: Ints, stride: Ints, padding: aten.Sides, dilation: Ints, groups: int
) -> Ints:
    return ConvSpec(
        x[0], x[1], x[2:], w[0], w[2:], stride, padding, dilation, groups
    ).y_shape
