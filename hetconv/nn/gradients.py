"""Gradient clipping and loss scaling for models whose ranks hold slices of gradients."""

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

from .parameters import group_of_model, sharded_parameters


def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clips the gradients of a parallelized model by their global norm; collective.

    It does what `torch.nn.utils.clip_grad_norm_` does for a plain model.

    Args:
        model: The parallelized model.
        max_norm: Largest norm of the clipped gradients.
        norm_type: Order of the norm, positive or ``float("inf")``.
        error_if_nonfinite: Whether a norm that is not finite is an error.

    Returns:
        The norm before clipping, the same on every rank.

    Raises:
        HetConvError: On every rank, before anything is clipped, if the norm is not
            finite and ``error_if_nonfinite``, or if ``norm_type`` is wrong.
    """
    group = group_of_model(model)
    if group is None:
        whole: Tensor = nn.utils.clip_grad_norm_(
            model.parameters(), max_norm, norm_type, error_if_nonfinite
        )
        return whole
    options = f"max_norm {max_norm}, norm_type {norm_type}"
    validate_together(
        group, "clip_grad_norm_", lambda: _check(norm_type), lambda _: options
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
    """Returns the part of a gradient that this rank counts; each element counts once."""
    if gradient is None:
        return None
    return local_slice(gradient, held.boxes[rank], held.primary.boxes[rank])


def _norm(
    gradients: Iterable[Tensor | None], norm_type: float, device: torch.device
) -> Tensor:
    """Returns the norm of all gradients together, in float64; zero for none."""
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
    """Gradient scaler for a parallelized model, otherwise like `torch.amp.GradScaler`.

    If a slice overflows on one rank, all ranks skip the step. Every rank calls the same
    methods in the same order.

    Args:
        model: The parallelized model.
        device: Type of its devices.
        options: Further options of `torch.amp.GradScaler`.
    """

    asks_all_ranks = True  # torch's own is refused where ranks hold slices

    def __init__(self, model: nn.Module, device: str = "cuda", **options: Any):
        super().__init__(device, **options)
        self._group = group_of_model(model)

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        found: dict[torch.device, Tensor] = super()._unscale_grads_(*args, **kwargs)
        if self._group is not None:
            call_tags.enter("GradScaler")
            for t in found.values():
                t.copy_(all_gather_tensors(self._group, t).amax(0))
        return found
