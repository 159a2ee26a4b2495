"""Fast paths for torch's norms and activations on shards.

Such a module reaches `ops.dispatch` through several Python functions of torch, which on
small shards take longer than the operator. These forwards do the same without them.
"""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor, nn

from hetconv.comm import call_tags
from hetconv.comm.redistribute import redistribute_local
from hetconv.operators.base import reduce_scattered
from hetconv.ops.norms.batch_norm import Norm, on_own_channels
from hetconv.runtime.gradient_sync import running_stats_of
from hetconv.runtime.het_tensor import HetTensor, gather

ELEMENTWISE: tuple[type[nn.Module], ...] = (
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.ELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Sigmoid,
    nn.Tanh,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Softplus,
)
BATCH_NORMS: tuple[type[nn.Module], ...] = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
)


class LocalForward:
    """Replacement of a module's forward; a copy of the module gets its own.

    Args:
        module: One of `ELEMENTWISE` or `BATCH_NORMS`.
    """

    def __init__(self, module: nn.Module):
        self._module, self._forward = module, module.forward
        self._normalizes = type(module) in BATCH_NORMS

    def __call__(self, x: Any) -> Any:
        """Runs on the local shard if no rank needs another one's."""
        if x.__class__ is HetTensor and x.pending is None:
            if x.placement.kind == "partial":
                x = self._summed(x)
            if x.__class__ is HetTensor and x.placement.kind == "sharded":
                if not self._normalizes:
                    return HetTensor.made(self._forward(x._local), x.placement, x.group)
                if self._is_on_own_channels(x):
                    return HetTensor.made(self._normalized(x), x.placement, x.group)
        if self._normalizes and x.__class__ is not HetTensor:
            running, mean = running_stats_of(None), self._module.running_mean
            if running is not None and isinstance(mean, Tensor):
                running.ensure_synced(mean)
        return self._forward(x)

    def _summed(self, x: HetTensor) -> Tensor:
        """Sums a partial value to the layout that its consumer reads."""
        call_tags.enter(type(self._module).__name__)
        wanted = reduce_scattered(x.placement)
        if wanted.kind == "replicated":
            return gather(x, images=self._normalizes)
        return HetTensor.made(
            redistribute_local(x.group, x._local, x.placement, wanted), wanted, x.group
        )

    def _is_on_own_channels(self, x: HetTensor) -> bool:
        """Returns whether each rank has the statistics that it needs.

        It is False also for a batch that torch would refuse.
        """
        norm: Any = self._module
        layout, shape = x.placement, x.placement.shape
        if len(shape) < 2 or shape[1] != norm.num_features:
            return False
        if norm.training:
            has_all_values = layout.dim == 1 or x.group.size == 1
            return has_all_values and prod(shape) > norm.num_features
        return norm.running_mean is not None

    def _normalized(self, x: HetTensor) -> Tensor:
        norm: Any = self._module
        norm._check_input_dim(x)
        momentum, mean, var = norm.momentum, norm.running_mean, norm.running_var
        if norm.training and not norm.track_running_stats:
            mean = var = None
        elif norm.training and norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(1)
            if momentum is None:  # a cumulative average
                momentum = 1 / float(norm.num_batches_tracked)
        of_all = Norm(
            norm.weight, norm.bias, mean, var, norm.training, momentum or 0.0, norm.eps
        )
        return on_own_channels(x._local, of_all, x.placement, x.group)


def use_local_forwards(model: nn.Module) -> None:
    """Replaces the forwards of torch's own norms and activations in a model.

    Subclasses, modules with a forward of their own and modules that write in place are
    left as they are.
    """
    for module in model.modules():
        known = type(module) in ELEMENTWISE or type(module) in BATCH_NORMS
        if (
            known
            and "forward" not in vars(module)
            and not getattr(module, "inplace", False)
        ):
            module.forward = LocalForward(module)
