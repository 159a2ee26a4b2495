"""What tuning found: of convolutions tiles, in words, for no kernel is known here, and
chunks; of models, plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hetconv.sharding.conv_spec import Conv2dSpec, ConvSpec
from hetconv.sharding.split import Split

from .json_files import STRICT, Positive
from .provenance import MeasurementConditions


@dataclass(frozen=True)
class TunedTile:
    """``choice`` is a tile of `hetconv.kernels`, as it prints, or "aten"; it was
    measured with these versions.

    ``seconds`` are its own, ``heuristic_s`` those of the tile that is taken where
    nothing was tuned, if that one ran.
    """

    device: str
    torch: str
    triton: str
    what: Literal["forward", "input gradient", "weight gradient"]
    spec: Conv2dSpec
    precision: Literal["ieee", "tf32"]
    choice: str
    seconds: float
    heuristic_s: float | None = None
    __pydantic_config__ = STRICT


@dataclass(frozen=True)
class TunedChunks:
    """A convolution cut by filter in these ``sizes`` and gathered: into how many chunks
    of the batch, for inference.

    ``seconds`` are those of the whole, the gathering included, beside ``unchunked_s``.
    One, if no more were faster.
    """

    spec: ConvSpec
    sizes: tuple[int, ...]
    chunks: int
    seconds: float
    unchunked_s: float
    measured: MeasurementConditions | None = None
    __pydantic_config__ = STRICT


@dataclass(frozen=True)
class TunedPlan:
    """The fastest plan of those that were measured on whole steps of one model and
    mode; a device alone, if none was.

    ``name``: what the planner calls it. ``predicted_s``: from all that was learnt by
    the end. ``trials``: plans that were measured. ``alone`` is the name of the device
    that is fastest by itself, and ``alone_s`` are seconds of the plain model's steps
    there, in its faster memory format, beside which ``step_s`` were measured; none
    where the model fits no device. ``even`` and ``even_s``: likewise of the even split
    that was predicted to be the fastest; none where it did not run.
    """

    graph: str
    mode: Literal["train", "infer"]
    name: str
    splits: Mapping[str, Split]
    step_s: Positive
    predicted_s: Positive
    trials: int
    alone: str | None = None
    alone_s: Positive | None = None
    measured: MeasurementConditions | None = None
    even: str | None = None
    even_s: Positive | None = None
    __pydantic_config__ = STRICT
