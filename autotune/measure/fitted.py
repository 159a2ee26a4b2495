"""The model of a device, from samples of its operators. No clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hetconv.autotune.launch.throttle import DeviceName
from hetconv.cost.operator_cost import arithmetic, operator_key
from hetconv.schemas.cluster_profile import Alone, DeviceModel, OperatorModel

from . import fit
from .device_info import conditions, identity, memory_bytes
from .layer_workloads import AXES, Layer, Subject, work
from .other_workloads import Call, Other
from .sampling import Steps
from .timer import Samples

UNKNOWN = 1e9  # operations per second, where no layer was measured


def device_model(
    name: DeviceName,
    device: torch.device,
    samples: Samples,
    subjects: Sequence[Subject],
    bandwidth: float,
    resting: float,
) -> DeviceModel:
    """The model of this rank's device from its samples; the roofline is fitted to the whole operators among them.

    All as on the device when it is as fast as it mostly was. ``resting``: see `measure`.
    """
    kind: Any = device.type
    pulse_s = fit.usual_pulse(samples.get(s.key, {}) for s in subjects if not s.alone)
    by_themselves = [samples.get(s.key, {}) for s in subjects if s.alone]
    alone_s = fit.pulse_at_rest(pulse_s, resting, by_themselves) if pulse_s is not None else None
    on_parts, alone = (
        _fitted(samples, [s for s in subjects if s.alone is a], device, own_s)
        for a, own_s in ((False, pulse_s), (True, alone_s))
    )
    bare = {(s.op, s.dtype): on_parts.bare[s.key] for s in subjects if isinstance(s, Layer) and s.key in on_parts.bare}
    work_of: dict[str, list[tuple[float, float]]] = {}
    for (op, dtype), (forward, _) in bare.items():
        rate = arithmetic(op, dtype) if kind == "cuda" else dtype
        work_of.setdefault(rate, []).append((work(op), forward))
    rates = {rate: fit.roofline(measured) for rate, measured in work_of.items()}
    by_itself = {
        operator_key(s.op, axis, s.dtype): _rested(s, alone, on_parts)
        for s in subjects if isinstance(s, Layer) and s.key in alone.layers
        for axis in AXES
    }  # fmt: skip
    return DeviceModel(
        str(name), kind, memory_bytes(device), rates or {"float32": UNKNOWN}, bandwidth, on_parts.host_s[0],
        fit.backward_ratio(*zip(*bare.values(), strict=True)) if bare else 2.0, name.emulated, on_parts.layers,
        identity(name), conditions(device), on_parts.host_s[1], on_parts.others,
        Alone(by_itself, alone.others, *alone.host_s, pulse_s=alone_s) if by_itself else None, pulse_s=pulse_s,
    )  # fmt: skip


class _Fitted(NamedTuple):
    """Of one regime, by key: layers, as calls by the host; their kernels ``bare`` and whole; the others."""

    host_s: tuple[float, float]
    layers: dict[str, OperatorModel]
    bare: dict[str, tuple[float, float]]
    others: dict[str, OperatorModel]


def _fitted(samples: Samples, subjects: Sequence[Subject], device: torch.device, pulse_s: float | None) -> _Fitted:
    known, ahead = [subject for subject in subjects if samples.get(subject.key)], device.type == "cuda"
    models = {s.key: fit.operator(fit.at_pulse(samples[s.key], pulse_s), _rising(s), _steps(s, device)) for s in known}
    host_s = next((fit.whole(models[s.key]) for s in known if isinstance(s, Call)), (0.0, 0.0))
    kernels = {s.key: models[s.key] for s in known if isinstance(s, Layer)}
    return _Fitted(
        host_s,
        {key: fit.called(model, host_s, ahead) for key, model in kernels.items()},
        {key: fit.whole(model) for key, model in kernels.items()},
        {f"{s.kind} {s.dtype}": models[s.key] for s in known if isinstance(s, Other)},
    )


def _rising(subject: Subject) -> bool:
    """Whether more of it never takes less: kernels may take whole blocks of filters or channels faster than a part."""
    return not isinstance(subject, Layer) or subject.axis == "pixels"


def _steps(subject: Subject, device: torch.device) -> Steps | None:
    return subject.steps(device) if isinstance(subject, Layer) else None


def _rested(layer: Layer, alone: _Fitted, on_parts: _Fitted) -> tuple[float, float]:
    """Seconds of the whole layer while others rest: no more than while all are at work, unless noise has it so."""
    own, beside = fit.whole(alone.layers[layer.key]), on_parts.layers.get(operator_key(layer.op, AXES[0], layer.dtype))
    forward, backward = fit.whole(beside) if beside is not None else own
    return min(own[0], forward), min(own[1], backward)
