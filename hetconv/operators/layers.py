"""The layers that a plan names: convolutions and linears."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hetconv.sharding.conv_spec import ConvSpec, pads_per_side
from hetconv.sharding.layer_rules import Conv, Linear

from .base import Args, Call, Kwargs, arg, per_dim

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""By spatial dimensions, from one on."""


def conv_spec(
    x_shape: Sequence[int],
    w_shape: Sequence[int],
    dtype: torch.dtype,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
) -> ConvSpec:
    """``w_shape`` is that of the whole weight (K, C / groups, *kernel)."""
    (n, c, *size), (k, _, *kernel) = x_shape, w_shape
    stride, dilation = per_dim(stride, len(size)), per_dim(dilation, len(size))
    pads = pads_per_side(padding, tuple(kernel), stride, dilation)
    dtype_name = str(dtype).removeprefix("torch.")
    return ConvSpec(
        n, c, tuple(size), k, tuple(kernel), stride, pads, dilation, groups, dtype_name
    )


def read_conv(args: Args, kwargs: Kwargs) -> Call | None:
    """A call of a convolution. Not among `READERS`: at run time only the modules that a
    plan names are cut.
    """
    x, w = arg(args, kwargs, 0, "input"), arg(args, kwargs, 1, "weight")
    if x.dim() != w.dim():
        return None
    options = (
        (3, "stride", 1),
        (4, "padding", 0),
        (5, "dilation", 1),
        (6, "groups", 1),
    )
    rest = [arg(args, kwargs, i, name, default) for i, name, default in options]
    return Call(Conv(conv_spec(x.shape, w.shape, x.dtype, *rest)), (x,))


def read_linear(args: Args, kwargs: Kwargs) -> Call | None:
    """A call of linear; see `read_conv`."""
    x, w = arg(args, kwargs, 0, "input"), arg(args, kwargs, 1, "weight")
    return Call(Linear(tuple(x.shape), w.shape[0]), (x,))


READ_LAYER = {
    "conv1d": read_conv,
    "conv2d": read_conv,
    "conv3d": read_conv,
    "linear": read_linear,
}
"""By the name of the function that a layer calls."""


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer runs as torch's own does, on a weight and a bias that it owns; a
    subclass need not.
    """
    kind = next(k for k in (*CONVS, nn.Linear) if isinstance(layer, k))
    same = all(
        getattr(type(layer), f, None) is getattr(kind, f, None)
        for f in ("forward", "_conv_forward")
    )
    return same and {"weight"} <= {name for name, _ in layer.named_parameters()} <= {
        "weight",
        "bias",
    }


def plannable_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The convolutions and linears that a plan may name: plain ones that share no
    parameter with another module.
    """
    owners = Counter(
        id(p) for module in model.modules() for p in module.parameters(recurse=False)
    )
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, (*CONVS, nn.Linear))
        and is_plain(layer)
        and all(owners[id(p)] == 1 for p in layer.parameters())
    }
