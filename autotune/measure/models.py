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
    """What ``package.module:callable`` names. The working directory is importable.

    Raises `HetConvError`, beginning with the ``option`` that it was given by, saying
    which part is wrong.
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
    """Calls ``package.module:callable`` with the JSON ``arguments`` (an object or a
    list) under a fixed seed.

    Raises `HetConvError` saying which part is wrong.
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
    """Whether a tensor in ``inputs`` has the dimensions of images or volumes, which
    have two memory formats.
    """
    return any(x.dim() in CHANNELS_LAST for x in tensors_in(inputs))


def channels_last(model: nn.Module, inputs: T) -> tuple[nn.Module, T]:
    """The model and the tensors in ``inputs`` in the memory format that convolutions
    run fastest in.

    Both are as they were where no input is an image.
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
    """The same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
