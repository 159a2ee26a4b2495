"""Plan: the split of every convolution and linear layer of a model.

A plan also says what was predicted for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from hetconv.errors import PlanError, few
from hetconv.sharding.conv_spec import MemoryFormat
from hetconv.sharding.layer_rules import Conv, Linear
from hetconv.sharding.split import Split

from . import json_files
from .json_files import STRICT
from .timeline import Timeline
from .tuning_results import TunedTile

VERSION = 1
# Prefix of the name of a plan that runs the model as it is, on one device.
SINGLE_DEVICE = "fastest device alone"
Mode = Literal["train", "infer"]


@dataclass(frozen=True)
class Alternative:
    """Split that a layer could have had, with all other layers as planned.

    Attributes:
        split: Split of the layer.
        compute_s: Seconds that operators compute that depend on this split: the layer,
            and those that follow its layout.
        communication_s: Seconds of messages that depend on it, up to the next layers.
        slower_by_s: Difference of both to the chosen split. Seconds are those of
            `Prediction.operator_sum_s`.
    """

    split: Split
    compute_s: float
    communication_s: float
    slower_by_s: float
    __pydantic_config__ = STRICT


@dataclass(frozen=True)
class LayerPlan:
    """Plan of one layer.

    Attributes:
        op: Operator of the layer.
        split: Split of the layer.
        forward_s: Predicted seconds of the forward pass on each device.
        backward_s: Predicted seconds of the backward pass on each device.
        sent_bytes: Predicted bytes that all ranks send together.
        fusible: Functions that alone consume the result, which may be computed in the
            epilogue (see `tracing.fusion`).
        chunks: Number of chunks of the batch in which a filter split is gathered in
            inference, each while the next one is computed.
        alternatives: Splits that the planner chose among.
        memory_bytes: Predicted bytes on each device of the layer's parameters, with an
            optimizer's moments in training, of its result, and of what it receives.
    """

    op: Conv | Linear
    split: Split
    forward_s: tuple[float, ...] = ()
    backward_s: tuple[float, ...] = ()
    sent_bytes: int = 0
    fusible: tuple[str, ...] = ()
    chunks: int = 1
    alternatives: tuple[Alternative, ...] = ()
    memory_bytes: tuple[int, ...] = ()
    __pydantic_config__ = STRICT


@dataclass(frozen=True)
class Prediction:
    """Predicted step.

    Attributes:
        step_s: Seconds of the step.
        exposed_communication_s: Seconds of the step in which the busiest device does not
            compute.
        compute_s: Seconds in which each device computes.
        sent_bytes: Bytes sent, as a matrix [sender][receiver].
        memory_bytes: Peak bytes of memory on each device.
        operator_sum_s: Seconds of the step if all devices waited for each other at every
            operator, which is what the planner minimizes.
        communication_s: Seconds in which each device sends or receives and does not
            compute. In the rest of the step it waits.
    """

    step_s: float
    exposed_communication_s: float
    compute_s: tuple[float, ...]
    sent_bytes: tuple[tuple[int, ...], ...]
    memory_bytes: tuple[int, ...]
    operator_sum_s: float = 0.0
    communication_s: tuple[float, ...] = ()

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds in which each device does not wait: it computes, or copies messages."""
        messages_s = self.communication_s or (0.0,) * len(self.compute_s)
        return tuple(map(sum, zip(self.compute_s, messages_s, strict=True)))

    __pydantic_config__ = STRICT


@dataclass(frozen=True)
class GatheredOp:
    """Operator that runs on inputs that had to be gathered.

    Attributes:
        name: Name of the operator.
        function: Function that the model calls.
        shape: Shape of its result.
        sent_bytes: Bytes that are sent to gather its inputs.
    """

    name: str
    function: str
    shape: tuple[int, ...]
    sent_bytes: int
    __pydantic_config__ = STRICT


def _is_consistent(op: Conv | Linear) -> bool:
    """Whether the shapes in a file can be those of a layer."""
    if isinstance(op, Linear):
        return min(op.x_shape, default=-1) >= 0 and op.features >= 0
    s = op.spec
    by_dim = (s.size, s.kernel, s.stride, s.padding, s.dilation)
    same_dims = len(s.size) >= 1 and len({len(numbers) for numbers in by_dim}) == 1
    positive = s.C, s.K, *s.kernel, *s.stride, *s.dilation
    return same_dims and min(s.N, *s.size) >= 0 and min(positive) >= 1


@dataclass(frozen=True)
class Plan:
    """Split of every convolution and linear layer of a model.

    Attributes:
        devices: Names of the devices, in rank order.
        mode: Whether the steps train.
        model: Name of the model's class.
        inputs: Shapes of the model's inputs.
        layers: Plan of each layer, by module name.
        chosen: Name of the kind of plan.
        predicted: Predicted step, if the planner made the plan.
        alternatives: Predicted seconds of a step of other kinds of plan, by name.
        estimated: Whether nothing was measured: the profile comes from data sheets.
        tiles: Tuned tiles of the profile.
        gathers: Operators that a better rule or another split could keep on shards, those
            that send most first.
        timeline: Simulated step, if the planner made the plan. Where whole steps of the
            plan were measured, ``predicted.step_s`` is what they took instead.
        memory_format: Memory format of images and filters in which devices were measured
            and the model should run, by its name in torch.
    """

    devices: tuple[str, ...]
    mode: Mode
    model: str
    inputs: tuple[tuple[int, ...], ...]
    layers: Mapping[str, LayerPlan]
    chosen: str
    predicted: Prediction | None = None
    alternatives: Mapping[str, float] | None = None
    estimated: bool = False
    tiles: tuple[TunedTile, ...] = ()
    gathers: tuple[GatheredOp, ...] = ()
    timeline: Timeline | None = None
    memory_format: MemoryFormat = "channels_last"
    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        for name, layer in self.layers.items():
            if not _is_consistent(layer.op):
                raise PlanError(
                    f"layer {name!r}: {layer.op} is no operator: its shapes do not fit "
                    "together"
                )
            try:
                layer.op.check(layer.split, self.world)
            except ValueError as e:
                raise PlanError(f"layer {name!r}: {e}") from e
            self._check_length(
                f"layer {name!r}",
                layer.forward_s,
                layer.backward_s,
                layer.memory_bytes,
                empty=True,
            )
        if (p := self.predicted) is not None:
            self._check_length(
                "predicted", p.compute_s, p.memory_bytes, p.sent_bytes, *p.sent_bytes
            )
            self._check_length("predicted", p.communication_s, empty=True)
        if (t := self.timeline) is not None and t.world > self.world:
            raise PlanError(
                f"timeline: has a span of rank {t.world - 1} for {self.world} devices"
            )

    def _check_length(self, what: str, *by_rank: Sized, empty: bool = False) -> None:
        allowed = (self.world, 0) if empty else (self.world,)
        wrong = [len(numbers) for numbers in by_rank if len(numbers) not in allowed]
        if wrong:
            raise PlanError(
                f"{what} has {min(wrong)} numbers for {self.world} devices; give one for "
                "each"
            )

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.devices)

    @property
    def splits(self) -> Mapping[str, Split]:
        """Split of each layer, by module name."""
        return MappingProxyType(
            {name: layer.split for name, layer in self.layers.items()}
        )

    @property
    def digest(self) -> str:
        """Hash that ranks compare before they act on a plan.

        It covers the number of ranks, and all that decides what is sent when.
        """
        lines = [str(self.world)]
        for name, layer in sorted(self.layers.items()):
            lines.append(f"{name}={layer.split}{layer.fusible, layer.chunks}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def with_splits(self, splits: Mapping[str, Split]) -> Plan:
        """Returns the plan with other splits, without predictions.

        Args:
            splits: Split of each layer to change, by module name.

        Raises:
            PlanError: If the plan has no such layer, or a split does not fit its layer.
        """
        unknown = sorted(splits.keys() - self.layers.keys())
        if unknown:
            raise PlanError(
                f"the plan has no layer {', '.join(map(repr, unknown))}; it has {few(self.layers)}"
            )
        layers = {
            name: LayerPlan(
                layer.op, splits.get(name, layer.split), fusible=layer.fusible
            )
            for name, layer in self.layers.items()
        }
        return replace(
            self,
            layers=layers,
            chosen="by hand",
            predicted=None,
            alternatives=None,
            gathers=(),
            timeline=None,
        )

    def save(self, path: str | Path) -> None:
        """Writes the plan file, atomically.

        Args:
            path: File to write.
        """
        json_files.save(path, "plan", VERSION, self)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Reads a plan file.

        Args:
            path: File to read.

        Raises:
            PlanError: If it is not a plan of this version; the message names the key.
        """
        return json_files.load(path, "plan", VERSION, Plan, PlanError)

    @staticmethod
    def schema() -> json_files.Document:
        """Returns the JSON schema of a plan file."""
        return json_files.schema("plan", VERSION, Plan)
