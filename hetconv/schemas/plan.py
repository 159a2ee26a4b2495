"""Plan: for every convolution and linear of a model, how it is cut; with what that was
predicted to cost.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from hetconv.errors import PlanError, few
from hetconv.sharding.layer_rules import Conv, Linear
from hetconv.sharding.split import Split

from . import json_files
from .json_files import STRICT
from .tuning_results import TunedTile

VERSION = 1
# so begins the name of a plan that leaves the model as it is
SINGLE_DEVICE = "fastest device alone"
Mode = Literal["train", "infer"]


@dataclass(frozen=True)
class Alternative:
    """A split that a layer could have had, all others as planned, and seconds as
    ``summed_s`` of `Prediction` has them.

    ``compute_s`` and ``movement_s``: of all operators and all messages that go by this
    layer's split, which are the layer, what follows it, and the way to the next layers.
    ``slower_by_s``: by which both exceed those of the plan.
    """

    split: Split
    compute_s: float
    movement_s: float
    slower_by_s: float
    __pydantic_config__ = STRICT


@dataclass(frozen=True)
class LayerPlan:
    """One layer: the operator, its split, and predicted seconds per device and bytes
    sent (all ranks together).

    ``fusible_functions``: the functions that alone consume its result, which may be computed as
    that is stored (see `fusing`). ``chunks`` of the batch, in which a filter split is
    gathered in inference, each while the next is computed. ``alternatives``: the splits
    that the planner chose among.
    """

    op: Conv | Linear
    split: Split
    forward_s: tuple[float, ...] = ()
    backward_s: tuple[float, ...] = ()
    sent_bytes: int = 0
    fusible: tuple[str, ...] = ()
    chunks: int = 1
    alternatives: tuple[Alternative, ...] = ()
    __pydantic_config__ = STRICT


@dataclass(frozen=True)
class Prediction:
    """One step: seconds, of which movement; bytes sent as a matrix [sender][receiver];
    bytes of memory per device.

    ``summed_s``: seconds if all devices waited for each other at every operator, which
    the planner minimizes. ``moving_s``: in which each device sends or receives and does
    not compute; besides, it is busy or it waits.
    """

    step_s: float
    movement_s: float
    busy_s: tuple[float, ...]
    sent_bytes: tuple[tuple[int, ...], ...]
    memory_bytes: tuple[int, ...]
    summed_s: float = 0.0
    moving_s: tuple[float, ...] = ()
    __pydantic_config__ = STRICT


@dataclass(frozen=True)
class Gathered:
    """An operator that runs on the whole of inputs that lie on parts: its function, the
    shape it gives, bytes sent.
    """

    name: str
    function: str
    shape: tuple[int, ...]
    sent_bytes: int
    __pydantic_config__ = STRICT


def _makes_sense(op: Conv | Linear) -> bool:
    """Whether the numbers that a file gives for an operator are such as a layer has."""
    if isinstance(op, Linear):
        return min(op.x_shape, default=-1) >= 0 and op.features >= 0
    s = op.spec
    by_dim = (s.size, s.kernel, s.stride, s.padding, s.dilation)
    alike = len(s.size) >= 1 and len({len(numbers) for numbers in by_dim}) == 1
    return (
        alike
        and min(s.N, *s.size) >= 0
        and min(s.C, s.K, *s.kernel, *s.stride, *s.dilation) >= 1
    )


@dataclass(frozen=True)
class Plan:
    """``layers`` by module name. ``alternatives`` has the predicted seconds of what
    else could have been done.

    ``estimated``: nothing was measured, the profile came from data sheets. ``tiles``
    are the profile's. ``gathers``: the operators that a better rule or another split
    could keep on parts, those that send most first.
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
    gathers: tuple[Gathered, ...] = ()
    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        for name, layer in self.layers.items():
            try:
                if not _makes_sense(layer.op):
                    raise ValueError(
                        f"{layer.op} is no operator: its shapes do not fit together"
                    )
                layer.op.check(layer.split, self.world)
            except ValueError as e:
                raise PlanError(f"layer {name!r}: {e}") from e
            self._check_length(
                f"layer {name!r}", layer.forward_s, layer.backward_s, empty=True
            )
        if (p := self.predicted) is not None:
            self._check_length(
                "predicted", p.busy_s, p.memory_bytes, p.sent_bytes, *p.sent_bytes
            )
            self._check_length("predicted", p.moving_s, empty=True)

    def _check_length(self, what: str, *by_rank: Sized, empty: bool = False) -> None:
        if wrong := {len(x) for x in by_rank} - (
            {self.world} | ({0} if empty else set())
        ):
            raise PlanError(
                f"{what} has {min(wrong)} numbers for {self.world} devices; give one for each"
            )

    @property
    def world(self) -> int:
        return len(self.devices)

    @property
    def splits(self) -> Mapping[str, Split]:
        return MappingProxyType(
            {name: layer.split for name, layer in self.layers.items()}
        )

    @property
    def digest(self) -> str:
        """What ranks compare before they act on a plan: the number of ranks, and all
        that decides what moves when.
        """
        layers = (
            (n, x.split, (x.fusible, x.chunks)) for n, x in sorted(self.layers.items())
        )
        said = [str(self.world), *(f"{n}={s}{rest}" for n, s, rest in layers)]
        return hashlib.sha256("\n".join(said).encode()).hexdigest()[:16]

    def with_splits(self, splits: Mapping[str, Split]) -> Plan:
        """The plan with other splits for the layers named. Predictions, no longer true,
        are dropped.

        Raises `PlanError` for a layer that the plan does not know and a split that does
        not fit its layer.
        """
        unknown = sorted(splits.keys() - self.layers.keys())
        if unknown:
            raise PlanError(
                f"the plan has no layer {', '.join(map(repr, unknown))}; it has {few(self.layers)}"
            )
        layers = {
            n: LayerPlan(x.op, splits.get(n, x.split), fusible=x.fusible)
            for n, x in self.layers.items()
        }
        return replace(
            self,
            layers=layers,
            chosen="by hand",
            predicted=None,
            alternatives=None,
            gathers=(),
        )

    def save(self, path: str | Path) -> None:
        """Writes the plan file, atomically."""
        json_files.save(path, "plan", VERSION, self)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Raises `PlanError`, naming the key, for a file that is not a plan of this version."""
        return json_files.load(path, "plan", VERSION, Plan, PlanError)

    @staticmethod
    def schema() -> json_files.Document:
        """The JSON schema of a plan file."""
        return json_files.schema("plan", VERSION, Plan)
