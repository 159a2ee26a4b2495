"""Plans and profiles to report on, made without hardware."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from hetconv.autotune.measure.sampling import Passes
from hetconv.autotune.search.record import Samples
from hetconv.cost.operator_cost import operator_key
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.device_model import Curve, DeviceModel, OperatorModel
from hetconv.schemas.plan import Plan
from hetconv.schemas.timeline import Event, Timeline
from hetconv.sharding.layer_rules import Conv
from hetconv.tracing.graph import Graph
from tests.cli.test_show import plan as shown_plan

SHARES = 0.125, 0.25, 0.5, 1.0
EVENTS = (
    Event(0, "compute", "one", False, False, 0.0, 0.5),
    Event(1, "transfer", "one", False, True, 0.0, 0.5),
    Event(1, "transfer", "one", False, False, 0.5, 0.625),
    Event(1, "compute", "two", True, False, 0.25, 1.0),
)


def plan() -> Plan:
    """A plan of round numbers for two devices, a and b."""
    bare = shown_plan()
    memory = replace(bare.layers["two"], memory_bytes=(6_000_000, 2_000_000))
    layers = {**bare.layers, "two": memory}
    return replace(bare, layers=layers, timeline=Timeline.of(EVENTS))


def cluster(*names: str) -> ClusterProfile:
    """Devices of these names, all as a CPU's data sheet says."""
    bare = ClusterProfile.from_devices(["cpu"] * len(names), link="host")
    devices = (replace(d, name=n) for d, n in zip(bare.devices, names, strict=True))
    return replace(bare, devices=tuple(devices))


def measured(profile: ClusterProfile, graph: Graph, seed: int = 0) -> ClusterProfile:
    """The profile, as if all convolutions had been measured along all axes on all devices."""
    keys = {
        operator_key(op, axis, "float32"): op
        for op in graph.layers.values()
        if isinstance(op, Conv)
        for axis in ("pixels", "filters", "channels")
    }
    draw = random.Random(seed)

    def with_curves(device: DeviceModel) -> DeviceModel:
        operators = {
            key: OperatorModel(*(_curve(device, op, draw, ratio) for ratio in (1, 2)))
            for key, op in keys.items()
        }
        return replace(device, operators=operators)

    devices = tuple(map(with_curves, profile.devices))
    return replace(profile, devices=devices, estimated=False)


def _curve(device: DeviceModel, op: Conv, draw: random.Random, ratio: int) -> Curve:
    s = op.spec
    flops = 2.0 * s.N * s.K * s.C * s.size[0] * s.size[1]
    whole_s = ratio * flops / device.rate("float32") + 1e-6
    return Curve(SHARES, tuple(x * whole_s * draw.uniform(1.0, 1.1) for x in SHARES))


def samples(seconds: float, slow: float = 1.0) -> Samples:
    """Three repeats at two shares, the last of which may be an outlier."""
    return {
        s: Passes([seconds * s, seconds * s, seconds * s * slow], [2 * seconds * s] * 3)
        for s in (0.5, 1.0)
    }


def curves_of(names: Sequence[str], seconds: float = 1e-3) -> OperatorModel:
    """One operator's curves for devices of any names."""
    return OperatorModel(
        Curve((0.5, 1.0), (seconds / 2, seconds)),
        Curve((0.5, 1.0), (seconds, 2 * seconds)),
    )
