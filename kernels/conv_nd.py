"""Forward and backward pass of a convolution with any number of spatial dimensions.

Those with two are computed as `dispatch` says, others by ATen.
"""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from hetconv.sharding.conv_spec import ConvGeometry, ConvSpec, Ints, Padding

from . import aten
from .backend_choice import ANY_ROUTE, Route
from .compute_hook import hooked
from .dispatch import backward_2d, forward_2d, only_aten
from .epilogue import IDENTITY, Epilogue


@hooked
def conv_forward(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    stride: Ints,
    padding: Padding,
    dilation: Ints,
    groups: int,
    *,
    epilogue: Epilogue = IDENTITY,
    route: Route = ANY_ROUTE,
) -> Tensor:
    """Returns a convolution (N, K, *out_size) with its epilogue, without autograd.

    Args:
        x: Input (N, C, *size).
        w: Filters (K, C / groups, *kernel).
        bias: Bias (K), if any.
        stride: See `hetconv.sharding.conv_spec.ConvGeometry`, as are padding, dilation
            and groups.
        epilogue: What is computed on the result before it is stored.
        route: Who computes a convolution with two spatial dimensions.

    Raises:
        KernelError: The arguments do not fit each other.
    """
    geometry = ConvGeometry(stride, padding, dilation, groups)
    if epilogue.is_identity and route == ANY_ROUTE and only_aten() and w.numel():
        return aten.conv(x, w, bias, geometry)
    if x.dim() == 4:
        return forward_2d(x, w, bias, geometry, epilogue, None, route)
    y_shape = _y_shape(tuple(x.shape), tuple(w.shape), geometry)
    return aten.forward(x, w, bias, geometry, y_shape, epilogue)


@hooked
def conv_backward(
    g: Tensor,
    x: Tensor,
    w: Tensor,
    stride: Ints,
    padding: Padding,
    dilation: Ints,
    groups: int,
    wanted: aten.Wanted = (True, True, True),
) -> aten.Gradients:
    """Returns the gradients of input, filters and bias of `conv_forward`.

    Args:
        g: Gradient of the result, (N, K, *out_size).
        x: The other arguments are those that `conv_forward` was given.
        wanted: Which of the three gradients are computed; the others are None.
    """
    geometry = ConvGeometry(stride, padding, dilation, groups)
    if x.dim() == 4 and not only_aten():
        return backward_2d(g, x, w, geometry, wanted, ANY_ROUTE)
    return aten.backward(g, x, w, geometry, wanted)


@lru_cache(4096)
def _y_shape(x_shape: Ints, w_shape: Ints, geometry: ConvGeometry) -> Ints:
    (N, C, *size), (K, _, *kernel) = x_shape, w_shape
    return ConvSpec(N, C, tuple(size), K, tuple(kernel), *geometry).y_shape
