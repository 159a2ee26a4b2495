"""The only stopwatch: operators, links and whole steps, measured while all ranks are at work."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hetconv import kernels
from hetconv.cost import operator_key
from hetconv.emulate import DeviceName, stretched
from hetconv.profile import Axis, DeviceModel, LinkModel, OperatorModel
from hetconv.rules import Conv, Linear
from hetconv.spec import ConvSpec
from hetconv.transport import Round, Team, team_of

from . import fit

SHARES = (0.125, 0.25, 0.5, 0.75, 1.0)
REPEATS = 5
Samples = dict[str, dict[float, tuple[list[float], list[float]]]]


def timed(action: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call, with the device idle before and after."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def call_seconds(call: Callable[[], Any], device: torch.device, samples: int = 5) -> float:
    """Median seconds of a short call: on a GPU its own, between events, without what the host needs to launch it."""
    for _ in range(2):
        once = timed(call, device)
    if device.type != "cuda":
        return median(timed(call, device) for _ in range(samples))
    calls = min(max(int(2e-3 / once), 1), 20)
    return median(_between_events(call, calls) for _ in range(samples))


def _between_events(call: Callable[[], Any], calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(2_000_000)  # cycles, about a millisecond in which the host gets ahead
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / calls


def operator_samples(
    ops: Sequence[tuple[Conv | Linear, Axis]], device: torch.device, enough: Callable[[], bool]
) -> Iterator[tuple[str, dict[float, tuple[list[float], list[float]]]]]:
    """(key, share -> (forward seconds, backward seconds)) of each operator, all ranks at the same one at the same time.

    Stops early once ``enough`` says so on rank 0.
    """
    for op, axis in ops:
        if told(enough()):
            return
        found = {}
        for share in SHARES:
            run = _layer(op, axis, share, device)
            if run is not None:
                dist.barrier()
                found[run[0]] = _repeat(run[1], run[2], device)
        yield operator_key(op, axis), found


def told(word: Any, source: int = 0) -> Any:
    """What rank ``source`` says, on every rank."""
    words = [word]
    dist.broadcast_object_list(words, group=team_of().control, group_src=source)
    return words[0]


def _repeat(
    forward: Callable[[], Any], backward: Callable[[], Any], device: torch.device
) -> tuple[list[float], list[float]]:
    forward(), backward()
    return [timed(forward, device) for _ in range(REPEATS)], [timed(backward, device) for _ in range(REPEATS)]


def _layer(
    op: Conv | Linear, axis: Axis, share: float, device: torch.device
) -> tuple[float, Callable[[], Any], Callable[[], Any]] | None:
    """(share that integers allow, forward, backward) of a part of a layer, as the runtime runs it; None if empty."""
    if isinstance(op, Linear):
        return _linear(op, axis, share, device)
    s = op.spec
    extent = s.K // s.groups if axis == "filters" else s.y_shape[2]
    part = max(round(extent * share), 1)
    local = replace(s, K=part * s.groups) if axis == "filters" else _rows(s, part)
    if local.y_shape[2] < 1 or (part < extent and part / extent > share * 1.5):
        return None
    dtype, memory = getattr(torch, s.dtype), kernels.CHANNELS_LAST.get(s.spatial_dims + 2, torch.contiguous_format)
    x, w, g = (
        torch.randn(shape, dtype=dtype, device=device).to(memory_format=memory)
        for shape in (local.x_shape, local.w_shape, local.y_shape)
    )
    args = (s.stride, local.padding, s.dilation, s.groups)
    wanted = (s.C > 4, True, True)  # nobody asks for the gradient of an image
    return (
        part / extent,
        lambda: stretched(lambda: kernels.conv_forward(x, w, None, *args), device),
        lambda: stretched(lambda: kernels.conv_backward(g, x, w, *args, wanted), device),
    )


def _rows(s: ConvSpec, rows: int) -> ConvSpec:
    """The convolution that gives this many output rows (of the first spatial dimension), padded as the whole one is."""
    (top, bottom), reach = s.padding[0], s.dilation[0] * (s.kernel[0] - 1) + 1
    return replace(s, size=(max((rows - 1) * s.stride[0] + reach - top - bottom, 1), *s.size[1:]))


def _linear(
    op: Linear, axis: Axis, share: float, device: torch.device
) -> tuple[float, Callable[[], Any], Callable[[], Any]] | None:
    rows, features = prod(op.x_shape[:-1]), op.features
    extent = features if axis == "filters" else rows
    part = max(round(extent * share), 1)
    if part < extent and part / extent > share * 1.5:
        return None
    rows, features = (rows, part) if axis == "filters" else (part, features)
    x, w = torch.randn(rows, op.x_shape[-1], device=device), torch.randn(features, op.x_shape[-1], device=device)
    g = torch.randn(rows, features, device=device)
    return (
        part / extent,
        lambda: stretched(lambda: F.linear(x, w), device),
        lambda: stretched(lambda: (g @ w, g.t() @ x), device),
    )


def work(op: Conv | Linear) -> float:
    """Floating-point operations of the forward pass."""
    return float(op.spec.flops if isinstance(op, Conv) else 2 * prod(op.x_shape) * op.features)


def copy_bandwidth(device: torch.device, numel: int = 1 << 22) -> float:
    """Bytes read and written per second by an elementwise operator on a large tensor."""
    x, y = torch.randn(numel, device=device), torch.empty(numel, device=device)
    dist.barrier()
    torch.relu(x)
    return 8 * numel / median(timed(lambda: torch.clamp_min(x, 0, out=y), device) for _ in range(5))


def link_models(team: Team, device: torch.device, sizes: Sequence[int] = (64, 1 << 22)) -> dict[str, LinkModel]:
    """Latency and bandwidth of every pair, from halves of round trips while the other ranks wait."""
    found: dict[str, LinkModel] = {}
    for b in range(team.size):
        for a in range(b):
            samples = {size: _round_trips(team, a, b, size, device) for size in sizes}
            dist.barrier(team.group)
            found[f"{a}-{b}"] = fit.link(samples)
    for a in range(team.size):  # only a pair knows its own times: all take those of its lower rank
        found |= {pair: link for pair, link in told(found, a).items() if pair.startswith(f"{a}-")}
    return found


def _round_trips(team: Team, a: int, b: int, size: int, device: torch.device) -> list[float]:
    """Half of the seconds of each there-and-back between two ranks."""
    message, times = torch.zeros(size // 4, device=device), []
    shape = tuple(message.shape)
    for _ in range(12):
        if team.rank not in (a, b):
            Round(team, message, {}, {}).wait()
            Round(team, message, {}, {}).wait()
            times.append(1.0)
            continue
        other, first = (b, True) if team.rank == a else (a, False)

        def there_and_back(other: int = other, first: bool = first) -> None:
            out: Mapping[int, Tensor] = {other: message}
            into = {other: shape}
            Round(team, message, out if first else {}, {} if first else into).wait()
            Round(team, message, {} if first else out, into if first else {}).wait()

        times.append(timed(there_and_back, device) / 2)
    return times[2:]


def paired(steps: Mapping[str, Callable[[], Any]], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of each step, in turn within each round, on every rank alike: until the last rank is done."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(rounds):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            timed(step, device)
            dist.barrier()
            times[name].append(time.perf_counter() - start)
    gathered: list[Any] = [times] * dist.get_world_size()
    dist.all_gather_object(gathered, times)
    return {n: [max(t[n][i] for t in gathered) for i in range(rounds)] for n in steps}


def device_model(
    name: DeviceName,
    device: torch.device,
    samples: Samples,
    ops: Sequence[tuple[Conv | Linear, Axis]],
    bandwidth: float,
) -> DeviceModel:
    """The model of this rank's device from its samples; the roofline is fitted to the whole operators among them."""
    models = {
        key: OperatorModel(
            fit.curve({s: f for s, (f, _) in by_share.items()}), fit.curve({s: b for s, (_, b) in by_share.items()})
        )
        for key, by_share in samples.items()
        if by_share
    }
    whole = [(work(op), models[k]) for op, axis in ops if (k := operator_key(op, axis)) in models]
    dtype = next((op.spec.dtype for op, _ in ops if isinstance(op, Conv)), "float32")
    rate = fit.roofline([(flops, model.forward.at(1.0)) for flops, model in whole])
    ratio = fit.backward_ratio([m.forward.at(1.0) for _, m in whole], [m.backward.at(1.0) for _, m in whole])
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    kind: Any = device.type
    return DeviceModel(str(name), kind, memory, {dtype: rate}, bandwidth, 0.0, ratio, name.emulated, models)


def fingerprint(device: torch.device) -> str:
    """What a profile is bound to: the device and the versions that ran on it."""
    if device.type == "cuda":
        p = torch.cuda.get_device_properties(device)
        return f"{p.name} {getattr(p, 'uuid', '')} cuda {torch.version.cuda}, torch {torch.__version__}{_triton()}"
    return f"{platform.processor() or platform.machine()} {os.cpu_count()} cores, torch {torch.__version__}{_triton()}"


def _triton() -> str:
    try:
        from importlib.metadata import version

        return f", triton {version('triton')}"
    except ImportError:
        return ""
