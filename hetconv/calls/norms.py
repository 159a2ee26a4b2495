"""Calls of normalizations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from torch import Tensor

from hetconv.operators import BatchNorm, GroupNorm, OwnNorm

from .base import Args, Call, Kwargs, Reader, arg


@dataclass(frozen=True)
class NormCall(Call):
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 1e-5

    @property
    def params(self) -> tuple[Tensor, ...]:
        return tuple(p for p in (self.weight, self.bias) if p is not None)


@dataclass(frozen=True)
class BatchNormCall(NormCall):
    mean: Tensor | None = None
    var: Tensor | None = None
    momentum: float = 0.1


def _tracking(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    """Batch norm and instance norm. torch's own functions, of 9 arguments, take the weight first, those of F last."""
    running, affine = ("running_mean", "running_var"), ("weight", "bias")
    order = (*affine, *running) if len(args) + len(kwargs) == 9 else (*running, *affine)
    x, *four = (arg(args, kwargs, i, n) for i, n in enumerate(("input", *order)))
    weight, bias, mean, var = four if order[0] == "weight" else (*four[2:], *four[:2])
    shape = tuple(x.shape)
    batch = name == "batch_norm"
    training = bool(arg(args, kwargs, 5, "training" if batch else "use_input_stats", not batch))
    momentum, eps = arg(args, kwargs, 6, "momentum", 0.1), arg(args, kwargs, 7, "eps", 1e-5)
    if training and not batch:
        # Statistics of samples are averaged into the running ones; torch refuses a single value per channel: let it.
        if mean is not None or len(shape) < 3 or not prod(shape) or prod(shape[2:]) == 1:
            return None
        return NormCall(GroupNorm(shape, shape[1]), (x,), False, weight, bias, eps)
    if len(shape) < 2 or (training and prod(shape) == shape[1]) or (not training and (mean is None or var is None)):
        return None
    op = BatchNorm(shape, training, training and mean is not None)
    return BatchNormCall(op, (x,), False, weight, bias, eps, mean, var, momentum)


def _group_norm(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, groups, weight, bias = (arg(args, kwargs, i, n) for i, n in enumerate(("input", "num_groups", "weight", "bias")))
    if x.dim() < 2 or not x.numel() or groups < 1 or x.shape[1] % groups or x.numel() == groups:
        return None  # torch refuses what does not divide and a single value per group: let it
    op = GroupNorm(tuple(x.shape), groups)
    return NormCall(op, (x,), False, weight, bias, arg(args, kwargs, 4, "eps", 1e-5))


def _last_dims(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    """Layer norm and RMS norm, over the last dimensions."""
    x, over, weight = (arg(args, kwargs, i, n) for i, n in enumerate(("input", "normalized_shape", "weight")))
    bias = arg(args, kwargs, 3, "bias") if name == "layer_norm" else None
    if not isinstance(over, Iterable):
        return None
    over = tuple(over)
    if not over or tuple(x.shape[-len(over) :]) != over or not x.numel():
        return None
    op = OwnNorm(tuple(x.shape), tuple(range(x.dim() - len(over), x.dim())))
    return NormCall(op, (x,), False, weight, bias)


def _local_response(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x = arg(args, kwargs, 0, "input")
    return Call(OwnNorm(tuple(x.shape), (1,)), (x,)) if x.dim() > 2 and x.numel() else None


READERS: dict[str, Reader] = {
    "batch_norm": _tracking,
    "group_norm": _group_norm,
    "instance_norm": _tracking,
    "layer_norm": _last_dims,
    "local_response_norm": _local_response,
    "rms_norm": _last_dims,
}
