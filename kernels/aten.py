"""Convolutions of any rank through ATen, with padding per side, and their gradients.
Letters as for images.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from hetconv.sharding.conv_spec import Ints, Span

from .epilogue import Finish, finished, per_channel, shift_with

Sides = tuple[Span, ...]


def forward(
    x_NCHW: Tensor,
    w_KCRS: Tensor,
    bias_K: Tensor | None,
    stride: Ints,
    padding: Sides,
    dilation: Ints,
    groups: int,
    y_shape: Ints,
    scale: Tensor | None,
    shift: Tensor | None,
    residual: Tensor | None,
    finish: Finish,
) -> Tensor:
    """y of ``y_shape``, finished; with scale and shift in the filters where these are
    fewer than the results.
    """
    if (scale is not None or shift is not None) and w_KCRS.numel() < prod(y_shape):
        w_KCRS, bias_K, scale, shift = _folded(w_KCRS, bias_K, scale, shift)
    if w_KCRS.numel():
        y = conv(x_NCHW, w_KCRS, bias_K, stride, padding, dilation, groups)
    else:  # which torch refuses, or answers with another shape
        y = x_NCHW.new_zeros(y_shape)
        y = y if bias_K is None else y.add_(per_channel(bias_K, y))
    return finished(y, scale, shift, residual, finish.activation, finish.slope)


def _folded(
    w: Tensor, bias: Tensor | None, scale: Tensor | None, shift: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Scale and shift as part of the filters and the bias, unless these are less
    precise: a pass over y less.
    """
    if any(t is not None and t.dtype != w.dtype for t in (scale, shift)):
        return w, bias, scale, shift
    scaled = w if scale is None else w * scale.view(-1, *(1,) * (w.dim() - 1))
    return scaled, shift_with(bias, scale, shift), None, None


def conv(
    x_NCHW: Tensor,
    w_KCRS: Tensor,
    bias_K: Tensor | None,
    stride: Ints,
    padding: Sides,
    dilation: Ints,
    groups: int,
) -> Tensor:
    """y (N, K, P, Q). ``padding`` is ((top, bottom), (left, right)); unequal sides copy
    the input once.
    """
    x, pad = _evenly_padded(x_NCHW, padding)
    w, b, dtype, no_extra = w_KCRS, bias_K, x.dtype, (0,) * len(pad)
    if _is_miscomputed(x, w, stride, pad, dilation):
        x, w, b = x.float(), w.float(), b.float() if b is not None else None
    return torch.convolution(
        x, w, b, stride, pad, dilation, False, no_extra, groups
    ).to(dtype)


def backward(
    g_NKPQ: Tensor,
    x_NCHW: Tensor,
    w_KCRS: Tensor,
    stride: Ints,
    padding: Sides,
    dilation: Ints,
    groups: int,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of input, filters and bias, where ``wanted``, of `conv` called with
    the same arguments.
    """
    if not w_KCRS.numel():
        zeros = (
            torch.zeros_like(x_NCHW),
            torch.zeros_like(w_KCRS),
            summed_pixels(g_NKPQ),
        )
        gx, gw, gb = (t if w else None for t, w in zip(zeros, wanted, strict=True))
        return gx, gw, gb
    geometry = stride, padding, dilation, groups
    if (
        not any(wanted[1:])
        or x_NCHW.device.type != "cpu"
        or not overruns(tuple(w_KCRS.shape), stride)
    ):
        return _torch_backward(g_NKPQ, x_NCHW, w_KCRS, *geometry, wanted)
    input_only = (True, False, False)
    gx = (
        _torch_backward(g_NKPQ, x_NCHW, w_KCRS, *geometry, input_only)[0]
        if wanted[0]
        else None
    )
    gw = (
        _of_read_pixels(g_NKPQ, x_NCHW, w_KCRS, stride, padding, groups)
        if wanted[1]
        else None
    )
    # oneDNN would compute the bias's gradient together with that of the filters.
    return gx, gw, summed_pixels(g_NKPQ) if wanted[2] else None


def _torch_backward(
    g_NKPQ: Tensor,
    x_NCHW: Tensor,
    w_KCRS: Tensor,
    stride: Ints,
    padding: Sides,
    dilation: Ints,
    groups: int,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """ATen's own, in one call."""
    x, pad = _evenly_padded(x_NCHW, padding)
    g, w, dtype, no_extra = g_NKPQ, w_KCRS, x_NCHW.dtype, (0,) * len(pad)
    if _is_miscomputed(x, w, stride, pad, dilation):
        g, x, w = g.float(), x.float(), w.float()
    gx, gw, gb = (
        y.to(dtype) if y is not None else None
        for y in torch.ops.aten.convolution_backward(
            g,
            x,
            w,
            [w.shape[0]],
            stride,
            pad,
            dilation,
            False,
            no_extra,
            groups,
            wanted,
        )
    )
    if gx is not None and gx.shape != x_NCHW.shape:
        before = (
            (0 if lo == hi else lo, n)
            for (lo, hi), n in zip(padding, x_NCHW.shape[2:], strict=True)
        )
        gx = gx[(slice(None), slice(None), *(slice(lo, lo + n) for lo, n in before))]
    return gx, gw, gb


def overruns(w_shape: Ints, stride: Ints) -> bool:
    """Whether oneDNN's gradient of such filters writes beyond its memory on some CPUs
    (torch 2.13): 1 x 1, strided, of fewer channels than a register holds. It may crash
    at any time after it.
    """
    return max(w_shape[2:]) == 1 < max(stride) and w_shape[1] < 16


def _of_read_pixels(
    g: Tensor, x: Tensor, w: Tensor, stride: Ints, padding: Sides, groups: int
) -> Tensor:
    """The gradient of filters of one tap: that of a convolution without stride, of the
    pixels that are read.
    """
    if any(side != (0, 0) for side in padding):
        x = F.pad(x, [n for side in reversed(padding) for n in side])
    steps = (
        slice(0, (n - 1) * s + 1, s) for n, s in zip(g.shape[2:], stride, strict=True)
    )
    read = x[(slice(None), slice(None), *steps)]
    ones, nothing = (1,) * len(stride), ((0, 0),) * len(stride)
    _, gw, _ = backward(g, read, w, ones, nothing, ones, groups, (False, True, False))
    assert gw is not None
    return gw


def summed_pixels(g_NKPQ: Tensor) -> Tensor:
    """The gradient of a bias."""
    return g_NKPQ.sum((0, *range(2, g_NKPQ.dim())))


def _evenly_padded(x: Tensor, padding: Sides) -> tuple[Tensor, Ints]:
    """The input with its unequal paddings made explicit, and the equal ones that are left."""
    explicit, pad = _uneven(padding)
    return F.pad(x, explicit) if explicit else x, pad


@lru_cache
def _uneven(padding: Sides) -> tuple[list[int], Ints]:
    """Unequal paddings, last dimension first as `F.pad` takes them (none if all are
    equal), and the equal ones.
    """
    uneven = [(0, 0) if lo == hi else (lo, hi) for lo, hi in padding]
    explicit = (
        [n for side in reversed(uneven) for n in side]
        if any(side != (0, 0) for side in uneven)
        else []
    )
    return explicit, tuple(lo if lo == hi else 0 for lo, hi in padding)


def _is_miscomputed(
    x: Tensor, w: Tensor, stride: Ints, pad: Ints, dilation: Ints
) -> bool:
    """Half precision on a CPU with one column of output, as halos have: oneDNN's
    results are wrong (torch 2.13).
    """
    if x.device.type != "cpu" or x.dtype not in (torch.float16, torch.bfloat16):
        return False
    return bool(
        (x.shape[-1] + 2 * pad[-1] - dilation[-1] * (w.shape[-1] - 1) - 1) // stride[-1]
        == 0
    )
