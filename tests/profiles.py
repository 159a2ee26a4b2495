"""Made-up profiles of devices and hosts, measured at two times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetconv.schemas.cluster_profile import ClusterProfile, nodes_of
from hetconv.schemas.device_model import Curve, DeviceModel, LinkModel, OperatorModel
from hetconv.schemas.provenance import DeviceIdentity, MeasurementConditions
from hetconv.schemas.tuning_results import TunedRatio

OLD, NEW = (
    MeasurementConditions(f"2026-11-{day}T12:00:00Z", "2.13.0", "3.7.1")
    for day in (20, 21)
)
BEFORE = replace(
    OLD, torch="2.11.0", triton="3.6.0"
)  # as old, and under other versions
A0, A1, B0 = (
    DeviceIdentity(host, "A100", f"GPU-{host}{i}")
    for host, i in (("a", 0), ("a", 1), ("b", 0))
)
CPU = DeviceIdentity("a", "EPYC", "2 threads")


def took(
    seconds: float, measured: MeasurementConditions | None = None
) -> OperatorModel:
    return OperatorModel(Curve((1.0,), (seconds,)), Curve((1.0,), (seconds,)), measured)


def profile(
    identities: Sequence[DeviceIdentity],
    at: MeasurementConditions,
    rate: float = 1e12,
    **operators: float,
) -> ClusterProfile:
    """Devices that were all measured at one time, at one ``rate``; seconds of operators by key."""
    models = {key: took(seconds) for key, seconds in operators.items()}
    devices = tuple(
        DeviceModel(
            f"{'cpu' if i == CPU else 'cuda'}:{r}",
            "cpu" if i == CPU else "cuda",
            1e9,
            {"float32": rate},
            1e10,
            operators=models,
            identity=i,
            measured=at,
        )
        for r, i in enumerate(identities)
    )
    world = len(identities)
    links = {
        f"{a}-{b}": LinkModel(rate * 1e-20, 1e-9, at)
        for b in range(world)
        for a in range(b)
    }
    return ClusterProfile(devices, links, nodes=nodes_of(devices))


def tuned(at: MeasurementConditions, weights: tuple[int, ...]) -> TunedRatio:
    return TunedRatio("g", "train", "height", weights, 1.0, weights, 1.0, 3, at)
