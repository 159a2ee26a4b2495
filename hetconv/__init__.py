"""hetconv: model-parallel convolution on devices of unequal speed.

A name is imported when it is first asked for: the kernels alone need no more than torch, triton and numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import kernels
    from .checkpoints import load_checkpoint, save_checkpoint
    from .drift import sync_replicated
    from .entry import call_with_whole_weights
    from .errors import (
        DisagreementError,
        HetConvError,
        KernelError,
        LayoutError,
        LostRankError,
        PlanError,
        ProfileError,
        SplitError,
    )
    from .gradients import GradScaler, clip_grad_norm_
    from .graph import Graph
    from .layout import Box, Layout, Need, apportion
    from .modules import HetConv1d, HetConv2d, HetConv3d
    from .movement import redistribute
    from .optim_state import full_optim_state_dict, load_full_optim_state_dict
    from .parallel import parallelize
    from .plan import Plan
    from .planner import make_plan
    from .profile import ClusterProfile
    from .recorder import capture
    from .rules import Split
    from .state import full_state_dict, load_full_state_dict
    from .tensor import HetTensor, gather
    from .transport import count_sent

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
    "Need",
    "Plan",
    "PlanError",
    "ProfileError",
    "Split",
    "SplitError",
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
    "parallelize",
    "redistribute",
    "save_checkpoint",
    "sync_replicated",
]

_ROOMS = {
    "checkpoints": "load_checkpoint save_checkpoint",
    "errors": "DisagreementError HetConvError KernelError LayoutError LostRankError PlanError ProfileError SplitError",
    "drift": "sync_replicated",
    "entry": "call_with_whole_weights",
    "gradients": "GradScaler clip_grad_norm_",
    "graph": "Graph",
    "layout": "Box Layout Need apportion",
    "modules": "HetConv1d HetConv2d HetConv3d",
    "movement": "redistribute",
    "optim_state": "full_optim_state_dict load_full_optim_state_dict",
    "ops.dispatch": "HetTensor gather",  # of tensor: a HetTensor does nothing before that registers what it does
    "parallel": "parallelize",
    "plan": "Plan",
    "planner": "make_plan",
    "profile": "ClusterProfile",
    "recorder": "capture",
    "rules": "Split",
    "state": "full_state_dict load_full_state_dict",
    "transport": "count_sent",
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name == "kernels":
        return import_module(".kernels", __name__)
    if name not in _HOME:
        raise AttributeError(f"hetconv has no public name {name!r}; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(import_module(f".{_HOME[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
