"""Activations and their adjoints inside a kernel, as torch defines them; NaN stays NaN."""

from __future__ import annotations

from typing import Literal

import triton
import triton.language as tl

Activation = Literal["relu", "relu6", "leaky_relu", "silu", "gelu", "gelu_tanh"]


@triton.jit
def activated(z, NAME: tl.constexpr, SLOPE: tl.constexpr):
    """``NAME`` of z in float32; "" is z itself. ``SLOPE`` is leaky_relu's below zero."""
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
def activated_adjoint(g, z, NAME: tl.constexpr, SLOPE: tl.constexpr):
    """g times the derivative of `activated` at z. As in torch, relu stops even an
    infinite g, and z = NaN lets g by.
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
