"""A linear layer on parts."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..emulate import stretched
from ..kernels import products
from ..replicas import contributed
from ..rules import Linear, Split
from ..tensor import HetTensor, gather
from ..transport import Team
from .common import autocast, bring, placement_of


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, features: int, adds_bias: bool) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.biases = len(b) if b is not None else 0
        ctx.works = w.shape == (features, x.shape[-1])
        if not ctx.works:  # no rows, of which the rank needs no weight
            return x.new_empty((*x.shape[:-1], features))
        bias, rows = b if adds_bias else None, x.reshape(prod(x.shape[:-1]), x.shape[-1])
        return stretched(lambda: products.linear(rows, w, bias).view(*x.shape[:-1], features), x.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        wants = ctx.needs_input_grad

        def gradients() -> tuple[Tensor | None, ...]:
            rows = prod(x.shape[:-1])
            g_rows, x_rows = g.reshape(rows, g.shape[-1]), x.reshape(rows, x.shape[-1])
            gx, gw = None, None
            if wants[0]:
                gx = products.gradient_of_rows(g_rows, w).view(x.shape) if ctx.works else torch.zeros_like(x)
            if wants[1]:
                gw = products.gradient_of_weights(g_rows, x_rows) if ctx.works else torch.zeros_like(w)
            return gx, gw, g_rows.sum(0)[: ctx.biases] if wants[2] else None, None, None

        return stretched(gradients, x.device)


def linear(x: Tensor, w: Tensor, b: Tensor | None, op: Linear, split: Split, team: Team) -> Tensor:
    """A linear layer under a split: a HetTensor, or for ``replicate`` a plain tensor."""
    if split.kind == "replicate":
        return _linear(gather(x), w, b, op.features)
    step, held = op.step((placement_of(x, team),), split), op.held(split, team.size)
    if step.contributes:
        w = contributed(team, w, held["weight"])
        b = contributed(team, b, held["bias"]) if b is not None else None
    elif step.output.kind == "replicated" and not held["weight"].everywhere:
        op.check(split, team.size)  # refuses an input without the dimension that is cut: all would need the weight
    # Of a partial output one summand holds the bias; who has it computes its gradient: all have the cotangent.
    adds_bias = split.kind != "channel" or team.rank == split.mates(team.rank)[0]
    features = step.output.boxes[team.rank].shape[-1]
    y = _linear(bring(x, step.reads[0], team), w, b, features, adds_bias)
    return HetTensor.wrap(y, step.output, team)


def _linear(x: Tensor, w: Tensor, b: Tensor | None, features: int, adds_bias: bool = True) -> Tensor:
    x, w, b = autocast(x, w, b)
    with torch.autocast(x.device.type, enabled=False):
        return _Linear.apply(x, w, b, features, adds_bias)  # type: ignore[no-any-return]
