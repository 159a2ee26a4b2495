"""hetconv: model-parallel convolution on devices of unequal speed."""

from .layout import Layout, Need, apportion
from .modules import HetConv2d, full_state_dict, load_full_state_dict, parallelize
from .movement import redistribute
from .plan import Plan
from .rules import Split
from .tensor import HetTensor, gather

__all__ = ["HetConv2d", "HetTensor", "Layout", "Need", "Plan", "Split", "apportion", "full_state_dict", "gather", "load_full_state_dict", "parallelize", "redistribute"]
