"""Choice between Triton and ATen for each pass of a norm."""

from __future__ import annotations

import torch
from torch import Tensor

from hetconv.kernels.backend_choice import unavailable_reason
from hetconv.kernels.dispatch import prefers_triton
from hetconv.kernels.epilogue import Epilogue, activate

from . import aten, triton_passes

Activation = tuple[str, float]
"""Name of one of `hetconv.kernels.epilogue.ACTIVATIONS`, and its slope below zero."""
TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def moments(x: Tensor, exact: torch.dtype, groups: int) -> Tensor:
    """Returns (2, N, G): variance and mean of each sample's groups of channels.

    Args:
        x: (N, C, ...), not empty.
        exact: Data type of the result: float32, or float64 if x is.
        groups: G, which divides C.
    """
    if runs_on_triton(x):
        return triton_passes.moments(x, groups)
    return aten.moments(x, exact, groups)


def moments_of_channels(x: Tensor, exact: torch.dtype) -> Tensor:
    """Returns (2, C): variance and mean of each channel over all samples.

    Args:
        x: (N, C, ...), not empty.
        exact: Data type of the result: float32, or float64 if x is.
    """
    if runs_on_triton(x):
        return triton_passes.moments(x, x.shape[1], of_all_samples=True)[:, 0]
    return aten.moments_of_channels(x, exact)


def normalized(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: Activation | None = None,
) -> Tensor:
    """Returns (x - mean) / sqrt(var + eps) * weight + bias in the data type of x.

    Triton computes an activation of it in the same pass.

    Args:
        x: (N, C, ...).
        mean: (N, C), or (1, C) for all samples, in float32 at least.
        var: Likewise.
        weight: (C,), or like ``mean``, or None.
        bias: Likewise.
        eps: Added to the variance.
        activation: What is applied to the result, or None.
    """
    if runs_on_triton(x):
        epilogue = Epilogue(weight, bias, None, *(activation or ()))
        return triton_passes.normalized(x, mean, var, eps, epilogue)
    y = aten.normalized(x, mean, var, weight, bias, eps)
    return y if activation is None else activate(y, *activation)


def normalize_to(
    y: Tensor,
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: Activation | None = None,
) -> None:
    """Writes `normalized` x to y.

    Args:
        y: (N, C, ...), in the data type of x; it may be x itself. On a CPU it is fastest
            if each sample is dense in the memory format of x.
        x: In one of both memory formats.
        mean: As for `normalized`, like the other arguments.
        var: Likewise.
        weight: Likewise.
        bias: Likewise.
        eps: Likewise.
        activation: Likewise.
    """
    if runs_on_triton(x):
        epilogue = Epilogue(weight, bias, None, *(activation or ()))
        triton_passes.normalize_to(y, x, mean, var, eps, epilogue)
        return
    aten.normalize_to(y, x, mean, var, weight, bias, eps)
    if activation is not None:
        y.copy_(activate(y, *activation))


def sums(g: Tensor, x: Tensor, mean: Tensor, invstd: Tensor) -> Tensor:
    """Returns (2, N, C): sums of g times the normalized x, and of g.

    Args:
        g: Gradient of the normalized x.
        x: (N, C, ...).
        mean: (N, C).
        invstd: (N, C), inverse standard deviations.
    """
    if runs_on_triton(x):
        return triton_passes.sums(g, x, mean, invstd)
    return aten.sums(g, x, mean, invstd)


def sums_of_channels(g: Tensor, x: Tensor, mean: Tensor, invstd: Tensor) -> Tensor:
    """Returns (2, C): sums of g times the normalized x, and of g, over all samples.

    Args:
        g: Gradient of the normalized x.
        x: (N, C, ...).
        mean: (C,).
        invstd: (C,), inverse standard deviations.
    """
    if runs_on_triton(x):
        return triton_passes.sums(g, x, mean, invstd, of_all_samples=True)[:, 0]
    return aten.sums_of_channels(g, x, mean, invstd)


def combination(
    x: Tensor, g: Tensor, of_x: Tensor, of_g: Tensor, shift: Tensor
) -> Tensor:
    """Returns x * of_x + g * of_g + shift in the data type of x.

    Args:
        x: (N, C, ...).
        g: Likewise.
        of_x: (N, C), or (1, C) for all samples.
        of_g: Likewise.
        shift: Likewise.
    """
    if runs_on_triton(x):
        return triton_passes.combination(x, g, (of_x, of_g, shift))[0]
    return aten.combination(x, g, of_x, of_g, shift)


def in_format_of(x: Tensor, g: Tensor) -> Tensor:
    """Returns g as several passes of x read it without a copy in each.

    Args:
        x: In one of both memory formats, which ATen needs g to have.
        g: (N, C, ...).
    """
    return g if runs_on_triton(x) else aten.in_format_of(x, g)


def runs_on_triton(x: Tensor) -> bool:
    """Returns whether Triton computes the passes of such an image."""
    return (
        prefers_triton(x)
        and x.dtype in TRITON_DTYPES
        and unavailable_reason(x.device) is None
    )
