"""Arguments that a model is called with, as named on the command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from hetconv.containers import map_tensors
from hetconv.errors import HetConvError

from .named_callable import find_callable
from .user_code import UserCodeError

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.complex128,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
TENSOR = re.compile(
    r"(?:(?P<name>[^=]*)=)?(?P<shape>[^:=]*)(?::(?P<dtype>.*))?", re.DOTALL
)


class ModelInputs(NamedTuple):
    """The arguments that a model is called with: ``model(*args, **kwargs)``."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, *args: Any, **kwargs: Any) -> Self:
        """Keeps the arguments of a call."""
        return cls(args, kwargs)

    def to(self, device: torch.device) -> ModelInputs:
        """Returns the arguments with all tensors on a device."""
        moved: ModelInputs = map_tensors(lambda x: x.to(device), self)
        return moved

    def call(self, model: nn.Module) -> Any:
        """Calls a model with these arguments."""
        return model(*self.args, **self.kwargs)


@dataclass(frozen=True)
class TensorSpec:
    """A tensor among a model's arguments.

    Attributes:
        shape: its sizes.
        dtype: one of `DTYPES`.
        name: of a keyword argument; None for a positional one.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    name: str | None = None

    @classmethod
    def parse(cls, text: str, default_dtype: str = "float32") -> TensorSpec:
        """Reads ``1x3x256x256``, ``1,3,256,256``, ``2:int64`` or ``timestep=2:int64``.

        Args:
            text: the option's value.
            default_dtype: where the text names none.

        Raises:
            HetConvError: for any other text.
        """
        found = TENSOR.fullmatch(text)
        if found is None:
            raise HetConvError(
                f"--input {text!r} is not understood; write it as in 1x3x256x256 or "
                "timestep=2:int64"
            )
        name, shape, dtype = (
            found["name"],
            parse_shape(found["shape"], text),
            found["dtype"],
        )
        if name is not None and not name.isidentifier():
            raise HetConvError(
                f"--input {text!r}: {name!r} is no name of an argument; write it as in "
                "timestep=2:int64, or the shape "
                "alone for a positional argument"
            )
        if dtype is not None and dtype not in DTYPES:
            raise HetConvError(
                f"--input {text!r}: dtype {dtype!r} is not known; choose one of {', '.join(DTYPES)}"
            )
        return cls(shape, dtype or default_dtype, name)

    def __str__(self) -> str:
        return (
            f"{self.name}=" * (self.name is not None)
            + f"{'x'.join(map(str, self.shape))}:{self.dtype}"
        )

    def make(self, generator: torch.Generator) -> Tensor:
        """Draws random numbers; zeros of integers and booleans, which any index allows."""
        dtype = DTYPES[self.dtype]
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(self.shape, generator=generator, dtype=dtype)
        return torch.zeros(self.shape, dtype=dtype)


@dataclass(frozen=True)
class InputSpec:
    """What ``--input`` and ``--inputs`` say.

    Attributes:
        tensors: the arguments, if they are given one by one.
        target: the callable that makes them otherwise, ``package.module:callable``.
    """

    tensors: tuple[TensorSpec, ...] = ()
    target: str | None = None

    @classmethod
    def parse(
        cls, tensors: Sequence[str], target: str | None, dtype: str | None = None
    ) -> InputSpec:
        """Reads the options of the command line.

        Args:
            tensors: every ``--input``.
            target: ``--inputs``, if it was given.
            dtype: ``--dtype``, which tensors have that name none.

        Raises:
            HetConvError: for both or neither, for a tensor that is not understood, and
                a name given twice.
        """
        if tensors and target is not None:
            raise HetConvError(
                f"--input {tensors[0]} and --inputs {target} were given; give one of these options"
            )
        if target is not None:
            return cls(target=target)
        if not tensors:
            raise HetConvError(
                "no inputs were given; give --input for each argument that the model is "
                "called with, as in "
                "--input 1x3x256x256, or --inputs package.module:callable"
            )
        found = tuple(TensorSpec.parse(text, dtype or "float32") for text in tensors)
        names = [tensor.name for tensor in found if tensor.name is not None]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise HetConvError(
                f"--input names {', '.join(twice)} more than once; give each argument once"
            )
        return cls(found)

    def __str__(self) -> str:
        return self.target or ", ".join(map(str, self.tensors))

    def make(self, seed: int) -> ModelInputs:
        """Makes the arguments, the same on every rank.

        Raises:
            HetConvError: if the callable does not return them.
        """
        if self.target is not None:
            return _called(self.target, seed)
        generator = torch.Generator().manual_seed(seed)
        made = [(tensor.name, tensor.make(generator)) for tensor in self.tensors]
        return ModelInputs(
            tuple(x for name, x in made if name is None),
            {name: x for name, x in made if name is not None},
        )


def parse_shape(shape: str, given: str | None = None) -> tuple[int, ...]:
    """Reads sizes, as in ``1x3x256x256`` or ``1,3,256,256``.

    Args:
        shape: the sizes.
        given: all of the option, for the error.

    Raises:
        HetConvError: if these are no positive sizes.
    """
    try:
        sizes = tuple(
            int(size) for size in shape.lower().split("," if "," in shape else "x")
        )
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise HetConvError(
            f"--input {given or shape!r}: {shape!r} is not a shape; write positive sizes as in "
            "1x3x256x256"
        )
    return sizes


def _called(target: str, seed: int) -> ModelInputs:
    make = find_callable(target, "--inputs")
    torch.manual_seed(seed)
    try:
        made = make()
    except Exception as e:  # whatever it may raise
        raise UserCodeError(f"--inputs: {target}, called without arguments", e) from e
    pair = isinstance(made, tuple | list) and len(made) == 2
    if (
        not pair
        or not isinstance(made[0], tuple | list)
        or not isinstance(made[1], dict)
    ):
        said = (
            f"{type(made).__name__} of {', '.join(type(x).__name__ for x in made)}"
            if pair
            else type(made).__name__
        )
        raise HetConvError(
            f"--inputs: {target} returned a {said}; return (args, kwargs), a tuple and a dict, "
            "as in ((x,), {})"
        )
    if not all(isinstance(name, str) for name in made[1]):
        raise HetConvError(
            f"--inputs: {target} returned keyword arguments whose names are no strings: "
            f"{[*made[1]]}"
        )
    return ModelInputs(tuple(made[0]), dict(made[1]))
