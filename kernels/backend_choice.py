"""Choice between Triton and ATen (cuDNN on CUDA) for each pass of a convolution."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import torch

from hetconv.errors import KernelError
from hetconv.sharding.conv_spec import ConvSpec

from .chip import chip_of
from .launch import MIN_ELEMENTS_FOR_INT64, launches_on_cpu
from .tiles import Entry, Pass, Tile, tuned_entry

Backend = Literal["auto", "triton", "aten"]
DTYPES = ("float16", "bfloat16", "float32")
MAX_TAPS = 63  # a kernel has a bit for each


@dataclass(frozen=True)
class KernelQuery:
    """One pass of a convolution on a device.

    Attributes:
        pass_name: Forward, input gradient or weight gradient.
        spec: The convolution.
        precision: "tf32" or "ieee", how float32 is multiplied.
        device: Name of the GPU, or "cpu".
        unavailable: Why Triton cannot run on the device, or None.
        tile: Tile that the caller asks for, if any.
    """

    pass_name: Pass
    spec: ConvSpec
    precision: str
    device: str
    unavailable: str | None = None
    tile: Tile | None = None

    @property
    def tuned(self) -> Entry | None:
        """Tile, or "aten", that was tuned for this pass on this device."""
        return tuned_entry(self.device, self.pass_name, self.spec, self.precision)


class Route(NamedTuple):
    """Backend that computes a pass, and its tile; arguments of `conv2d_forward`.

    Attributes:
        backend: "triton", "aten", or "auto" where it is not decided yet.
        tile: Tile of the Triton kernel; None for the default one.
    """

    backend: Backend = "auto"
    tile: Tile | None = None


ATEN, ANY_ROUTE = Route("aten"), Route()


def unsupported_reason(query: KernelQuery) -> str | None:
    """Returns why no Triton kernel computes a pass, or None if one does."""
    s = query.spec
    if query.unavailable is not None:
        return query.unavailable
    if s.dtype not in DTYPES:
        return f"the kernels compute in float16, bfloat16 and float32, not {s.dtype}"
    if s.R * s.S > MAX_TAPS:
        return f"the kernels take filters of up to {MAX_TAPS} taps, not {s.R} x {s.S}"
    if s.K * s.C // s.groups * s.R * s.S >= MIN_ELEMENTS_FOR_INT64:
        return "the kernels address filters of up to 2**30 numbers"
    return None


def check_backend(backend: Backend) -> Backend:
    """Returns a backend's name.

    Raises:
        KernelError: There is no such backend.
    """
    if backend not in get_args(Backend):
        raise KernelError(
            f"backend={backend!r} is not known; give 'auto', 'triton' or 'aten'"
        )
    return backend


def choose(query: KernelQuery, backend: Backend) -> Route:
    """Returns who computes a pass.

    "auto" takes what was tuned and else ATen: on a GPU on which nothing was tuned nobody
    has measured where these kernels beat cuDNN.

    Raises:
        KernelError: Triton is asked for and cannot compute it, or ATen with a tile.
    """
    if check_backend(backend) == "aten":
        if query.tile is not None:
            raise KernelError(
                f"tile {query.tile} was given with backend='aten', which has no tiles; "
                "leave out one of them"
            )
        return ATEN
    is_asked_for = backend == "triton" or query.tile is not None
    reason = unsupported_reason(query)
    if reason is not None:
        if is_asked_for:
            raise KernelError(
                f"{query.pass_name} of {query.spec} was asked of Triton, but {reason}; use "
                "backend='auto'"
            )
        return ATEN
    entry = query.tuned
    tuned_tile = entry if isinstance(entry, Tile) else None
    if is_asked_for:
        return Route("triton", query.tile or tuned_tile)
    return ATEN if tuned_tile is None else Route("triton", tuned_tile)


def unavailable_reason(device: torch.device) -> str | None:
    """Returns why Triton cannot run on a device, or None if it can."""
    if not _has_triton():
        return "triton is not installed"
    if device.type == "cuda":
        arch = chip_of(device).arch
        if arch >= 80:
            return None
        return (
            f"the kernels need compute capability 8.0, and this device has {arch / 10}"
        )
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type == "cpu" and (is_interpreted or launches_on_cpu()):
        return None
    return (
        f"Triton runs on CUDA tensors, not on {device.type} (on the CPU in its interpreter: "
        "TRITON_INTERPRET=1)"
    )


@lru_cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@lru_cache
def device_name(device: torch.device) -> str:
    """Returns a GPU's name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
