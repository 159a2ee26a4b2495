"""Replicated parameters that each rank uses on its own parts: their gradients are contributions, summed in buckets.

While a model's forward runs, every such use takes an alias of the parameter from the scope. All aliases of a bucket
leave one autograd node, which runs when the last of their contributions is there and sums them in one message. Because
this is a node of the graph, accumulation, hooks and ``torch.autograd.grad`` see only whole gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .layout import Box, buckets, summed
from .movement import perform
from .transport import Team


class _Contributed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, team: Team, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.team = team
        ctx.set_materialize_grads(False)
        return tuple(p.view_as(p) for p in params)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        used = [g for g in grads if g is not None]
        if not used:
            return None, *grads
        flat = torch.cat([g.flatten() for g in used])
        rounds = summed(tuple(flat.shape), ctx.team.size).forward
        whole = Box.whole(tuple(flat.shape))
        totals = iter(perform(ctx.team, flat, rounds, whole, whole).split([g.numel() for g in used]))
        return None, *(next(totals).view(g.shape) if g is not None else None for g in grads)


class Scope:
    """The aliases of a model's replicated parameters during one forward pass."""

    def __init__(self, team: Team, params: Iterable[Tensor]):
        self.team = team
        self._aliases: dict[int, Tensor] = {}
        if not torch.is_grad_enabled():
            return
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for p in params:
            if p.requires_grad:
                by_dtype.setdefault(p.dtype, []).append(p)
        for group in by_dtype.values():
            for indices in buckets([p.numel() for p in group]):
                bucket = [group[i] for i in indices]
                self._aliases |= {id(p): a for p, a in zip(bucket, _Contributed.apply(team, *bucket), strict=True)}

    def alias(self, param: Tensor) -> Tensor | None:
        return self._aliases.get(id(param))


SCOPE: ContextVar[Scope | None] = ContextVar("hetconv_scope", default=None)


def contributed(team: Team, param: Tensor) -> Tensor:
    """``param`` for a use on own parts: this rank's gradient of it is a contribution."""
    if not (param.requires_grad and torch.is_grad_enabled()):
        return param
    scope = SCOPE.get()
    alias = scope.alias(param) if scope is not None and scope.team is team else None
    return alias if alias is not None else _Contributed.apply(team, param)[0]


def is_replica(x: Tensor) -> bool:
    """Whether ``x`` is a parameter of the model whose forward is running."""
    scope = SCOPE.get()
    return scope is not None and scope.alias(x) is not None
