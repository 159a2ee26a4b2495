"""Modules of torch's own that need nothing from other ranks: they run on own parts without a torch function between.

A norm or an activation comes to `ops.dispatch` through several functions of torch in Python, which on small parts take
longer than it does. What is done here is what would be done there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .replicas import running_of
from .tensor import HetTensor

ELEMENTWISE: tuple[type[nn.Module], ...] = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh, nn.Hardsigmoid,
    nn.Hardswish, nn.Softplus,
)  # fmt: skip
BATCH_NORMS: tuple[type[nn.Module], ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class OnOwnPart:
    """A module's forward, to stand in its place. A copy of the module gets one of its own."""

    def __init__(self, module: nn.Module):
        self._module, self._forward = module, module.forward
        self._normalizes = type(module) in BATCH_NORMS

    def __call__(self, x: Any) -> Any:
        on_parts = x.__class__ is HetTensor
        local = on_parts and self._is_local(x)
        if self._normalizes and (local or not on_parts):
            self._settle(x.placement.sizes if on_parts and x.placement.dim == 1 else ())
        if not local:
            return self._forward(x)
        y = self._normalized(x) if self._normalizes else self._forward(x._local)
        return HetTensor.made(y, x.placement, x.team)

    def _settle(self, sizes: tuple[int, ...]) -> None:
        """All ranks use all channels' statistics now, or each its own of so many."""
        running, mean = running_of(None), self._module.running_mean
        if running is not None and isinstance(mean, Tensor):
            running.settle(mean, sizes)

    def _is_local(self, x: HetTensor) -> bool:
        """Elementwise, or a norm in evaluation whose parameters want no gradient."""
        if x.later is not None or x.placement.kind != "sharded":
            return False
        if not self._normalizes:
            return True
        norm: Any = self._module
        if norm.training or norm.running_mean is None or not x._local.numel() or x.shape[1:2] != (norm.num_features,):
            return False
        return not (torch.is_grad_enabled() and any(p.requires_grad for p in norm.parameters(recurse=False)))

    def _normalized(self, x: HetTensor) -> Tensor:
        """By the statistics of this rank's channels."""
        norm: Any = self._module
        norm._check_input_dim(x)
        box = x.placement.boxes[x.team.rank]
        own = slice(box.lo[1], box.hi[1])
        weight, bias, mean, var = (
            t[own] if t is not None else None for t in (norm.weight, norm.bias, norm.running_mean, norm.running_var)
        )
        return torch.batch_norm(x._local, weight, bias, mean, var, False, 0.0, norm.eps, torch.backends.cudnn.enabled)


def run_on_own_parts(model: nn.Module) -> None:
    """Leaves every module that is not exactly torch's own as it is, and those that write in place."""
    for module in model.modules():
        known = type(module) in ELEMENTWISE or type(module) in BATCH_NORMS
        if known and "forward" not in vars(module) and not getattr(module, "inplace", False):
            module.forward = OnOwnPart(module)
