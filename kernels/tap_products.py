"""The gradient of a convolution's filters as products of matrices, where these are faster than oneDNN's own."""

from __future__ import annotations

import torch
from torch import Tensor

from ..spec import Ints, Span
from .processor import short_vectors

BLOCK = 2 << 20  # bytes of the matrices of a block of rows
FEWEST, FEW, LEAST = 8, 32, 1 << 24  # channels; channels or filters; multiplications of an image that are worth it


def are_faster(x_NCHW: Tensor, w_KCRS: Tensor, pixels: int, stride: Ints, groups: int) -> bool:
    """Whether `gradient_of_filters` is faster than oneDNN's (torch 2.13) for so many ``pixels`` of an image's output.

    On CPUs with short vectors, for images with channels last in float32: oneDNN's takes two to six times as long as
    the gradient of the input there, products 1.1 to 1.5 times.
    """
    if x_NCHW.device.type != "cpu" or x_NCHW.dtype != torch.float32 or x_NCHW.dim() != 4 or max(*stride, groups) > 1:
        return False
    k, c, *taps = w_KCRS.shape
    enough = max(taps) > 1 and c >= FEWEST and max(k, c) >= FEW and pixels * w_KCRS.numel() >= LEAST
    return enough and short_vectors() and x_NCHW.stride(1) == 1  # channels last, if of a part of an image


def gradient_of_filters(
    g_NKPQ: Tensor, x_NCHW: Tensor, w_KCRS: Tensor, padding: tuple[Span, ...], dilation: Ints
) -> Tensor:
    """Of a convolution without stride, as w: one product per row of taps and block of rows of an image.

    A block of the input is copied once for each column of taps, moved by it, so that a pixel's inputs of a whole row
    of taps lie beside each other; rows of taps then are one copy's rows, begun further down.
    """
    (k, c, r, s), (n, _, p, q) = w_KCRS.shape, g_NKPQ.shape
    (top, _), reach = padding[0], (r - 1) * dilation[0]
    rows = min(max(BLOCK // (4 * q * (s * c + k)), 1), p)
    x_NHWC, g_NPQK = x_NCHW.permute(0, 2, 3, 1), g_NKPQ.permute(0, 2, 3, 1)
    block_HQSC = x_NHWC.new_zeros(rows + reach, q, s, c)  # columns outside the image stay zero
    total_RKSC = x_NHWC.new_zeros(r, k, s * c)
    for image in range(n):
        for lo in range(0, p, rows):
            hi = min(lo + rows, p)
            _read(x_NHWC[image], lo - top, block_HQSC[: hi - lo + reach], padding[1][0], dilation[1])
            g = g_NPQK[image, lo:hi].reshape(-1, k).t()
            for tap in range(r):
                below = tap * dilation[0]
                total_RKSC[tap].addmm_(g, block_HQSC[below : below + hi - lo].view(-1, s * c))
    return torch.empty_like(w_KCRS).copy_(total_RKSC.view(r, k, s, c).permute(1, 3, 0, 2))


def _read(x_HWC: Tensor, first: int, block_HQSC: Tensor, left: int, step: int) -> None:
    """Rows from ``first`` on, zeros where there are none; for each column of taps moved by it."""
    (height, width, _), (rows, columns, taps, _) = x_HWC.shape, block_HQSC.shape
    lo, hi = min(max(first, 0), height), max(min(first + rows, height), 0)
    above, below = min(max(-first, 0), rows), max(hi - first, 0)
    block_HQSC[:above].zero_()
    block_HQSC[below:].zero_()
    for tap in range(taps):
        by = tap * step - left
        start, stop = max(-by, 0), min(width - by, columns)
        if lo < hi and start < stop:
            block_HQSC[above:below, start:stop, tap] = x_HWC[lo:hi, start + by : stop + by]
