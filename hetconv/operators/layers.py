"""The layers that a plan can split: convolutions and linear layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hetconv.sharding.conv_spec import ConvSpec, pads_per_side
from hetconv.sharding.layer_rules import Conv, Linear

from .base import Args, Call, Kwargs, bind, per_dim

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Convolution modules, by number of spatial dimensions."""


def conv_spec(
    x_shape: Sequence[int],
    w_shape: Sequence[int],
    dtype: torch.dtype,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
) -> ConvSpec:
    """Returns the shapes and options of a convolution as a `ConvSpec`.

    Args:
        x_shape: Shape of the input, (N, C, *size).
        w_shape: Shape of the whole weight, (K, C / groups, *kernel).
        dtype: Data type of the input.
        stride: As torch takes it: an int, or one per spatial dimension.
        padding: As torch takes it: "same", "valid", an int, or one per dimension.
        dilation: As torch takes it: an int, or one per spatial dimension.
        groups: Number of groups.
    """
    (n, c, *size), (k, _, *kernel) = x_shape, w_shape
    stride, dilation = per_dim(stride, len(size)), per_dim(dilation, len(size))
    pads = pads_per_side(padding, tuple(kernel), stride, dilation)
    dtype_name = str(dtype).removeprefix("torch.")
    return ConvSpec(
        n, c, tuple(size), k, tuple(kernel), stride, pads, dilation, groups, dtype_name
    )


def read_conv(args: Args, kwargs: Kwargs) -> Call | None:
    """Reads a call of a convolution.

    It is not among the `READERS`, because at run time only the modules that a plan
    names are split.
    """
    x, weight, _, stride, padding, dilation, groups = bind(
        args,
        kwargs,
        input=None,
        weight=None,
        bias=None,
        stride=1,
        padding=0,
        dilation=1,
        groups=1,
    )
    if x.dim() != weight.dim():
        return None
    spec = conv_spec(x.shape, weight.shape, x.dtype, stride, padding, dilation, groups)
    return Call(Conv(spec), (x,))


def read_linear(args: Args, kwargs: Kwargs) -> Call | None:
    """Reads a call of a linear layer; see `read_conv`."""
    x, weight = bind(args, kwargs, input=None, weight=None)
    return Call(Linear(tuple(x.shape), weight.shape[0]), (x,))


READ_LAYER = {
    "conv1d": read_conv,
    "conv2d": read_conv,
    "conv3d": read_conv,
    "linear": read_linear,
}
"""Readers, by the name of the function that a layer calls."""


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer runs torch's own code on a weight and a bias that it owns.

    Args:
        layer: A convolution or linear layer, or an instance of a subclass.
    """
    base = next(kind for kind in (*CONVS, nn.Linear) if isinstance(layer, kind))
    for method in ("forward", "_conv_forward"):
        if getattr(type(layer), method, None) is not getattr(base, method, None):
            return False
    names = {name for name, _ in layer.named_parameters()}
    return {"weight"} <= names <= {"weight", "bias"}


def plannable_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the layers that a plan can name, by module name.

    These are the plain convolutions and linear layers that share no parameter with
    another module.
    """
    uses = Counter(
        id(p) for module in model.modules() for p in module.parameters(recurse=False)
    )
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, (*CONVS, nn.Linear))
        and is_plain(layer)
        and all(uses[id(p)] == 1 for p in layer.parameters())
    }
