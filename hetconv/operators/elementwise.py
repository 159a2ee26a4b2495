"""Elementwise functions of one or several tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hetconv.sharding.layout import (
    Box,
    Layout,
    Layouts,
    ReadRegion,
    Shape,
    sharded_dims,
)
from hetconv.sharding.rule import OpSharding

from .base import (
    N_ARY,
    Args,
    Call,
    FollowingOperator,
    Kwargs,
    Reader,
    arg,
    bind,
    reduce_scattered,
)

ACTIVATIONS = ("relu", "relu6", "hardtanh", "leaky_relu", "silu", "gelu")
"""Activations of a kernel's epilogue; of hardtanh only those that are a relu6."""
ZERO_AT_ZERO = frozenset(
    {
        "relu",
        "relu6",
        "leaky_relu",
        "prelu",
        "silu",
        "gelu",
        "mish",
        "hardswish",
        "elu",
        "celu",
        "selu",
        "tanh",
    }
)
"""Functions that leave the zeros around an image zero, so that they may follow a deferred norm."""


@dataclass(frozen=True)
class PRelu(FollowingOperator):
    """A parametric ReLU, with one slope or one for each channel.

    Attributes:
        shape: Shape of the output.
    """

    shape: Shape

    def _follow(self, inputs: Layouts) -> OpSharding | None:
        x, slopes = reduce_scattered(inputs[0]), inputs[1]
        if x.kind != "sharded":
            return None
        if slopes.shape == (1,):
            reads = ReadRegion.everything(slopes.shape, x.world)
        else:
            channels = (Box((box.lo[1],), (box.hi[1],)) for box in x.boxes)
            reads = ReadRegion(slopes.shape, tuple(channels))
        return OpSharding((x, reads), x, partial_grads=True)


@dataclass(frozen=True)
class Pointwise(FollowingOperator):
    """An elementwise function of one or more inputs, with broadcasting.

    The output is sharded as the first sharded input is.

    Attributes:
        shape: Shape of the output.
    """

    shape: Shape

    def _follow(self, inputs: Layouts) -> OpSharding | None:
        for x in map(reduce_scattered, inputs):
            y = self._output_like(x)
            if y is not None:
                reads = tuple(self._read(other.shape, y) for other in inputs)
                return OpSharding(reads, y, partial_grads=True)
        return None

    def _output_like(self, x: Layout) -> Layout | None:
        """Returns the output split as ``x``; None if ``x`` is broadcast where it is split."""
        if x.kind != "sharded":
            return None
        if x.shape == self.shape:
            return x
        new_dims = len(self.shape) - len(x.shape)
        dims = sharded_dims(x.shape, x.boxes)
        if any(self.shape[new_dims + d] != x.shape[d] for d in dims):
            return None
        boxes = [Box.whole(self.shape)] * x.world
        for d in dims:
            boxes = [
                box.with_range(new_dims + d, own.lo[d], own.hi[d])
                for box, own in zip(boxes, x.boxes, strict=True)
            ]
        if new_dims:
            return Layout(self.shape, "sharded", tuple(boxes))
        return replace(x, shape=self.shape, boxes=tuple(boxes))

    def _read(self, shape: Shape, y: Layout) -> Layout | ReadRegion:
        """Returns what ranks read of an input of ``shape`` for their shards of ``y``."""
        if shape == self.shape:
            return y
        new_dims = len(self.shape) - len(shape)
        boxes = []
        for box in y.boxes:
            lo, hi = box.lo[new_dims:], box.hi[new_dims:]
            first = tuple(map(_broadcast_start, lo, hi, shape))
            boxes.append(Box(first, tuple(map(min, hi, shape))))
        return ReadRegion(shape, tuple(boxes))


def _broadcast_start(lo: int, hi: int, extent: int) -> int:
    """Returns where [lo, hi) begins in a dimension that is broadcast if of extent 1."""
    return min(lo, extent - 1) if lo < hi else min(lo, extent)


UNARY = frozenset(
    """
    abs absolute acos acosh asin asinh atan atanh bfloat16 bitwise_not bool ceil celu
    clamp clamp_max clamp_min clip clone contiguous cos cosh deg2rad detach digamma
    double elu erf erfc erfinv exp exp2 expm1 fix float floor frac gelu half hardshrink
    hardsigmoid hardswish hardtanh int invert isfinite isinf isnan leaky_relu lgamma log
    log10 log1p log2 log_sigmoid logical_not logit logsigmoid long mish nan_to_num neg
    positive rad2deg reciprocal relu relu6 round rsqrt selu sigmoid sign signbit silu
    sin sinc sinh softplus softshrink softsign sqrt square tan tanh tanhshrink threshold
    to trunc
    """.split()
)


def read_elementwise(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    """Reads a call of an elementwise function; see `Reader`."""
    given = [*args, *kwargs.values()]
    if name in UNARY and not isinstance(arg(args, kwargs, 0, "input"), Tensor):
        return None
    # where() of a condition alone returns the indices of its true elements.
    if name == "where" and len(given) == 1:
        return None
    inputs = tuple(value for value in given if isinstance(value, Tensor))
    # Of a second tensor these read only the dtype and the device.
    if name in ("to", "type_as"):
        inputs = inputs[:1]
    shape, *more = (tuple(x.shape) for x in inputs)
    if any(other != shape for other in more):
        shape = tuple(torch.broadcast_shapes(shape, *more))
    return Call(Pointwise(shape), inputs)


def activation_of(name: str, args: Args, kwargs: Kwargs) -> tuple[str, float] | None:
    """Reads a call of an activation that a kernel's epilogue can compute.

    Args:
        name: Bare name of the function.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.

    Returns:
        The epilogue's name of it and the slope below zero, or None for other calls.
    """
    if name == "hardtanh":  # called by torch.nn.ReLU6
        _, *bounds = bind(args, kwargs, input=None, min_val=-1.0, max_val=1.0)
        return ("relu6", 0.0) if bounds == [0.0, 6.0] else None
    if name == "gelu":
        return ("gelu_tanh" if kwargs.get("approximate") == "tanh" else "gelu", 0.0)
    if name == "leaky_relu":
        return name, float(arg(args, kwargs, 1, "negative_slope", 0.01))
    return (name, 0.0) if name in ACTIVATIONS else None


def _read_prelu(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, slopes = bind(args, kwargs, input=None, weight=None)
    if x.dim() < 2 or slopes.dim() != 1:
        return None
    return Call(PRelu(tuple(x.shape)), (x, slopes))


READERS: dict[str, Reader] = {
    **dict.fromkeys(UNARY | N_ARY, read_elementwise),
    "prelu": _read_prelu,
}
