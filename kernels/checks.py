"""Checks of the arguments of this folder's functions, and the errors they raise."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from hetconv.errors import KernelError
from hetconv.sharding.conv_spec import ConvGeometry, ConvSpec, Ints


def describe(t: Tensor) -> str:
    """Returns shape, data type and device of a tensor, for error messages."""
    return f"{tuple(t.shape)} in {t.dtype} on {t.device}"


def check_tensor(
    name: str,
    t: Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raises `KernelError` for a tensor that is there and not as it must be.

    Args:
        name: The argument's name.
        t: The argument; None is accepted.
        shape: Shape that it must have.
        dtype: Data type that it must have.
        device: Device that it must be on.
    """
    if t is None:
        return
    if tuple(t.shape) != shape or t.dtype != dtype or t.device != device:
        raise KernelError(
            f"{name} is {describe(t)}, but must be {shape} in {dtype} on {device}"
        )


def check_channels_contiguous(out: Tensor | None) -> None:
    """Raises `KernelError` for an output whose channels do not lie side by side."""
    if out is not None and out.numel() and out.stride(1) != 1 and out.shape[1] > 1:
        raise KernelError(
            f"out has strides {out.stride()}, but its channels must lie beside each other; "
            "give a channels_last tensor, or a slice of one"
        )


def check_no_gradients(what: str, *tensors: Tensor | None) -> None:
    """Raises `KernelError` if autograd would need a gradient for one of the tensors.

    Args:
        what: What has no gradient, for the message.
        tensors: Arguments; any may be None.
    """
    requires_grad = (t is not None and t.requires_grad for t in tensors)
    if torch.is_grad_enabled() and any(requires_grad):
        raise KernelError(
            f"{what} is not differentiable, but an argument requires a gradient; call it "
            "under torch.no_grad()"
        )


def spec_of(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    geometry: ConvGeometry,
    cached: bool = False,
) -> ConvSpec:
    """Returns the sizes of a 2-D convolution in integers.

    Args:
        x: Input.
        w: Filters.
        bias: Bias, if any.
        geometry: Stride, padding, dilation and groups.
        cached: Whether the result may be an earlier one; not for tensors that are being
            traced, whose sizes are symbols.

    Raises:
        KernelError: The arguments do not fit each other.
    """
    if x.dim() != 4 or w.dim() != 4:
        raise KernelError(
            "a 2-D convolution takes x (N, C, H, W) and weight (K, C / groups, R, S), not "
            f"{describe(x)} and {describe(w)}"
        )
    for name, t in (("weight", w), ("bias", bias)):
        if t is not None and (t.dtype != x.dtype or t.device != x.device):
            raise KernelError(
                f"{name} is {describe(t)}, but x is {describe(x)}; give both in one dtype and "
                "on one device"
            )
    biases = tuple(bias.shape) if bias is not None else None
    spec = _cached_spec if cached else _spec
    return spec(tuple(x.shape), tuple(w.shape), biases, x.dtype, geometry)


def _spec(
    x: Ints, w: Ints, bias: Ints | None, dtype: torch.dtype, geometry: ConvGeometry
) -> ConvSpec:
    (N, C, H, W), (K, c, R, S) = x, w
    stride, padding, dilation, groups = geometry
    if groups < 1 or c * groups != C or K % groups:
        raise KernelError(
            f"x has {C} channels, so in {groups} groups weight (K, C / groups, R, S) needs {C} "
            f"/ {groups} channels and a multiple of {groups} filters, but it is {w}"
        )
    if bias is not None and bias != (K,):
        raise KernelError(
            f"bias has shape {bias}, but there are {K} filters; give one number for each"
        )
    if min(R, S, *stride, *dilation) < 1 or min(*padding[0], *padding[1]) < 0:
        raise KernelError(
            f"filter {R} x {S}, stride {stride} and dilation {dilation} must be at least 1, "
            f"and padding {padding} at least 0"
        )
    spec = ConvSpec(N, C, (H, W), K, (R, S), *geometry, dtype=str(dtype)[6:])
    if min(spec.P, spec.Q) < 1:
        raise KernelError(
            f"an image of {H} x {W} with padding {padding} is smaller than the filter, {R} x "
            f"{S} at dilation {dilation}"
        )
    return spec


_cached_spec = lru_cache(4096)(_spec)
