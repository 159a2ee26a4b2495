"""Results of tuning: tiles and chunks of convolutions, ratios and plans of models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hetconv.sharding.conv_spec import ConvSpec
from hetconv.sharding.split import Split

from .json_files import STRICT, Positive
from .provenance import MeasurementConditions


@dataclass(frozen=True)
class TunedRatio:
    """Proportions found by measuring whole steps of one model and mode, and computed ones.

    Attributes:
        graph: Digest of the model's graph.
        mode: Whether a step trains.
        kind: Dimension along which all layers were cut.
        weights: Proportions of the ranks whose step was the fastest.
        step_s: Seconds of a step with them.
        computed_weights: Proportions that the planner computed.
        computed_step_s: Seconds of a step with those.
        trials: Number of ratios that were measured.
        measured: When, and under which versions; as its devices, if it is missing.
    """

    graph: str
    mode: Literal["train", "infer"]
    kind: Literal["sample", "depth", "height", "width"]
    weights: tuple[int, ...]
    step_s: Positive
    computed_weights: tuple[int, ...]
    computed_step_s: Positive
    trials: int
    measured: MeasurementConditions | None = None
    __pydantic_config__ = STRICT


@dataclass(frozen=True)
class TunedTile:
    """Fastest measured kernel of one pass of a convolution.

    Attributes:
        device: Name of the device.
        torch: Version of PyTorch.
        triton: Version of Triton.
        what: Pass.
        spec: Convolution.
        precision: Precision of products of float32.
        choice: Tile of `hetconv.kernels`, as it prints, or "aten".
        seconds: Seconds of this choice.
        heuristic_s: Seconds of the tile that is taken without tuning, if that one ran.
    """

    device: str
    torch: str
    triton: str
    what: Literal["forward", "input gradient", "weight gradient"]
    spec: ConvSpec
    precision: Literal["ieee", "tf32"]
    choice: str
    seconds: float
    heuristic_s: float | None = None
    __pydantic_config__ = STRICT


@dataclass(frozen=True)
class TunedChunks:
    """Number of chunks in which a filter split is gathered in inference.

    Attributes:
        spec: Convolution.
        sizes: Filters of each rank.
        chunks: Number of chunks of the batch; 1 if no other number was faster.
        seconds: Seconds of convolution and gather together.
        unchunked_s: Seconds of both without chunks.
        measured: Conditions of the measurement.
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
    """Fastest plan among those that were measured on whole steps of a model.

    Attributes:
        graph: Digest of the model's graph.
        mode: Whether the steps train.
        name: Name that the planner gives it, which may be that of a single device.
        splits: Split of each layer.
        step_s: Measured seconds of a step.
        predicted_s: Seconds predicted by the corrected profile.
        trials: Number of plans that were measured.
        alone: Name of the plan of the fastest single device; None where the model fits no
            device.
        alone_s: Seconds of the plain model's step there, in its faster memory format.
        measured: Conditions of the measurement.
        even: Name of the even split that was predicted to be the fastest; None where it
            did not run.
        even_s: Measured seconds of a step of this even split.
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
