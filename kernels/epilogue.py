"""What is done to a sum before it is stored: activation(scale * sum + shift +
residual), each as wanted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hetconv.errors import KernelError

from .launch import Memory

ACTIVATIONS = ("relu", "relu6", "leaky_relu", "silu", "gelu", "gelu_tanh")


class Finish(NamedTuple):
    """Which of these there are. A launch is given the tensors ``scale``, ``shift`` and
    ``residual`` by these names.
    """

    scaled: bool = False
    shifted: bool = False
    activation: str = ""
    slope: float = 0.0  # of leaky_relu below zero

    @staticmethod
    def of(
        scale: Tensor | None, shift: Tensor | None, activation: str | None, slope: float
    ) -> Finish:
        """Raises `KernelError` for an activation that is not known."""
        if activation is not None and activation not in ACTIVATIONS:
            raise KernelError(
                f"activation={activation!r} is not known; give one of "
                f"{', '.join(ACTIVATIONS)}, or None"
            )
        leaky = float(slope) if activation == "leaky_relu" else 0.0
        return Finish(scale is not None, shift is not None, activation or "", leaky)

    def constants(self, residual: Memory | None) -> dict[str, Any]:
        """Of a kernel's parameters."""
        return {
            "SCALED": self.scaled,
            "SHIFTED": self.shifted,
            "ADDED": residual is not None,
            "ACTIVATION": self.activation,
            "SLOPE": self.slope,
        }

    def tensors(self, residual: Memory | None, instead: str) -> dict[str, str]:
        """The tensors that a launch takes; ``instead``: what it is given, and does not
        read, where one is not there.
        """
        return {
            "scale": "scale" if self.scaled else instead,
            "shift": "shift" if self.shifted else instead,
            "residual": "residual" if residual is not None else instead,
        }


PLAIN = Finish()


def shift_with(
    bias: Tensor | None, scale: Tensor | None, shift: Tensor | None
) -> Tensor | None:
    """What is added to scaled sums that a bias belongs to: scale * bias + shift, of
    what there is.
    """
    if bias is None:
        return shift
    scaled = bias if scale is None else scale * bias
    return scaled if shift is None else shift + scaled


def per_channel(t: Tensor, like: Tensor) -> Tensor:
    """One number per channel, to be broadcast over the samples and pixels of ``like``."""
    return t.view(-1, *(1,) * (like.dim() - 2))


def finished(
    y: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    residual: Tensor | None,
    activation: str,
    slope: float,
) -> Tensor:
    """The same by ATen, in float32 at least, rounded to y's dtype once. Without
    autograd y's memory is used again.
    """
    if scale is None and shift is None and residual is None and not activation:
        return y
    z = y.to(torch.promote_types(y.dtype, torch.float32))
    own = not z.requires_grad
    if scale is not None:
        z = z.mul_(per_channel(scale, y)) if own else z * per_channel(scale, y)
    for added in (per_channel(shift, y) if shift is not None else None, residual):
        if added is not None:
            z = z.add_(added) if own else z + added
    return activated(z, activation, slope, own).to(y.dtype)


def activated(z: Tensor, name: str, slope: float, in_place: bool = False) -> Tensor:
    match name:
        case "":
            return z
        case "leaky_relu":
            return F.leaky_relu(z, slope, in_place)
        case "gelu" | "gelu_tanh":
            return F.gelu(z, approximate="tanh" if name == "gelu_tanh" else "none")
    found: Tensor = getattr(F, name)(z, inplace=in_place)
    return found
