"""Calls of elementwise functions and joins."""

from __future__ import annotations

import torch
from torch import Tensor

from ..following import ACTIVATIONS, Pointwise, PRelu
from .base import JOINS, Args, Call, Kwargs, Reader, arg

DROPOUT = frozenset({"alpha_dropout", "dropout", "dropout2d", "feature_dropout"})
UNARY = DROPOUT | frozenset(
    """
    relu relu6 leaky_relu elu selu celu gelu silu mish sigmoid logsigmoid log_sigmoid tanh hardtanh hardswish
    hardsigmoid softplus softsign hardshrink softshrink tanhshrink threshold rsqrt sqrt square exp log log1p expm1
    abs neg sign sin cos erf reciprocal clamp clip clone contiguous detach float double half bfloat16 to nan_to_num
    round floor ceil
    """.split()
)


def _pointwise(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    flat = [*args, *kwargs.values()]
    if name in DROPOUT and (arg(args, kwargs, 2, "training", True) and arg(args, kwargs, 1, "p", 0.5)):
        return None
    if name in UNARY and not isinstance(args[0] if args else kwargs.get("input"), Tensor):
        return None
    inputs = tuple(a for a in flat if isinstance(a, Tensor))
    if name == "to" and len(inputs) > 1:
        return None
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


READERS: dict[str, Reader] = {**dict.fromkeys(UNARY | JOINS, _pointwise), "prelu": _prelu}
