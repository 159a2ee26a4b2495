"""Convolutions, and their gradients, as one product of matrices each, where that is faster than torch's own on a CPU.

A row of the columns' matrix is what one pixel of the output reads: tap by tap, its channels beside each other. Filters
that are channels-last are a matrix as they lie. oneDNN's convolution brings filters, or their gradient, into another
order and back, which of few pixels takes longer than computing does; those of one tap torch leaves to MKL.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from ..spec import Ints, Span, Window
from . import products
from .processor import has_products, in_full, long_vectors
from .products import product, summed_rows
from .tiles import Pass

Sides = tuple[Span, ...]
FEW, FEW_OF_WIDE, WIDE = 144, 256, 256  # pixels of all outputs; and of so many filters and channels at least
FEW_OF_GRADIENT, FOR_EACH = 600, 4  # for the gradient of filters; and at most so many for each of them, or channel
FEWEST, LEAST = 16, 1 << 23  # channels or filters, multiplications: of less, what Python takes is too much
FOR_EACH_TAP = 1 << 21  # multiplications, of the input's gradient, which adds up taps one by one
MANY = 16  # images, of which torch leaves one tap to oneDNN


def fit(x_NCHW: Tensor, w_KCRS: Tensor, groups: int) -> bool:
    """Whether such products compute this convolution: on a CPU with long vectors, in float32, with channels last."""
    if x_NCHW.dtype != torch.float32 or x_NCHW.dim() != 4 or groups > 1 or x_NCHW.device.type != "cpu":
        return False
    if not (long_vectors() and has_products()) or w_KCRS.dtype != torch.float32:
        return False
    if x_NCHW.stride(1) != 1 or not w_KCRS.is_contiguous(memory_format=torch.channels_last):
        return False
    return in_full()


def are_faster(what: Pass, images: int, w_KCRS: Ints, size: Ints, stride: Ints) -> bool:
    """Whether a product is faster than torch's own (2.13, as measured), for outputs of this ``size``."""
    return _are_faster(what, images, tuple(w_KCRS), tuple(size), stride, torch.get_num_threads())


@lru_cache(4096)
def _are_faster(what: Pass, images: int, w_KCRS: Ints, size: Ints, stride: Ints, threads: int) -> bool:
    (k, c, *taps), pixels = w_KCRS, images * prod(size)
    if min(k, c) < FEWEST:
        return False
    if max(*taps, *stride) == 1 and threads == 1 and images < MANY and products.are_faster(what, pixels, k, c):
        return True
    few, least = FEW_OF_WIDE if min(k, c) >= WIDE else FEW, LEAST
    if what == "weight gradient":
        few = min(FEW_OF_GRADIENT, FOR_EACH * min(k, c))
    elif what == "input gradient":
        least = FOR_EACH_TAP * prod(taps)
    return 1 < pixels <= few and pixels * prod(w_KCRS) >= least


def size_of(x_NCHW: Ints, w_KCRS: Ints, stride: Ints, padding: Sides, dilation: Ints) -> Ints:
    """(P, Q), of the output."""
    geometry = zip(x_NCHW[2:], w_KCRS[2:], stride, dilation, padding, strict=True)
    return tuple(Window(taps, step, reach, *sides).out_size(n) for n, taps, step, reach, sides in geometry)


def forward(
    x_NCHW: Tensor, w_KCRS: Tensor, bias_K: Tensor | None, stride: Ints, padding: Sides, dilation: Ints
) -> Tensor:
    """y (N, K, P, Q), channels last."""
    size = size_of(x_NCHW.shape, w_KCRS.shape, stride, padding, dilation)
    columns = _columns(x_NCHW, tuple(w_KCRS.shape[2:]), size, stride, padding, dilation)
    y_NPQK = product(columns, _matrix(w_KCRS), bias_K).view(len(x_NCHW), *size, len(w_KCRS))
    return y_NPQK.permute(0, 3, 1, 2)


def gradient_of_input(
    g_NKPQ: Tensor, x_shape: Ints, w_KCRS: Tensor, stride: Ints, padding: Sides, dilation: Ints
) -> Tensor:
    """Of ``x_shape``, channels last: what each pixel of the output gives to all that it read, added up there."""
    (n, c, height, width), (r, s), (p, q) = x_shape, w_KCRS.shape[2:], g_NKPQ.shape[2:]
    given = product(_pixels(g_NKPQ), _matrix(w_KCRS).t()).view(n, p, q, r, s, c)
    if r == s == max(stride) == 1 and (height, width) == (p, q):
        return given.view(n, p, q, c).permute(0, 3, 1, 2)
    x_NHWC = given.new_zeros(n, height, width, c)
    for row in range(r):
        to_rows, rows = _reached(row * dilation[0] - padding[0][0], stride[0], p, height)
        for column in range(s):
            to_columns, columns = _reached(column * dilation[1] - padding[1][0], stride[1], q, width)
            x_NHWC[:, to_rows, to_columns] += given[:, rows, columns, row, column]
    return x_NHWC.permute(0, 3, 1, 2)


def gradient_of_filters(
    g_NKPQ: Tensor, x_NCHW: Tensor, w_KCRS: Tensor, stride: Ints, padding: Sides, dilation: Ints
) -> Tensor:
    """Like w, channels last."""
    k, c, r, s = w_KCRS.shape
    columns = _columns(x_NCHW, (r, s), tuple(g_NKPQ.shape[2:]), stride, padding, dilation)
    return summed_rows(_pixels(g_NKPQ), columns).view(k, r, s, c).permute(0, 3, 1, 2)


def _columns(x_NCHW: Tensor, taps: Ints, size: Ints, stride: Ints, padding: Sides, dilation: Ints) -> Tensor:
    """(N * P * Q, R * S * C): what each pixel of the output reads; of one tap and all pixels, the input as it lies."""
    if any(side != (0, 0) for side in padding):
        x_NCHW = F.pad(x_NCHW, (*padding[1], *padding[0]))
    (n, c, _, _), (of_n, of_c, of_h, of_w) = x_NCHW.shape, x_NCHW.stride()
    steps = (of_n, of_h * stride[0], of_w * stride[1], of_h * dilation[0], of_w * dilation[1], of_c)
    return x_NCHW.as_strided((n, *size, *taps, c), steps).reshape(n * prod(size), prod(taps) * c)


def _pixels(g_NKPQ: Tensor) -> Tensor:
    """(N * P * Q, K)."""
    return g_NKPQ.permute(0, 2, 3, 1).reshape(-1, g_NKPQ.shape[1])


def _matrix(w_KCRS: Tensor) -> Tensor:
    """(K, R * S * C)."""
    return w_KCRS.permute(0, 2, 3, 1).reshape(len(w_KCRS), -1)


def _reached(first: int, step: int, outputs: int, inputs: int) -> tuple[slice, slice]:
    """Of a tap that reads input ``first`` for output 0, and one ``step`` further for each: the inputs that there are,
    and the outputs that read them.
    """
    lo = max(-(first // step), 0)
    count = max(min(outputs, (inputs - 1 - first) // step + 1) - lo, 0)
    start = first + lo * step
    return slice(start, start + count * step, step), slice(lo, lo + count)
