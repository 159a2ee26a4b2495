"""hetconv: model-parallel convolution on devices of unequal speed.

A name is imported when it is first asked for: the kernels alone need no more than
torch, triton and numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import kernels
    from .comm.rank_group import count_sent
    from .comm.redistribute import redistribute
    from .errors import (
        DisagreementError,
        HetConvError,
        KernelError,
        LayoutError,
        LostRankError,
        OutputError,
        PlanError,
        ProfileError,
        SplitError,
    )
    from .nn.checkpoint import load_checkpoint, save_checkpoint
    from .nn.gradients import GradScaler, clip_grad_norm_
    from .nn.layers import HetConv1d, HetConv2d, HetConv3d
    from .nn.model_call import call_with_whole_weights
    from .nn.optimizer_state import full_optim_state_dict, load_full_optim_state_dict
    from .nn.parallelize import parallelize
    from .nn.replica_sync import sync_replicated
    from .nn.state_dict import full_state_dict, load_full_state_dict
    from .planner.make_plan import make_plan
    from .rebalancing.migrate import apply_plan
    from .rebalancing.rebalancer import Rebalancer
    from .rebalancing.step_reports import Monitor, StepReport, monitor
    from .runtime.batches import same_batches
    from .runtime.het_tensor import HetTensor, gather
    from .runtime.rank_devices import profile_of_ranks
    from .schemas.cluster_profile import ClusterProfile
    from .schemas.plan import Plan
    from .sharding.layout import Box, Layout, ReadRegion, apportion
    from .sharding.split import Split
    from .tracing.graph import Graph
    from .tracing.tracer import capture
    from .workers.workers import Workers

__all__ = [
    "Box",
    "ClusterProfile",
    "DisagreementError",
    "GradScaler",
    "Graph",
    "HetConv1d",
    "HetConv2d",
    "HetConv3d",
    "HetConvError",
    "HetTensor",
    "KernelError",
    "Layout",
    "LayoutError",
    "LostRankError",
    "Monitor",
    "OutputError",
    "Plan",
    "PlanError",
    "ProfileError",
    "ReadRegion",
    "Rebalancer",
    "Split",
    "SplitError",
    "StepReport",
    "Workers",
    "apply_plan",
    "apportion",
    "call_with_whole_weights",
    "capture",
    "clip_grad_norm_",
    "count_sent",
    "full_optim_state_dict",
    "full_state_dict",
    "gather",
    "kernels",
    "load_checkpoint",
    "load_full_optim_state_dict",
    "load_full_state_dict",
    "make_plan",
    "monitor",
    "parallelize",
    "profile_of_ranks",
    "redistribute",
    "same_batches",
    "save_checkpoint",
    "sync_replicated",
]

__version__ = "0.1.0"

_MODULES = {
    "comm.rank_group": "count_sent",
    "comm.redistribute": "redistribute",
    "errors": "DisagreementError HetConvError KernelError LayoutError LostRankError OutputError "
    "PlanError ProfileError SplitError",
    "nn.checkpoint": "load_checkpoint save_checkpoint",
    "nn.gradients": "GradScaler clip_grad_norm_",
    "nn.layers": "HetConv1d HetConv2d HetConv3d",
    "nn.model_call": "call_with_whole_weights",
    "nn.optimizer_state": "full_optim_state_dict load_full_optim_state_dict",
    "nn.parallelize": "parallelize",
    "nn.replica_sync": "sync_replicated",
    "nn.state_dict": "full_state_dict load_full_state_dict",
    # a HetTensor does nothing before that module registers what it does
    "ops.dispatch": "HetTensor gather",
    "planner.make_plan": "make_plan",
    "rebalancing.migrate": "apply_plan",
    "rebalancing.rebalancer": "Rebalancer",
    "rebalancing.step_reports": "Monitor StepReport monitor",
    "runtime.batches": "same_batches",
    "runtime.rank_devices": "profile_of_ranks",
    "schemas.cluster_profile": "ClusterProfile",
    "schemas.plan": "Plan",
    "sharding.split": "Split",
    "sharding.layout": "Box Layout ReadRegion apportion",
    "tracing.graph": "Graph",
    "tracing.tracer": "capture",
    "workers.workers": "Workers",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name == "kernels":
        return import_module(".kernels", __name__)
    if name not in _HOME:
        raise AttributeError(
            f"hetconv has no public name {name!r}; it has {', '.join(__all__)}"
        )
    value = globals()[name] = getattr(import_module(f".{_HOME[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
