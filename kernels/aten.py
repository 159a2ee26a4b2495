"""Convolutions with any number of spatial dimensions by ATen, padded per side.

Workarounds for wrong results and crashes of oneDNN on CPUs are here, each with the
version of torch that it was found in.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from hetconv.sharding.conv_spec import ConvGeometry, Ints, Padding

from .epilogue import Epilogue
from .memory_formats import is_channels_last, is_narrow_cpu

Wanted = tuple[bool, bool, bool]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def forward(
    x_NCHW: Tensor,
    w_KCRS: Tensor,
    bias_K: Tensor | None,
    geometry: ConvGeometry,
    y_shape: Ints,
    epilogue: Epilogue,
) -> Tensor:
    """Returns a convolution with its epilogue.

    Scale and shift are multiplied into filters that are fewer than the results: a pass
    over y less.

    Args:
        x_NCHW: Input (N, C, *size).
        w_KCRS: Filters (K, C / groups, *kernel).
        bias_K: Bias (K), if any.
        geometry: Stride, padding, dilation and groups.
        y_shape: Shape (N, K, *out_size) of the result.
        epilogue: What is applied to the convolution.
    """
    if not w_KCRS.numel():  # ATen refuses it, or returns another shape
        return epilogue.with_bias(bias_K).apply(x_NCHW.new_zeros(y_shape))
    factors = [t for t in (epilogue.scale, epilogue.shift) if t is not None]
    is_as_precise = all(t.dtype == w_KCRS.dtype for t in factors)
    if factors and is_as_precise and w_KCRS.numel() < prod(y_shape):
        folded = epilogue.with_bias(bias_K)
        if epilogue.scale is not None:
            w_KCRS = w_KCRS * epilogue.scale.view(-1, *(1,) * (w_KCRS.dim() - 1))
        bias_K, epilogue = folded.shift, epilogue._replace(scale=None, shift=None)
    return epilogue.apply(conv(x_NCHW, w_KCRS, bias_K, geometry))


def conv(
    x_NCHW: Tensor, w_KCRS: Tensor, bias_K: Tensor | None, geometry: ConvGeometry
) -> Tensor:
    """Returns a convolution (N, K, *out_size); unequal padding copies the input once.

    Args:
        x_NCHW: Input (N, C, *size).
        w_KCRS: Filters (K, C / groups, *kernel), not empty.
        bias_K: Bias (K), if any.
        geometry: Stride, padding, dilation and groups.
    """
    x, pad = _evenly_padded(x_NCHW, geometry.padding)
    w, b, dtype = w_KCRS, bias_K, x.dtype
    if is_miscomputed(x, w, geometry, pad):
        x, w, b = x.float(), w.float(), b.float() if b is not None else None
    stride, _, dilation, groups = geometry
    no_extra = (0,) * len(pad)
    y = torch.convolution(x, w, b, stride, pad, dilation, False, no_extra, groups)
    return y.to(dtype)


def backward(
    g_NKPQ: Tensor,
    x_NCHW: Tensor,
    w_KCRS: Tensor,
    geometry: ConvGeometry,
    wanted: Wanted,
) -> Gradients:
    """Returns the gradients of input, filters and bias of `conv`, each where wanted.

    Args:
        g_NKPQ: Gradient of the result.
        x_NCHW: Input, as `conv` was given it.
        w_KCRS: Filters, as `conv` was given them; they may be empty.
        geometry: Stride, padding, dilation and groups.
        wanted: Which of the three gradients are computed; the others are None.
    """
    if not w_KCRS.numel():
        return (
            torch.zeros_like(x_NCHW) if wanted[0] else None,
            torch.zeros_like(w_KCRS) if wanted[1] else None,
            summed_pixels(g_NKPQ) if wanted[2] else None,
        )
    is_safe = x_NCHW.device.type != "cpu" or not overruns(w_KCRS.shape, geometry.stride)
    if is_safe or not any(wanted[1:]):
        return _torch_backward(g_NKPQ, x_NCHW, w_KCRS, geometry, wanted)
    gx = gw = None
    if wanted[0]:
        input_only = (True, False, False)
        gx = _torch_backward(g_NKPQ, x_NCHW, w_KCRS, geometry, input_only)[0]
    if wanted[1]:
        gw = _weight_gradient_of_read_pixels(g_NKPQ, x_NCHW, w_KCRS, geometry)
    # oneDNN would compute the bias's gradient together with that of the filters.
    return gx, gw, summed_pixels(g_NKPQ) if wanted[2] else None


def _torch_backward(
    g: Tensor, x_NCHW: Tensor, w: Tensor, geometry: ConvGeometry, wanted: Wanted
) -> Gradients:
    x, pad = _evenly_padded(x_NCHW, geometry.padding)
    dtype = x.dtype
    if is_miscomputed(x, w, geometry, pad):
        g, x, w = g.float(), x.float(), w.float()
    if wanted[1] and is_slow_channels_last(x, w, geometry.groups):
        of_input, others = (wanted[0], False, False), (False, *wanted[1:])
        gx, _, _ = _evenly_padded_backward(g, x, w, geometry, pad, of_input)
        g, x, w = g.contiguous(), x.contiguous(), w.contiguous()
        _, gw, gb = _evenly_padded_backward(g, x, w, geometry, pad, others)
        assert gw is not None
        gw = gw.contiguous(memory_format=torch.channels_last)
    else:
        gx, gw, gb = _evenly_padded_backward(g, x, w, geometry, pad, wanted)
    if gx is not None and gx.shape != x_NCHW.shape:
        for dim, (lo, hi) in enumerate(geometry.padding, 2):
            gx = gx.narrow(dim, 0 if lo == hi else lo, x_NCHW.shape[dim])
    gx, gw, gb = (t.to(dtype) if t is not None else None for t in (gx, gw, gb))
    return gx, gw, gb


def _evenly_padded_backward(
    g: Tensor, x: Tensor, w: Tensor, geometry: ConvGeometry, pad: Ints, wanted: Wanted
) -> Gradients:
    stride, _, dilation, groups = geometry
    no_extra, biases = (0,) * len(pad), [w.shape[0]]
    found: Gradients = torch.ops.aten.convolution_backward(
        g, x, w, biases, stride, pad, dilation, False, no_extra, groups, wanted
    )
    return found


def is_slow_channels_last(x: Tensor, w: Tensor, groups: int) -> bool:
    """Returns whether oneDNN's weight gradient is slow for channels-last images.

    On CPUs without AVX-512 it takes 2 to 5 times as long as for contiguous images of 100
    pixels a side and more, and as long for small ones, copies of the images included.
    Filters of one pixel are faster channels-last. Found in torch 2.13.

    Args:
        x: Input.
        w: Filters.
        groups: Groups of the convolution.
    """
    return (
        is_narrow_cpu(x.device)
        and x.dtype == torch.float32
        and groups == 1
        and w.dim() == 4
        and max(w.shape[2:]) > 1
        and is_channels_last(x)
    )


def overruns(w_shape: Ints, stride: Ints) -> bool:
    """Returns whether oneDNN's weight gradient writes beyond its memory on some CPUs.

    Found in torch 2.13, for strided filters of one tap with fewer channels than a
    register holds. The process may crash at any time after it.
    """
    return max(w_shape[2:]) == 1 < max(stride) and w_shape[1] < 16


def _weight_gradient_of_read_pixels(
    g: Tensor, x: Tensor, w: Tensor, geometry: ConvGeometry
) -> Tensor:
    """The weight gradient of filters of one tap, from the pixels that they read.

    These are an image that is convolved without stride, see `overruns`.
    """
    if any(side != (0, 0) for side in geometry.padding):
        x = F.pad(x, [n for side in reversed(geometry.padding) for n in side])
    for dim, stride in enumerate(geometry.stride, 2):
        last = (g.shape[dim] - 1) * stride
        x = x.narrow(dim, 0, last + 1)[
            (slice(None),) * dim + (slice(None, None, stride),)
        ]
    ones, no_padding = (1,) * len(geometry.stride), ((0, 0),) * len(geometry.stride)
    unstrided = ConvGeometry(ones, no_padding, ones, geometry.groups)
    gw = backward(g, x, w, unstrided, (False, True, False))[1]
    assert gw is not None
    return gw


def summed_pixels(g_NKPQ: Tensor) -> Tensor:
    """Returns the gradient (K) of a bias from that of the result."""
    return g_NKPQ.sum((0, *range(2, g_NKPQ.dim())))


def _evenly_padded(x: Tensor, padding: Padding) -> tuple[Tensor, Ints]:
    """The input, padded where sides are unequal, and the equal padding that is left."""
    explicit, pad = _split_padding(padding)
    return F.pad(x, explicit) if explicit else x, pad


@lru_cache
def _split_padding(padding: Padding) -> tuple[list[int], Ints]:
    """Unequal padding as `F.pad` takes it, empty if there is none, and equal padding."""
    equal = tuple(lo if lo == hi else 0 for lo, hi in padding)
    if all(lo == hi for lo, hi in padding):
        return [], equal
    uneven = [(0, 0) if lo == hi else (lo, hi) for lo, hi in reversed(padding)]
    return [n for side in uneven for n in side], equal


def is_miscomputed(x: Tensor, w: Tensor, geometry: ConvGeometry, pad: Ints) -> bool:
    """Returns whether oneDNN's results are wrong: half precision, one column of output.

    Found on CPUs with torch 2.13; halos are such images.

    Args:
        x: Input (N, C, *size).
        w: Filters.
        geometry: Stride, dilation and groups.
        pad: Padding on both sides of each dimension.
    """
    if x.device.type != "cpu" or x.dtype not in (torch.float16, torch.bfloat16):
        return False
    reach = geometry.dilation[-1] * (w.shape[-1] - 1)
    steps = (x.shape[-1] + 2 * pad[-1] - reach - 1) // geometry.stride[-1]
    return bool(steps == 0)
