"""Calls of elementwise functions and joins."""

from __future__ import annotations

import torch
from torch import Tensor

from hetconv.operators import ACTIVATIONS, Pointwise, PRelu

from .base import JOINS, Args, Call, Kwargs, Reader, arg

UNARY = frozenset(
    """
    abs absolute acos acosh asin asinh atan atanh bfloat16 bitwise_not bool ceil celu clamp clamp_max clamp_min clip
    clone contiguous cos cosh deg2rad detach digamma double elu erf erfc erfinv exp exp2 expm1 fix float floor frac
    gelu half hardshrink hardsigmoid hardswish hardtanh int invert isfinite isinf isnan leaky_relu lgamma log log10
    log1p log2 log_sigmoid logical_not logit logsigmoid long mish nan_to_num neg positive rad2deg reciprocal relu
    relu6 round rsqrt selu sigmoid sign signbit silu sin sinc sinh softplus softshrink softsign sqrt square tan tanh
    tanhshrink threshold to trunc
    """.split()
)


def elementwise(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    flat = [*args, *kwargs.values()]
    if name in UNARY and not isinstance(args[0] if args else kwargs.get("input"), Tensor):
        return None
    inputs = tuple(a for a in flat if isinstance(a, Tensor))
    if name == "where" and len(flat) == 1:  # the places where it is true
        return None
    if name in ("to", "type_as"):  # of the other one only the dtype and the device are read
        inputs = inputs[:1]
    shape, *others = (tuple(x.shape) for x in inputs)
    if any(other != shape for other in others):
        shape = tuple(torch.broadcast_shapes(shape, *others))  # torch's takes its time
    return Call(Pointwise(shape), inputs)


def activation_of(name: str, args: Args, kwargs: Kwargs) -> tuple[str, float] | None:
    """(name, slope below zero) of an activation that `kernels` computes as a result is stored, else None."""
    if name == "hardtanh":  # torch.nn.ReLU6 calls this
        bounds = arg(args, kwargs, 1, "min_val", -1.0), arg(args, kwargs, 2, "max_val", 1.0)
        return ("relu6", 0.0) if bounds == (0.0, 6.0) else None
    if name == "gelu":
        return ("gelu_tanh" if kwargs.get("approximate") == "tanh" else "gelu", 0.0)
    if name == "leaky_relu":
        return name, float(arg(args, kwargs, 1, "negative_slope", 0.01))
    return (name, 0.0) if name in ACTIVATIONS else None


def _prelu(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, slopes = arg(args, kwargs, 0, "input"), arg(args, kwargs, 1, "weight")
    return Call(PRelu(tuple(x.shape)), (x, slopes)) if x.dim() > 1 and slopes.dim() == 1 else None


READERS: dict[str, Reader] = {**dict.fromkeys(UNARY | JOINS, elementwise), "prelu": _prelu}
