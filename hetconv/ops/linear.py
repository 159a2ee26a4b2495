"""A linear layer on parts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hetconv.comm.rank_group import Team
from hetconv.kernels import call_layer
from hetconv.runtime.gradient_sync import contributed
from hetconv.runtime.het_tensor import HetTensor, gather
from hetconv.runtime.inputs import autocast, bring, empty_output, placement_of, uncounted
from hetconv.sharding.layer_rules import Linear, Split


class _GradientOnly(torch.autograd.Function):
    """Zeros in the place of a bias that another rank adds: its gradient is that of the one that is added.

    A rank holds all of the bias or none of it.
    """

    @staticmethod
    def forward(ctx: Any, b: Tensor, features: int) -> Tensor:
        ctx.held = len(b)
        return b.new_zeros(features)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return uncounted(g[: ctx.held]), None


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
    if w.shape != (features, x.shape[-1]):  # a rank without rows holds no weight
        return empty_output((*x.shape[:-1], features), *autocast(x, w, b))
    if b is not None and not adds_bias:
        b = _GradientOnly.apply(b, features) if b.requires_grad and torch.is_grad_enabled() else None
    return call_layer(F.linear, x, w, b)
