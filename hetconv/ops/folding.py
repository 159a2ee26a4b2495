"""Calls that a waiting convolution has been waiting for: they become part of it.

No step is asked for, as it is for calls that run on parts: what is folded lies as the convolution does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hetconv.calls import BatchNormCall, activation_of, name_of, read, writes_in_place
from hetconv.runtime.het_tensor import HetTensor
from hetconv.runtime.inputs import Args, Func, Kwargs, bring

from . import views
from .batch_norm import norm_of, scale_and_shift
from .deferred import Waiting, may_wait
from .halo_exchange import NOTHING, After


def fold(func: Func, args: Args, kwargs: Kwargs) -> HetTensor | None:
    """The result of a call on a convolution that waits for it, which goes on waiting; None if it is another call."""
    for i, x in enumerate(args[:2]):
        if x.__class__ is not HetTensor or not isinstance(x.later, Waiting):
            continue
        waiting, name = x.later, name_of(func)
        if waiting.expects[:1] != (name,) or torch.is_grad_enabled():  # for autograd nothing waits
            continue
        in_place = writes_in_place(func, kwargs)
        if in_place and (i or not views.may_write(x, x.placement)):
            continue
        further = _further(waiting, x, i, name, func, args, kwargs)
        if further is not None:
            folded = x.superseded_by(further._replace(expects=waiting.expects[1:]))
            if not in_place:
                return folded
            x.become(folded)
            return x
    return None


def _further(
    waiting: Waiting, x: HetTensor, i: int, name: str, func: Func, args: Args, kwargs: Kwargs
) -> Waiting | None:
    """With one more thing done after the convolution, if it can be: argument ``i`` of the call is what waits."""
    after = waiting.after
    if name == "batch_norm":
        call = read(func, args, kwargs) if after is NOTHING else None
        norm = norm_of(call) if isinstance(call, BatchNormCall) else None
        if norm is None or norm.training:
            return None
        return waiting._replace(after=After(*scale_and_shift(norm, waiting.x.dtype, x.placement, waiting.team)))
    if after.activation is not None:
        return None
    if name == "add":
        return _with_residual(waiting, x, i, args, kwargs)
    activation = activation_of(name, args, kwargs)
    if activation is None:
        return None
    return waiting._replace(after=after._replace(activation=activation[0], slope=activation[1]))


def _with_residual(waiting: Waiting, x: HetTensor, i: int, args: Args, kwargs: Kwargs) -> Waiting | None:
    """The sum lies as the first of both does; the other one is brought there."""
    if waiting.after.residual is not None or len(args) != 2 or kwargs.get("alpha", 1) != 1:
        return None
    other = args[1 - i]
    if not isinstance(other, Tensor) or other is x or other.shape != x.shape or other.dtype != x.dtype:
        return None
    alike = isinstance(other, HetTensor) and other.placement == x.placement
    if (i and not alike) or not may_wait(other):
        return None
    return waiting.with_residual(bring(other, x.placement, waiting.team))
