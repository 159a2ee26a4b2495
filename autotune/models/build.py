"""Builds and traces the model that the command line names."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hetconv.containers import map_tensors, tensors_in
from hetconv.errors import HetConvError
from hetconv.kernels import CHANNELS_LAST, in_format
from hetconv.sharding.conv_spec import MemoryFormat
from hetconv.tracing.graph import Graph
from hetconv.tracing.tracer import capture

from .inputs import DTYPES, ModelInputs
from .named_callable import find_callable
from .user_code import UserCodeError

T = TypeVar("T")


def build_model(
    target: str, arguments: str, seed: int, dtype: str | None = None
) -> nn.Module:
    """Builds a model by calling what makes it, under a fixed seed.

    Args:
        target: of `find_callable`.
        arguments: a JSON object or list that it is called with.
        seed: of torch's random numbers.
        dtype: what its floating-point parameters and buffers become, one of `DTYPES`.

    Raises:
        HetConvError: if there is no such callable, it refuses the arguments, or what it
            returns is no module.
    """
    make = find_callable(target, "--model")
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
    except Exception as e:  # whatever it may raise
        raise UserCodeError(
            f"--model: {target} cannot be called with {arguments}", e
        ) from e
    if not isinstance(model, nn.Module):
        raise HetConvError(
            f"--model: {target} returned a value of type {type(model).__name__}, not a "
            "torch.nn.Module"
        )
    return model if dtype is None else model.to(DTYPES[dtype])


def trace_model(model: nn.Module, inputs: ModelInputs, training: bool) -> Graph:
    """Captures a model in training or evaluation mode.

    Args:
        model: the model; its mode is set.
        inputs: what it is called with.
        training: whether a step is forward and backward.

    Raises:
        UserCodeError: if the model cannot be called with these inputs.
        HetConvError: if it has no convolution and no linear layer.
    """
    model.train(training)
    try:
        with torch.set_grad_enabled(training):
            graph = capture(model, *inputs.args, **inputs.kwargs)
    except HetConvError as e:
        if e.__cause__ is None:
            raise
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors_in(inputs))
        raise UserCodeError(
            f"--model: {type(model).__name__} cannot be called with --input of {shapes}",
            e.__cause__,
        ) from e.__cause__
    if not graph.layers:
        raise HetConvError(
            f"--model: {graph.model} has no convolution or linear layer, so that there is "
            "nothing to split; name a model that has"
        )
    return graph


def has_images(inputs: Any) -> bool:
    """Tells whether any tensor is of images or volumes, which have two memory formats."""
    return any(x.dim() in CHANNELS_LAST for x in tensors_in(inputs))


def formatted(
    model: nn.Module, inputs: T, memory_format: MemoryFormat
) -> tuple[nn.Module, T]:
    """Brings a model, in place, and its inputs to a memory format.

    Both stay as they are where no input is an image.
    """
    if not has_images(inputs):
        return model, inputs
    for parameter in (*model.parameters(), *model.buffers()):
        parameter.data = in_format(parameter.data, memory_format)
    images: T = map_tensors(lambda x: in_format(x, memory_format), inputs)
    return model, images


def random_input(shape: tuple[int, ...], seed: int) -> Tensor:
    """Returns a tensor of random numbers, the same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
