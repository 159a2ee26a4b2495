"""Replicated parameters that each rank uses on its own parts: their gradients are contributions, summed in buckets.

While a model's forward runs, every such use takes an alias of the parameter from the scope. A bucket's aliases come
through two autograd nodes. `_Start` is made where the first of them is used: backward, which of those nodes that are
ready runs the latest, comes to it as soon as the last contribution is there, and it sends the bucket on its way. `_End`
is made before the forward, so that backward comes to it last, and waits for the sums. Because these are nodes of the
graph, accumulation, hooks and ``torch.autograd.grad`` see only whole gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .layout import buckets, summed
from .movement import Sum
from .transport import Team

Grads = tuple[Tensor | None, ...]


class _Bucket:
    """The sum of the gradients of some parameters, in one message; of these themselves it knows shapes and strides.

    ``before``: buckets that may be under way when this one starts.
    """

    def __init__(self, team: Team, params: Sequence[Tensor], before: Sequence[_Bucket] = ()):
        self._team, self._before = team, tuple(before)
        self._formats = [(p.shape, p.stride()) for p in params]
        self._given: list[bool] = []
        self._sum: Sum | None = None

    def start(self, grads: Grads) -> None:
        self._given = [g is not None for g in grads]
        own = [g.flatten() for g in grads if g is not None]
        for bucket in self._before:
            if bucket._sum is not None:
                bucket._sum.advance()
        if own:
            flat = torch.cat(own)
            self._sum = Sum(self._team, flat, summed(tuple(flat.shape), self._team.size).forward)

    def end(self) -> Grads:
        if self._sum is None:
            return (None,) * len(self._formats)
        found: list[Tensor | None] = [None] * len(self._formats)
        given = [i for i, there in enumerate(self._given) if there]
        totals = self._sum.result().split([self._formats[i][0].numel() for i in given])
        for i, total in zip(given, totals, strict=True):
            shape, stride = self._formats[i]
            found[i] = _with_strides(total.view(shape), stride)
        self._sum = None
        return tuple(found)


def _with_strides(x: Tensor, stride: tuple[int, ...]) -> Tensor:
    """As the parameter lies in memory, which is how torch's own gradients lie."""
    return x if x.stride() == stride else torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)


class _Aliases(torch.autograd.Function):
    """Aliases of a bucket's parameters; what their backward does is the subclasses' matter."""

    @staticmethod
    def forward(ctx: Any, bucket: _Bucket, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.bucket = bucket
        ctx.set_materialize_grads(False)
        return tuple(p.view_as(p) for p in params)


class _Start(_Aliases):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Grads:
        ctx.bucket.start(grads)
        return (None,) * (1 + len(grads))


class _End(_Aliases):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: None) -> Grads:
        return None, *ctx.bucket.end()


class Scope:
    """The aliases of a model's replicated parameters during one forward pass."""

    def __init__(self, team: Team, params: Iterable[Tensor]):
        self.team = team
        self._bucket_of: dict[int, tuple[_Bucket, dict[int, Tensor]]] = {}
        self._aliases: dict[int, Tensor] = {}
        made: list[_Bucket] = []
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for p in params:
            if p.requires_grad and torch.is_grad_enabled():
                by_dtype.setdefault(p.dtype, []).append(p)
        for group in by_dtype.values():
            for indices in buckets([p.numel() for p in group]):
                own = [group[i] for i in indices]
                made.append(_Bucket(team, own, made))
                ended = dict(zip(map(id, own), _End.apply(made[-1], *own), strict=True))
                self._bucket_of |= dict.fromkeys(ended, (made[-1], ended))

    def holds(self, param: Tensor) -> bool:
        return id(param) in self._bucket_of

    def alias(self, param: Tensor) -> Tensor:
        if id(param) not in self._aliases:
            bucket, ended = self._bucket_of[id(param)]
            self._aliases |= zip(ended, _Start.apply(bucket, *ended.values()), strict=True)
        return self._aliases[id(param)]


SCOPE: ContextVar[Scope | None] = ContextVar("hetconv_scope", default=None)


def contributed(team: Team, param: Tensor) -> Tensor:
    """``param`` for a use on own parts: this rank's gradient of it is a contribution."""
    if not (param.requires_grad and torch.is_grad_enabled()):
        return param
    scope = SCOPE.get()
    if scope is None or scope.team is not team or not scope.holds(param):
        scope = Scope(team, [param])
    return scope.alias(param)


def is_replica(x: Tensor) -> bool:
    """Whether ``x`` is a parameter of the model whose forward is running, or is computed again for a checkpoint."""
    scope = SCOPE.get()
    return scope.holds(x) if scope is not None else isinstance(x, nn.Parameter)
