"""What a call of a torch function means: the pure operator, and which of the arguments are its inputs.

The recorder and the runtime read calls here, so that a plan prices the operators that will run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hetconv.operators import VIEWS

from . import contractions, convs, creation, norms, pointwise, pools, random, reductions, resampling, shapes, views
from .base import JOINS, Args, Call, Kwargs, Reader, name_of, writes_in_place
from .convs import ConvTransposeCall
from .layers import CONVS, READ_LAYER, conv_spec, is_plain, plannable_layers
from .norms import BatchNormCall, NormCall
from .pointwise import UNARY, activation_of

__all__ = [
    "CONVS",
    "JOINS",
    "READ_LAYER",
    "UNARY",
    "BatchNormCall",
    "Call",
    "ConvTransposeCall",
    "NormCall",
    "activation_of",
    "conv_spec",
    "is_plain",
    "name_of",
    "plannable_layers",
    "read",
    "writes_in_place",
]

READERS: dict[str, Reader] = (
    convs.READERS
    | pointwise.READERS
    | contractions.READERS
    | creation.READERS
    | random.READERS
    | norms.READERS
    | pools.READERS
    | resampling.READERS
    | shapes.READERS
    | reductions.READERS
    | views.READERS
)
"""By the bare name of the function, see `name_of`."""


def read(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Call | None:
    """The operator of a call, or None where there is no rule for it: then its inputs are gathered."""
    if kwargs.get("out") is not None:
        return None
    name = name_of(func)
    reader = READERS.get(name)
    if reader is None:
        return None
    call = reader(name, args, kwargs)
    if call is None or not writes_in_place(func, kwargs):
        return call
    return replace(call, in_place=True) if not isinstance(call.op, VIEWS) else None  # unsqueeze_ changes the shape
