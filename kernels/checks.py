"""Checks of the arguments of this folder's functions, and the errors they raise."""

from __future__ import annotations

import torch
from torch import Tensor

from hetconv.errors import KernelError


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
