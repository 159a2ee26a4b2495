"""Models and inputs as named on the command line."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from hetconv.errors import HetConvError
from hetconv.kernels import CHANNELS_LAST


def parse_shape(text: str) -> tuple[int, ...]:
    """``1x3x256x256`` -> (1, 3, 256, 256). Raises `HetConvError` for anything else."""
    try:
        shape = tuple(int(part) for part in text.lower().split("x"))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise HetConvError(f"--input {text!r} is not a shape; write positive sizes as in 1x3x256x256")
    return shape


def build_model(target: str, arguments: str, seed: int) -> nn.Module:
    """Calls ``package.module:callable`` with the JSON ``arguments`` (an object or a list) under a fixed seed.

    The working directory is importable. Raises `HetConvError` saying which part is wrong.
    """
    module_name, colon, name = target.partition(":")
    if not colon or not module_name or not name:
        raise HetConvError(f"--model {target!r} does not name a callable; write package.module:callable")
    try:
        given = json.loads(arguments)
    except ValueError as e:
        raise HetConvError(f"--model-args {arguments!r} is not JSON: {e}") from e
    if not isinstance(given, dict | list):
        raise HetConvError(f"--model-args must be a JSON object or list, but is {given!r}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        make = getattr(importlib.import_module(module_name), name)
    except ImportError as e:
        raise HetConvError(f"--model: module {module_name!r} cannot be imported: {e}") from e
    except AttributeError as e:
        raise HetConvError(f"--model: module {module_name!r} has no {name!r}") from e
    torch.manual_seed(seed)
    try:
        model = make(**given) if isinstance(given, dict) else make(*given)
    except TypeError as e:
        raise HetConvError(f"--model: {target} cannot be called with {arguments}: {e}") from e
    if not isinstance(model, nn.Module):
        raise HetConvError(f"--model: {target} gave a {type(model).__name__}, not a torch.nn.Module")
    return model


def channels_last(model: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor]:
    """Both in the memory format that convolutions run fastest in; as they are where the input is no image."""
    memory = CHANNELS_LAST.get(x.dim())
    if memory is None:
        return model, x
    model = model.to(memory_format=memory)  # type: ignore[call-overload]
    return model, x.contiguous(memory_format=memory)


def random_input(shape: tuple[int, ...], seed: int) -> Tensor:
    """The same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
