"""Epilogue of a kernel: activation(scale * y + shift + residual), each where it is given.

Triton kernels apply it to a result in registers, as they store it; ATen applies it in
passes of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hetconv.errors import KernelError

from .checks import check_tensor
from .launch import StridedLayout, nhwc
from .launchers.decisions import signature

ACTIVATIONS = ("relu", "relu6", "leaky_relu", "silu", "gelu", "gelu_tanh")


class EpilogueSpec(NamedTuple):
    """Epilogue without its tensors: what a kernel is compiled and launched for.

    Attributes:
        has_scale: Whether a launch is given the tensor ``scale``.
        has_shift: Whether a launch is given the tensor ``shift``.
        residual: Layout of the tensor ``residual`` (N, K, P, Q), if there is one.
        activation: One of `ACTIVATIONS`, or "".
        slope: Slope of leaky_relu below zero.
    """

    has_scale: bool = False
    has_shift: bool = False
    residual: StridedLayout | None = None
    activation: str = ""
    slope: float = 0.0

    @property
    def constants(self) -> dict[str, Any]:
        """Constexpr parameters of a kernel with an epilogue."""
        return {
            "HAS_SCALE": self.has_scale,
            "HAS_SHIFT": self.has_shift,
            "HAS_RESIDUAL": self.residual is not None,
            "ACTIVATION": self.activation,
            "SLOPE": self.slope,
        }

    def tensors(self, placeholder: str) -> dict[str, str]:
        """Maps a kernel's parameters to the tensors that a launch is given.

        Args:
            placeholder: Tensor to give for one that is missing; it is not read.
        """
        given = {
            "scale": self.has_scale,
            "shift": self.has_shift,
            "residual": self.residual is not None,
        }
        return {name: name if there else placeholder for name, there in given.items()}


NO_EPILOGUE = EpilogueSpec()


class Epilogue(NamedTuple):
    """Epilogue with its tensors.

    Attributes:
        scale: Factor per channel (K), at least as precise as float32.
        shift: Summand per channel (K), likewise.
        residual: Summand (N, K, P, Q) in the data type of the result.
        activation: One of `ACTIVATIONS`, or "".
        slope: Slope of leaky_relu below zero.
    """

    scale: Tensor | None = None
    shift: Tensor | None = None
    residual: Tensor | None = None
    activation: str = ""
    slope: float = 0.0

    @staticmethod
    def of(
        scale: Tensor | None,
        shift: Tensor | None,
        residual: Tensor | None,
        activation: str | None,
        slope: float,
    ) -> Epilogue:
        """Returns the epilogue of a function's arguments.

        Raises:
            KernelError: The activation is not known.
        """
        if activation is None and scale is shift is residual is None:
            return IDENTITY
        if activation is not None and activation not in ACTIVATIONS:
            raise KernelError(
                f"activation={activation!r} is not known; give one of "
                f"{', '.join(ACTIVATIONS)}, or None"
            )
        leaky = float(slope) if activation == "leaky_relu" else 0.0
        return Epilogue(scale, shift, residual, activation or "", leaky)

    @property
    def is_identity(self) -> bool:
        """Whether the epilogue changes nothing."""
        return not self.activation and not self.tensors

    @property
    def spec(self) -> EpilogueSpec:
        """The epilogue without its tensors."""
        residual = (
            StridedLayout.of(self.residual) if self.residual is not None else None
        )
        return EpilogueSpec(
            self.scale is not None,
            self.shift is not None,
            residual,
            self.activation,
            self.slope,
        )

    @property
    def signature(self) -> tuple[Any, ...] | None:
        """What decisions about the epilogue depend on."""
        if self is IDENTITY:
            return None
        return (*map(signature, self[:3]), self.activation, self.slope)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that there are, by name."""
        found = {}
        if self.scale is not None:
            found["scale"] = self.scale
        if self.shift is not None:
            found["shift"] = self.shift
        if self.residual is not None:
            found["residual"] = self.residual
        return found

    def check(
        self, y_shape: tuple[int, ...], like: Tensor, exact: torch.dtype | None = None
    ) -> None:
        """Raises `KernelError` for tensors that do not fit a result.

        Args:
            y_shape: Shape (N, K, ...) of the result.
            like: Tensor with the result's data type and device.
            exact: Data type of scale and shift; float32, or float64 if the result's
                is, by default.
        """
        exact = exact or torch.promote_types(like.dtype, torch.float32)
        check_tensor("scale", self.scale, y_shape[1:2], exact, like.device)
        check_tensor("shift", self.shift, y_shape[1:2], exact, like.device)
        check_tensor("residual", self.residual, y_shape, like.dtype, like.device)

    def with_bias(self, bias: Tensor | None) -> Epilogue:
        """Returns the epilogue of y + bias as one of y: shift + scale * bias."""
        if bias is None:
            return self
        scaled = bias if self.scale is None else self.scale * bias
        shift = scaled if self.shift is None else self.shift + scaled
        return Epilogue(self.scale, shift, self.residual, self.activation, self.slope)

    def for_triton(self) -> Epilogue:
        """Returns the same with tensors as the Triton kernels read them."""
        scale = self.scale.contiguous() if self.scale is not None else None
        shift = self.shift.contiguous() if self.shift is not None else None
        residual = nhwc(self.residual) if self.residual is not None else None
        return Epilogue(scale, shift, residual, self.activation, self.slope)

    def apply(self, y: Tensor) -> Tensor:
        """Returns the epilogue of y (N, K, ...) by ATen.

        It is computed in float32 at least and rounded to y's data type once. Without
        autograd y's memory is used again.
        """
        if self.is_identity:
            return y
        z = y.to(torch.promote_types(y.dtype, torch.float32))
        in_place = not z.requires_grad
        if self.scale is not None:
            factor = per_channel(self.scale, y)
            z = z.mul_(factor) if in_place else z * factor
        shift = per_channel(self.shift, y) if self.shift is not None else None
        for summand in (shift, self.residual):
            if summand is not None:
                z = z.add_(summand) if in_place else z + summand
        return activate(z, self.activation, self.slope, in_place).to(y.dtype)


IDENTITY = Epilogue()


def per_channel(t: Tensor, like: Tensor) -> Tensor:
    """Returns t (K), viewed so that it is broadcast over the shape (N, K, ...) of ``like``."""
    return t.view(-1, *(1,) * (like.dim() - 2))


def activate(z: Tensor, name: str, slope: float, in_place: bool = False) -> Tensor:
    """Returns an activation by ATen.

    Args:
        z: Input of any shape.
        name: One of `ACTIVATIONS`; "" returns z itself.
        slope: Slope of leaky_relu below zero.
        in_place: Whether the result takes the memory of z where ATen can do so.
    """
    match name:
        case "":
            return z
        case "leaky_relu":
            return F.leaky_relu(z, slope, in_place)
        case "gelu" | "gelu_tanh":
            return F.gelu(z, approximate="tanh" if name == "gelu_tanh" else "none")
    found: Tensor = getattr(F, name)(z, inplace=in_place)
    return found
