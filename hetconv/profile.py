"""ClusterProfile: what was measured of a cluster's devices and links, or estimated from data sheets; one JSON file."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files as resources
from pathlib import Path
from typing import Any, Literal

from . import files
from .errors import ProfileError
from .spec import Conv2dSpec
from .tuned import TunedChunks, TunedTile

VERSION = 1
STRICT = {"extra": "forbid"}
Axis = Literal["pixels", "filters"]  # what a share is a share of: rows, columns or samples; filters or input channels
ACHIEVED = 0.5  # of a data sheet's peak, in a convolution; an estimate until something is measured


@dataclass(frozen=True)
class Curve:
    """Seconds as a piecewise-linear, non-decreasing function of the share in (0, 1]; nothing costs nothing."""

    shares: tuple[float, ...]
    seconds: tuple[float, ...]
    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.shares, self.shares[1:], strict=False))
        if not self.shares or len(self.shares) != len(self.seconds) or not rising or self.shares[0] <= 0:
            raise ProfileError("a curve needs rising positive shares and as many seconds")

    def at(self, share: float) -> float:
        if share <= 0:
            return 0.0
        x, y = self.shares, self.seconds
        if len(x) == 1:
            return y[0] * share / x[0]
        i = min(max(bisect_left(x, share), 1), len(x) - 1)
        slope = max((y[i] - y[i - 1]) / (x[i] - x[i - 1]), 0.0)
        return max(y[i - 1] + slope * (share - x[i - 1]), 0.0)


@dataclass(frozen=True)
class OperatorModel:
    """Measured seconds of one operator along one axis, forward and backward apart."""

    forward: Curve
    backward: Curve
    __pydantic_config__ = STRICT


@dataclass(frozen=True)
class DeviceModel:
    """One device. ``operators`` by operator and axis; what was not measured takes the roofline fitted to what was."""

    name: str
    kind: Literal["cpu", "cuda"]
    memory_bytes: float
    flops_per_s: Mapping[str, float]
    bytes_per_s: float
    overhead_s: float = 0.0
    backward_ratio: float = 2.0
    emulated: bool = False
    operators: Mapping[str, OperatorModel] = field(default_factory=dict)
    __pydantic_config__ = STRICT

    def roofline(self, flops: float, moved_bytes: float, dtype: str, backward: bool) -> float:
        """Seconds of an unmeasured operator: the longer of computing and moving, and what a call costs."""
        if flops + moved_bytes <= 0:
            return 0.0
        rate = self.flops_per_s.get(dtype) or self.flops_per_s.get("float32") or max(self.flops_per_s.values())
        once = max(flops / rate, moved_bytes / self.bytes_per_s) + self.overhead_s
        return once * (self.backward_ratio if backward else 1.0)


@dataclass(frozen=True)
class LinkModel:
    """A pair of devices: seconds = latency + bytes * seconds per byte."""

    latency_s: float
    s_per_byte: float
    __pydantic_config__ = STRICT


@dataclass(frozen=True)
class TunedRatio:
    """Proportions found by measuring whole steps of one model and mode, beside the computed ones; seconds a step."""

    graph: str
    mode: Literal["train", "infer"]
    kind: Literal["sample", "height", "width"]
    weights: tuple[int, ...]
    step_s: float
    computed_weights: tuple[int, ...]
    computed_step_s: float
    trials: int
    __pydantic_config__ = STRICT


@dataclass(frozen=True)
class ClusterProfile:
    """Devices in rank order, links by "low-high" ranks, tuned ratios, and the fingerprint of where it was measured.

    ``tiles``: of the kernels on its GPUs, for the shares that the tuned ratio gives them. ``chunks``: in how many a
    filter split is gathered while it is computed, where that was measured.
    """

    devices: tuple[DeviceModel, ...]
    links: Mapping[str, LinkModel]
    tuned: tuple[TunedRatio, ...] = ()
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    estimated: bool = False
    tiles: tuple[TunedTile, ...] = ()
    chunks: tuple[TunedChunks, ...] = ()
    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        wanted = {f"{a}-{b}" for b in range(len(self.devices)) for a in range(b)}
        if not self.devices or self.links.keys() != wanted:
            raise ProfileError(
                f"a profile of {len(self.devices)} devices needs links {sorted(wanted)}, but has {sorted(self.links)}"
            )

    @property
    def world(self) -> int:
        return len(self.devices)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(d.name for d in self.devices)

    def link(self, a: int, b: int) -> LinkModel:
        return self.links[f"{min(a, b)}-{max(a, b)}"]

    def chunks_of(self, spec: Conv2dSpec, sizes: Sequence[int]) -> int:
        """Of the batch, for a convolution cut by filter in these sizes: one unless more were measured to be faster."""
        return next((c.chunks for c in self.chunks if (c.spec, c.sizes) == (spec, tuple(sizes))), 1)

    def save(self, path: str | Path) -> None:
        """Writes the profile, atomically."""
        files.save(path, "profile", VERSION, self)

    @staticmethod
    def load(path: str | Path) -> ClusterProfile:
        """Raises `ProfileError`, naming the key, for a file that is not a profile of this version."""
        return files.load(path, "profile", VERSION, ClusterProfile, ProfileError)

    @staticmethod
    def from_devices(names: Sequence[str], *, link: str = "pcie4-x16") -> ClusterProfile:
        """A profile without hardware, from the data sheets in ``devices.json``; marked as estimated.

        ``names`` are catalogued devices, one per rank, slowed as in ``cpu@0.5`` if wanted; ``link`` joins each pair.
        Raises `ProfileError` for a name that is not catalogued.
        """
        catalogue = _catalogue()
        if link not in catalogue["links"]:
            raise ProfileError(f"link {link!r} is not catalogued; choose one of {', '.join(catalogue['links'])}")
        wire = catalogue["links"][link]
        model = LinkModel(wire["latency_s"], 1 / wire["bytes_per_s"])
        pairs = {f"{a}-{b}": model for b in range(len(names)) for a in range(b)}
        return ClusterProfile(tuple(map(_catalogued, names)), pairs, estimated=True, fingerprint={"link": link})


@cache
def _catalogue() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(resources("hetconv").joinpath("devices.json").read_text(encoding="utf-8"))
    return found


def _catalogued(name: str) -> DeviceModel:
    base, at, speed = name.partition("@")
    sheet = _catalogue()["devices"].get(base)
    try:
        scale = float(speed) if at else 1.0
    except ValueError:
        scale = 0.0
    if sheet is None or not 0 < scale <= 1:
        known = ", ".join(_catalogue()["devices"])
        raise ProfileError(f"device {name!r} is not catalogued; choose one of {known} (with @0.5 for half its speed)")
    flops = {dtype: rate * ACHIEVED * scale for dtype, rate in sheet["flops_per_s"].items()}
    return DeviceModel(
        name, sheet["kind"], sheet["memory_bytes"], flops, sheet["bytes_per_s"] * scale, 5e-6, emulated=scale < 1
    )
