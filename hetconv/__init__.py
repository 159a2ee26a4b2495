"""hetconv: model-parallel convolution on devices of unequal speed."""

from .errors import (
    DisagreementError,
    HetConvError,
    LayoutError,
    LostRankError,
    PlanError,
    ProfileError,
    SplitError,
)
from .graph import Graph
from .layout import Box, Layout, Need, apportion
from .modules import HetConv2d
from .movement import redistribute
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
    "Graph",
    "HetConv2d",
    "HetConvError",
    "HetTensor",
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
    "capture",
    "count_sent",
    "full_state_dict",
    "gather",
    "load_full_state_dict",
    "make_plan",
    "parallelize",
    "redistribute",
]
