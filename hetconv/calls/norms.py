"""Calls of normalizations."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..following import BatchNorm
from .base import Args, Call, Kwargs, Reader, arg


@dataclass(frozen=True)
class BatchNormCall(Call):
    mean: Tensor | None = None
    var: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    momentum: float = 0.1
    eps: float = 1e-5

    @property
    def params(self) -> tuple[Tensor, ...]:
        return tuple(p for p in (self.weight, self.bias) if p is not None)


def _batch_norm(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, mean, var, weight, bias, training, momentum, eps = (
        arg(args, kwargs, i, n, d)
        for i, (n, d) in enumerate(
            (("input", None), ("running_mean", None), ("running_var", None), ("weight", None), ("bias", None),
             ("training", False), ("momentum", 0.1), ("eps", 1e-5))
        )
    )  # fmt: skip
    if x.dim() < 2 or (training and x.numel() == x.shape[1]):
        return None  # torch refuses a single value per channel: let it
    op = BatchNorm(tuple(x.shape), bool(training), bool(training) and mean is not None)
    return BatchNormCall(op, (x,), False, mean, var, weight, bias, momentum, eps)


READERS: dict[str, Reader] = {"batch_norm": _batch_norm}
