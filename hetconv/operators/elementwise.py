"""Elementwise functions and joins."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hetconv.sharding.layer_rules import REPLICATE, Gather, OpSharding, Split
from hetconv.sharding.layout import Box, Layout, ReadRegion, Shape

from .base import N_ARY, Args, Call, Kwargs, Reader, arg, reduce_scattered, sharded_dims

ACTIVATIONS = ("relu", "relu6", "hardtanh", "leaky_relu", "silu", "gelu")
"""Elementwise functions that the kernels compute as they store a result; of hardtanh
those that are a relu6.
"""


@dataclass(frozen=True)
class PRelu:
    """x where it is positive, else x times the slope of its channel, or the one slope."""

    shape: Shape

    def sharding(
        self, inputs: tuple[Layout, ...], split: Split = REPLICATE
    ) -> OpSharding:
        x, slopes = reduce_scattered(inputs[0]), inputs[1]
        if x.kind != "sharded":
            return Gather(self.shape).sharding(inputs)
        by_channel = slopes.shape != (1,)
        own = tuple(
            Box((b.lo[1],), (b.hi[1],)) if by_channel else Box.whole(slopes.shape)
            for b in x.boxes
        )
        return OpSharding((x, ReadRegion(slopes.shape, own)), x, partial_grads=True)


@dataclass(frozen=True)
class Pointwise:
    """Elementwise on one or more inputs with broadcasting. The result is cut as the
    first sharded input is.
    """

    shape: Shape

    def sharding(
        self, inputs: tuple[Layout, ...], split: Split = REPLICATE
    ) -> OpSharding:
        lead = next(
            (y for x in inputs if (y := self._lifted(reduce_scattered(x))) is not None),
            None,
        )
        if lead is None:
            return Gather(self.shape).sharding(inputs)
        return OpSharding(
            tuple(self._read(x.shape, lead) for x in inputs), lead, partial_grads=True
        )

    def _lifted(self, x: Layout) -> Layout | None:
        """The output layout that a sharded input suggests, unless it is cut where it is
        broadcast.
        """
        if x.kind != "sharded" or x.shape == self.shape:
            return x if x.kind == "sharded" else None
        skip, cut = len(self.shape) - len(x.shape), sharded_dims(x)
        if any(self.shape[skip + d] != x.shape[d] for d in cut):
            return None
        boxes = [Box.whole(self.shape)] * x.world
        for d in cut:
            boxes = [
                b.along(skip + d, own.lo[d], own.hi[d])
                for b, own in zip(boxes, x.boxes, strict=True)
            ]
        if skip:
            return Layout(self.shape, "sharded", tuple(boxes))
        return replace(x, shape=self.shape, boxes=tuple(boxes))

    def _read(self, shape: Shape, lead: Layout) -> Layout | ReadRegion:
        if shape == self.shape:
            return lead
        skip = len(self.shape) - len(shape)
        own = (Box(b.lo[skip:], b.hi[skip:]) for b in lead.boxes)
        return ReadRegion(
            shape,
            tuple(
                Box(tuple(map(_first, b.lo, b.hi, shape)), tuple(map(min, b.hi, shape)))
                for b in own
            ),
        )


def _first(lo: int, hi: int, n: int) -> int:
    """Where [lo, hi) begins in a dimension of ``n`` entries, one of them if it is broadcast."""
    return min(lo, n - 1) if lo < hi else min(lo, n)


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


def elementwise(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    flat = [*args, *kwargs.values()]
    if name in UNARY and not isinstance(
        args[0] if args else kwargs.get("input"), Tensor
    ):
        return None
    inputs = tuple(a for a in flat if isinstance(a, Tensor))
    if name == "where" and len(flat) == 1:  # the places where it is true
        return None
    if name in (
        "to",
        "type_as",
    ):  # of the other one only the dtype and the device are read
        inputs = inputs[:1]
    shape, *others = (tuple(x.shape) for x in inputs)
    if any(other != shape for other in others):
        shape = tuple(torch.broadcast_shapes(shape, *others))  # torch's takes its time
    return Call(Pointwise(shape), inputs)


def activation_of(name: str, args: Args, kwargs: Kwargs) -> tuple[str, float] | None:
    """(name, slope below zero) of an activation that `kernels` computes as a result is
    stored, else None.
    """
    if name == "hardtanh":  # torch.nn.ReLU6 calls this
        bounds = (
            arg(args, kwargs, 1, "min_val", -1.0),
            arg(args, kwargs, 2, "max_val", 1.0),
        )
        return ("relu6", 0.0) if bounds == (0.0, 6.0) else None
    if name == "gelu":
        return ("gelu_tanh" if kwargs.get("approximate") == "tanh" else "gelu", 0.0)
    if name == "leaky_relu":
        return name, float(arg(args, kwargs, 1, "negative_slope", 0.01))
    return (name, 0.0) if name in ACTIVATIONS else None


def _prelu(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, slopes = arg(args, kwargs, 0, "input"), arg(args, kwargs, 1, "weight")
    return (
        Call(PRelu(tuple(x.shape)), (x, slopes))
        if x.dim() > 1 and slopes.dim() == 1
        else None
    )


READERS: dict[str, Reader] = {
    **dict.fromkeys(UNARY | N_ARY, elementwise),
    "prelu": _prelu,
}
