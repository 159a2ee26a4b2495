"""2-D convolution through ATen, with padding per side, and its gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

Pair = tuple[int, int]
Sides = tuple[Pair, Pair]


def conv2d(
    x_NCHW: Tensor, w_KCRS: Tensor, bias_K: Tensor | None, stride: Pair, padding: Sides, dilation: Pair, groups: int
) -> Tensor:
    """y (N, K, P, Q). ``padding`` is ((top, bottom), (left, right)); unequal sides copy the input once."""
    x, pad = _evenly_padded(x_NCHW, padding)
    return F.conv2d(x, w_KCRS, bias_K, stride, pad, dilation, groups)


def conv2d_backward(
    g_NKPQ: Tensor,
    x_NCHW: Tensor,
    w_KCRS: Tensor,
    stride: Pair,
    padding: Sides,
    dilation: Pair,
    groups: int,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of input, filters and bias, where ``wanted``, of `conv2d` called with the same arguments."""
    x, pad = _evenly_padded(x_NCHW, padding)
    gx, gw, gb = torch.ops.aten.convolution_backward(
        g_NKPQ, x, w_KCRS, [w_KCRS.shape[0]], stride, pad, dilation, False, [0, 0], groups, wanted
    )
    if wanted[0] and x is not x_NCHW:
        (top, _), (left, _) = ((0, 0) if a == b else (a, b) for a, b in padding)
        gx = gx[:, :, top : top + x_NCHW.shape[2], left : left + x_NCHW.shape[3]]
    return gx, gw, gb


def _evenly_padded(x: Tensor, padding: Sides) -> tuple[Tensor, Pair]:
    """The input with its unequal paddings made explicit, and the equal ones that are left."""
    uneven = [(0, 0) if lo == hi else (lo, hi) for lo, hi in padding]
    even = [lo if lo == hi else 0 for lo, hi in padding]
    if any(side != (0, 0) for side in uneven):
        x = F.pad(x, (*uneven[1], *uneven[0]))
    return x, (even[0], even[1])
