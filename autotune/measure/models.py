"""Models as named on the command line, and tensors for them."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hetconv.containers import map_tensors, tensors_in
from hetconv.errors import HetConvError
from hetconv.kernels import CHANNELS_LAST

T = TypeVar("T")


def named_callable(target: str, option: str) -> Callable[..., Any]:
    """Imports a callable by its name; the working directory is importable.

    Args:
        target: ``package.module:callable``.
        option: of the command line, that it was given by.

    Raises:
        HetConvError: if it cannot be imported, saying which part is wrong.
    """
    module_name, colon, name = target.partition(":")
    if not colon or not module_name or not name:
        raise HetConvError(
            f"{option} {target!r} does not name a callable; write package.module:callable"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as e:  # whatever the module does when it is imported
        said = str(e) if isinstance(e, ImportError) else f"{type(e).__name__}: {e}"
        raise HetConvError(
            f"{option}: module {module_name!r} cannot be imported: {said}"
        ) from e
    try:
        found = getattr(module, name)
    except AttributeError as e:
        raise HetConvError(f"{option}: module {module_name!r} has no {name!r}") from e
    if not callable(found):
        raise HetConvError(
            f"{option}: {target} is of type {type(found).__name__} and cannot be called; name "
            "a callable"
        )
    made: Callable[..., Any] = found
    return made


def build_model(target: str, arguments: str, seed: int) -> nn.Module:
    """Builds a model by calling what makes it, under a fixed seed.

    Args:
        target: ``package.module:callable``.
        arguments: a JSON object or list that it is called with.
        seed: of torch's random numbers.

    Raises:
        HetConvError: if there is no such callable, it refuses the arguments, or what it
            returns is no module.
    """
    make = named_callable(target, "--model")
    try:
        given = json.loads(arguments)
    except ValueError as e:
        raise HetConvError(f"--model-args {arguments!r} is not JSON: {e}") from e
    if not isinstance(given, dict | list):
        raise HetConvError(
            f"--model-args must be a JSON object or list, but is {given!r}"
        )
    torch.manual_seed(seed)
    try:
        model = make(**given) if isinstance(given, dict) else make(*given)
    except TypeError as e:
        raise HetConvError(
            f"--model: {target} cannot be called with {arguments}: {e}"
        ) from e
    if not isinstance(model, nn.Module):
        raise HetConvError(
            f"--model: {target} gave a {type(model).__name__}, not a torch.nn.Module"
        )
    return model


def has_images(inputs: Any) -> bool:
    """Tells whether any tensor is of images or volumes, which have two memory formats."""
    return any(x.dim() in CHANNELS_LAST for x in tensors_in(inputs))


def channels_last(model: nn.Module, inputs: T) -> tuple[nn.Module, T]:
    """Brings a model and its inputs to the memory format that convolutions are fastest in.

    Both stay as they are where no input is an image.
    """
    if not has_images(inputs):
        return model, inputs
    for parameter in (*model.parameters(), *model.buffers()):
        parameter.data = _channels_last(parameter.data)
    formatted: T = map_tensors(_channels_last, inputs)
    return model, formatted


def _channels_last(x: Tensor) -> Tensor:
    memory = CHANNELS_LAST.get(x.dim())
    return x if memory is None else x.contiguous(memory_format=memory)


def random_input(shape: tuple[int, ...], seed: int) -> Tensor:
    """Returns a tensor of random numbers, the same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
