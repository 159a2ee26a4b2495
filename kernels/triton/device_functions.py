"""Device functions that several Triton kernels share: activations, epilogue, tap masks.

Everything is computed in float32. Activations and their derivatives are PyTorch's, and
NaN stays NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activate(z, NAME: tl.constexpr, SLOPE: tl.constexpr):
    """Returns an activation of z.

    Args:
        z: Float32 block.
        NAME: One of `hetconv.kernels.epilogue.ACTIVATIONS`; "" returns z itself.
        SLOPE: Slope of leaky_relu below zero.
    """
    if NAME == "relu":
        z = tl.where(z < 0, 0.0, z)
    elif NAME == "relu6":
        z = tl.where(z < 0, 0.0, tl.where(z > 6, 6.0, z))
    elif NAME == "leaky_relu":
        z = tl.where(z < 0, z * SLOPE, z)
    elif NAME == "silu":
        z = z * tl.sigmoid(z)
    elif NAME == "gelu":
        z = 0.5 * z * (1 + tl.erf(z * 0.7071067811865476))
    elif NAME == "gelu_tanh":
        z = z * tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
    return z


@triton.jit
def activation_gradient(g, z, NAME: tl.constexpr, SLOPE: tl.constexpr):
    """Returns g times the derivative of `activate` at z.

    As in PyTorch, relu stops even an infinite g, and z = NaN lets g pass.

    Args:
        g: Float32 block, gradient of the activation's result.
        z: Float32 block of the same shape, input of the activation.
        NAME: See `activate`.
        SLOPE: See `activate`.
    """
    if NAME == "relu":
        d = tl.where(z <= 0, 0.0, g)
    elif NAME == "relu6":
        d = tl.where((z <= 0) | (z >= 6), 0.0, g)
    elif NAME == "leaky_relu":
        d = tl.where(z > 0, g, g * SLOPE)
    elif NAME == "silu":
        s = tl.sigmoid(z)
        d = g * (s * (1 + z * (1 - s)))
    elif NAME == "gelu":
        d = g * (
            0.5 * (1 + tl.erf(z * 0.7071067811865476))
            + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)
        )
    elif NAME == "gelu_tanh":
        u = 1.5957691216057308 * (z + 0.044715 * z * z * z)
        s = tl.sigmoid(u)
        d = g * (s + z * s * (1 - s) * 1.5957691216057308 * (1 + 0.134145 * z * z))
    else:
        d = g
    return d


@triton.jit
def load_float32(address, mask):
    """Returns the numbers at a block of addresses in float32, and 0 outside the mask."""
    return tl.load(address, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def scale_and_shift(
    z,
    scale,
    shift,
    channel,
    mask,
    HAS_SCALE: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    AXIS: tl.constexpr = None,
):
    """Returns scale * z + shift, each where it is given.

    Args:
        z: Float32 block.
        scale: Pointer to a float32 number per channel.
        shift: Pointer to a float32 number per channel.
        channel: Block of channel numbers.
        mask: Block, True where a channel exists.
        HAS_SCALE: Whether scale is read.
        HAS_SHIFT: Whether shift is read.
        AXIS: Dimension of z that channel and mask lack; None if they have the shape of z.
    """
    if HAS_SCALE:
        a = load_float32(scale + channel, mask)
        z *= tl.expand_dims(a, AXIS) if AXIS is not None else a
    if HAS_SHIFT:
        b = load_float32(shift + channel, mask)
        z += tl.expand_dims(b, AXIS) if AXIS is not None else b
    return z


@triton.jit
def pixel_position(pixel, P, Q):
    """Returns sample, row and column (n, p, q) of pixels numbered through (N, P, Q)."""
    q = pixel % Q
    p = (pixel // Q) % P
    n = pixel // Q // P
    return n, p, q


@triton.jit
def mask_of_taps(
    h,
    v,
    inside,
    H,
    W,
    R: tl.constexpr,
    S: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    ROWS_ONLY: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Returns an integer per pixel whose bit r * S + s says whether tap (r, s) reads the image.

    Args:
        h: Block (BLOCK_N) of input rows that tap 0 reads.
        v: Block (BLOCK_N) of input columns that tap 0 reads.
        inside: Block (BLOCK_N), False for pixels beyond the last.
        H: Rows of the image.
        W: Columns of the image.
        R: Rows of taps.
        S: Columns of taps.
        DILATION_H: Input rows from tap to tap.
        DILATION_W: Input columns from tap to tap.
        ROWS_ONLY: Whether columns are masked by the caller.
        BLOCK_N: Pixels.
    """
    taps = tl.zeros((BLOCK_N,), tl.int64 if R * S > 31 else tl.int32)
    for a in tl.static_range(R):
        row = inside & (h + a * DILATION_H >= 0) & (h + a * DILATION_H < H)
        for b in tl.static_range(S):
            hit = (
                row
                if ROWS_ONLY
                else row & (v + b * DILATION_W >= 0) & (v + b * DILATION_W < W)
            )
            taps |= hit.to(taps.dtype) << (a * S + b)
    return taps
