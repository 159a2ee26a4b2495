"""Gradient clipping and loss scaling, for a model of which each rank has slices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hetconv.comm import call_tags
from hetconv.comm.consensus import validate_together
from hetconv.comm.exchange_plan import local_slice
from hetconv.comm.redistribute import all_gather_tensors
from hetconv.errors import HetConvError
from hetconv.sharding.param_shards import ParamShards

from .parameters import sharded_parameters, team_of_model


def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clips the gradients of a parallelized model by the norm of all of them. Collective.

    It replaces `torch.nn.utils.clip_grad_norm_`.

    Args:
        model: a parallelized model.
        max_norm: the largest norm.
        norm_type: p of the p-norm; may be infinite.
        error_if_nonfinite: whether a norm that is not finite raises an error.

    Returns:
        The norm before clipping, the same on every rank.

    Raises:
        HetConvError: the norm is not finite; on every rank, before anything is clipped.
    """
    group = team_of_model(model)
    if group is None:
        whole: Tensor = nn.utils.clip_grad_norm_(
            model.parameters(), max_norm, norm_type, error_if_nonfinite
        )
        return whole
    said = f"max_norm {max_norm}, norm_type {norm_type}"
    validate_together(
        group, "clip_grad_norm_", lambda: _check(norm_type), lambda _: said
    )
    held = sharded_parameters(model)
    with torch.no_grad():
        own = [p for p in model.parameters() if p.grad is not None]
        device = next(model.parameters()).device
        owned = (_owned(p.grad, held[id(p)], group.rank) for p in own if id(p) in held)
        slices = all_gather_tensors(group, _norm(owned, norm_type, device))
        replicas = _norm((p.grad for p in own if id(p) not in held), norm_type, device)
        total: Tensor = torch.linalg.vector_norm(
            torch.cat([slices, replicas[None]]), norm_type
        )
        if error_if_nonfinite and not bool(total.isfinite()):
            raise HetConvError(
                f"the gradients' norm is {float(total)}, so they cannot be clipped; nothing "
                "was changed"
            )
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for p in own:
            assert p.grad is not None
            p.grad.mul_(factor.to(p.grad.dtype))
    return total


def _check(norm_type: float) -> None:
    if not norm_type > 0:
        raise HetConvError(
            f"norm_type is {norm_type}, but must be a positive number or float('inf')"
        )


def _owned(gradient: Tensor | None, held: ParamShards, rank: int) -> Tensor | None:
    """Returns the part of a gradient that this rank counts; every element counts once."""
    return (
        local_slice(gradient, held.boxes[rank], held.primary.boxes[rank])
        if gradient is not None
        else None
    )


def _norm(
    gradients: Iterable[Tensor | None], norm_type: float, device: torch.device
) -> Tensor:
    """Returns the norm of all gradients together, in float32 at least; zero of none."""
    norms = [
        torch.linalg.vector_norm(
            g, norm_type, dtype=torch.promote_types(g.dtype, torch.float32)
        ).double()
        for g in gradients
        if g is not None and g.numel()
    ]
    zero = torch.zeros((), dtype=torch.float64, device=device)
    total: Tensor = torch.linalg.vector_norm(torch.stack([zero, *norms]), norm_type)
    return total


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` of a parallelized model.

    If a slice overflows on one rank, all ranks skip the step. Every rank calls the same
    methods in the same order.

    Args:
        model: a parallelized model.
        options: those of `torch.amp.GradScaler`.
    """

    asks_all_ranks = True  # torch's own is refused where ranks hold slices

    def __init__(self, model: nn.Module, device: str = "cuda", **options: Any):
        super().__init__(device, **options)
        self._group = team_of_model(model)

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        found: dict[torch.device, Tensor] = super()._unscale_grads_(*args, **kwargs)
        if self._group is not None:
            call_tags.enter("GradScaler")
            for t in found.values():
                t.copy_(all_gather_tensors(self._group, t).amax(0))
        return found
