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
    if _is_miscomputed(x, w_KCRS, stride, pad, dilation):
        bias = bias_K.float() if bias_K is not None else None
        return F.conv2d(x.float(), w_KCRS.float(), bias, stride, pad, dilation, groups).to(x.dtype)
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
    g, w, dtype = g_NKPQ, w_KCRS, x_NCHW.dtype
    if _is_miscomputed(x, w, stride, pad, dilation):
        g, x, w = g.float(), x.float(), w.float()
    gx, gw, gb = (
        y.to(dtype) if y is not None else None
        for y in torch.ops.aten.convolution_backward(
            g, x, w, [w.shape[0]], stride, pad, dilation, False, [0, 0], groups, wanted
        )
    )
    if gx is not None and gx.shape != x_NCHW.shape:
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


def _is_miscomputed(x: Tensor, w: Tensor, stride: Pair, pad: Pair, dilation: Pair) -> bool:
    """Half precision on a CPU with one column of output, as halos have: oneDNN's results are wrong (torch 2.13)."""
    if x.device.type != "cpu" or x.dtype not in (torch.float16, torch.bfloat16):
        return False
    return (x.shape[3] + 2 * pad[1] - dilation[1] * (w.shape[3] - 1) - 1) // stride[1] == 0
