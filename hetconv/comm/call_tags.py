"""The call that this rank is in, and its line in the user's code.

Every message between ranks carries a tag of the call. Ranks in different calls notice it
by the tags, even where their messages have the same size, and tell each other what
they do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import lru_cache
from types import FrameType
from typing import Any, NamedTuple
from zlib import crc32

Call = str | Callable[..., Any]
"""A layer or a step, by name, or a function of PyTorch."""
LIBRARIES = {"hetconv", "torch", "importlib", "contextlib", "functools"}
"""Packages whose frames are not the user's code."""


class _Backward(NamedTuple):
    call: Call


class _Now:
    """State of the current call.

    Attributes:
        call: the current call.
        last_layer: the last layer since the ranks last agreed.
        layers: number of layers since then.
    """

    call: Call | _Backward = "nothing"
    last_layer = ""
    layers = 0


_now = _Now()


def enter(call: Call) -> None:
    """Begins a call: the messages that follow belong to it."""
    _now.call = call


def enter_step(call: str) -> None:
    """Begins a call on which all ranks agree. Layers are counted from here."""
    _now.call, _now.last_layer, _now.layers = call, "", 0


def enter_layer(layer: str) -> None:
    """Begins a layer: the messages that follow belong to it."""
    _now.call = _now.last_layer = layer
    _now.layers = crc32(layer.encode(), _now.layers)


def enter_backward(call: Call) -> None:
    """Begins the backward pass of a call, as `forward_call` returned it."""
    _now.call = _Backward(call)


def forward_call() -> Call:
    """Returns the current call, to be kept for its backward pass."""
    call = _now.call
    return call.call if isinstance(call, _Backward) else call


def tag(step: int) -> int:
    """Returns 64 bits that identify the step, the layers so far and the current call.

    Args:
        step: how often the ranks have agreed so far.
    """
    return (step & 0xFFFFFFFF) << 32 | _checksum(_now.call) ^ _now.layers


def short_tag(step: int) -> int:
    """Returns 31 bits of `tag`: as many as a message of gloo has."""
    whole = tag(step)
    return (whole ^ (whole >> 32) * 0x9E3779B1) & 0x7FFFFFFF


def described(frame: FrameType | None = None) -> str:
    """Returns the current call and its line in the user's code.

    Args:
        frame: of the thread that makes the call, if it is another one.
    """
    name = _name(_now.call)
    after = f" after {_now.last_layer}" if _now.last_layer not in ("", name) else ""
    return f"{name}{after}, {user_code(frame)}"


def user_code(frame: FrameType | None = None) -> str:
    """Returns the innermost line of the user's code that is being executed.

    Args:
        frame: of the thread to look at; None for this thread.
    """
    frame = frame or sys._getframe(1)
    while (
        frame is not None
        and frame.f_globals.get("__name__", "").partition(".")[0] in LIBRARIES
    ):
        frame = frame.f_back
    if frame is None:  # backward passes of a GPU have a thread of their own
        return "in PyTorch's own thread"
    file = frame.f_code.co_filename
    near = os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file
    return f"at {near}:{frame.f_lineno} in {frame.f_code.co_name}"


@lru_cache(4096)
def _checksum(call: Call | _Backward) -> int:
    return crc32(_name(call).encode())


def _name(call: Call | _Backward) -> str:
    if isinstance(call, _Backward):
        return f"the backward pass of {_name(call.call)}"
    return (
        call
        if isinstance(call, str)
        else f"torch's {getattr(call, '__name__', type(call).__name__)}"
    )
