"""The only stopwatch: operators and whole steps, measured while all ranks are at work, and one rank after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hetconv.cost import arithmetic, operator_key
from hetconv.emulate import DeviceName
from hetconv.profile import Alone, DeviceModel, OperatorModel
from hetconv.transport import Team, objects_of_all, team_of

from . import fit
from .machine import conditions, identity, memory_bytes
from .others import Call, Other
from .sampling import Passes, Run, sampled
from .subjects import AXES, Layer, Subject, work

SHORT, SHORT_ON_GPU = 2e-4, 2e-3  # seconds that a sample lasts at least, of calls one after the other
MOST_CALLS = 20
MOST_ROUNDS = 31
UNKNOWN = 1e9  # operations per second, where no layer was measured
Step = Callable[[], Any]
Samples = dict[str, dict[float, Passes]]
"""By a subject's key, seconds of its passes by share, or by bytes."""


def timed(action: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call, with the device idle before and after."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def stopwatch(call: Callable[[], Any], device: torch.device) -> Callable[[], float]:
    """Gives seconds of one call whenever it is called, from a few in a row where one is too short for the clock.

    On a GPU they are its own, between events, without what the host needs to launch them.
    """
    calls = 0

    def seconds() -> float:
        nonlocal calls
        if not calls:
            once = timed(call, device)
            least = SHORT_ON_GPU if device.type == "cuda" else SHORT
            calls = min(max(int(least / once), 1), MOST_CALLS)
            return once
        if device.type == "cuda":
            return _between_events(call, calls)
        return timed(lambda: [call() for _ in range(calls)], device) / calls

    return seconds


def call_seconds(call: Callable[[], Any], device: torch.device, samples: int = 5) -> float:
    """Median seconds of a short call, see `stopwatch`."""
    seconds = stopwatch(call, device)
    for _ in range(2):
        seconds()
    return median(seconds() for _ in range(samples))


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
    subjects: Sequence[Subject], device: torch.device, enough: Callable[[], bool]
) -> Iterator[tuple[str, dict[float, Passes]]]:
    """(key, share or bytes -> seconds of the passes) of each subject; nothing where the memory does not suffice.

    Collective. Stops early, after the first, once ``enough`` says so on rank 0.
    """
    for i, subject in enumerate(subjects):
        if told(enough()) and i:
            return
        yield subject.key, (_in_turn if subject.alone else _together)(subject, device)


def _together(subject: Subject, device: torch.device) -> dict[float, Passes]:
    """While all ranks are at work on the same: each takes as many shares and repeats as its own curve wants.

    No rank waits for another while it measures. One that is done goes on with what it ran last until all are, so that
    nobody is left with more of the memory's bandwidth, or of the power, than there is in a plan's step, in which all
    are done at about the same time, whatever their shares.
    """
    last: list[Run] = []

    def passes(run: Run) -> Passes:
        last[:] = [run]
        return _passes(run, device)

    found = _fitting(lambda: subject.samples(passes, device))
    others = dist.barrier(group=team_of().control, async_op=True)
    assert others is not None
    while last and not others.is_completed():
        timed(last[0].forward, device)
    others.wait()
    return found


def _in_turn(subject: Subject, device: torch.device) -> dict[float, Passes]:
    """One rank after the other, while all others rest."""
    team, found = team_of(), {}
    for rank in range(team.size):
        if rank == team.rank:
            found = _fitting(lambda: subject.samples(lambda run: _passes(run, device), device))
        dist.barrier(group=team.control)
    return found


def _fitting(samples: Callable[[], dict[float, Passes]]) -> dict[float, Passes]:
    try:
        return samples()
    except torch.OutOfMemoryError:
        return {}


def _passes(run: Run, device: torch.device) -> Passes:
    forward, backward = (sampled(stopwatch(call, device)) for call in (run.forward, run.backward))
    less = median(forward) if run.both else 0.0
    return forward, [max(seconds - less, 0.0) for seconds in backward]


def told(word: Any, source: int = 0) -> Any:
    """What rank ``source`` says, on every rank."""
    words = [word]
    dist.broadcast_object_list(words, group=team_of().control, group_src=source)
    return words[0]


def copy_bandwidth(device: torch.device, numel: int = 1 << 22) -> float:
    """Bytes read and written per second by an elementwise operator on a large tensor."""
    x, y = torch.randn(numel, device=device), torch.empty(numel, device=device)
    dist.barrier()
    torch.relu(x)
    return 8 * numel / median(timed(lambda: torch.clamp_min(x, 0, out=y), device) for _ in range(5))


def paired(
    steps: Mapping[str, Step], rounds: int, device: torch.device, longest: float = 0.0
) -> dict[str, list[float]]:
    """`one_round` after the other, once every step has run.

    So many ``rounds``, and more, up to `MOST_ROUNDS`, until all have together taken ``longest`` seconds.
    """
    for step in steps.values():
        step()
    found: list[dict[str, float]] = []
    while len(found) < rounds or (
        len(found) < MOST_ROUNDS and sum(sum(one.values()) for one in found) < longest  # alike on all ranks
    ):
        found.append(one_round(steps, device, team_of()))
    return {name: [seconds[name] for seconds in found] for name in steps}


def one_round(steps: Mapping[str, Step], device: torch.device, team: Team) -> dict[str, float]:
    """Seconds of each step, one after the other, on every rank alike: until the last rank is done."""
    own = {name: until_all_are_done(step, device, team) for name, step in steps.items()}
    each = objects_of_all(team, own)
    return {name: max(of_rank[name] for of_rank in each) for name in steps}


def until_all_are_done(step: Step, device: torch.device, team: Team) -> float:
    """Seconds of a step that all ranks begin together."""

    def together() -> None:
        timed(step, device)
        dist.barrier(team.group)

    dist.barrier(team.group)
    return timed(together, device)


def device_model(
    name: DeviceName,
    device: torch.device,
    samples: Samples,
    subjects: Sequence[Subject],
    bandwidth: float,
) -> DeviceModel:
    """The model of this rank's device from its samples; the roofline is fitted to the whole operators among them."""
    kind: Any = device.type
    on_parts, alone = (_fitted(samples, [s for s in subjects if s.alone is a], kind == "cuda") for a in (False, True))
    bare = {(s.op, s.dtype): on_parts.bare[s.key] for s in subjects if isinstance(s, Layer) and s.key in on_parts.bare}
    work_of: dict[str, list[tuple[float, float]]] = {}
    for (op, dtype), (forward, _) in bare.items():
        rate = arithmetic(op, dtype) if kind == "cuda" else dtype
        work_of.setdefault(rate, []).append((work(op), forward))
    rates = {rate: fit.roofline(measured) for rate, measured in work_of.items()}
    by_itself = {
        operator_key(s.op, axis, s.dtype): fit.whole(alone.layers[s.key])
        for s in subjects if isinstance(s, Layer) and s.key in alone.layers
        for axis in AXES
    }  # fmt: skip
    return DeviceModel(
        str(name), kind, memory_bytes(device), rates or {"float32": UNKNOWN}, bandwidth, on_parts.host_s[0],
        fit.backward_ratio(*zip(*bare.values(), strict=True)) if bare else 2.0, name.emulated, on_parts.layers,
        identity(name), conditions(device), on_parts.host_s[1], on_parts.others,
        Alone(by_itself, alone.others, *alone.host_s) if by_itself else None,
    )  # fmt: skip


class _Fitted(NamedTuple):
    """Of one regime, by key: layers, as calls by the host; their kernels ``bare`` and whole; the others."""

    host_s: tuple[float, float]
    layers: dict[str, OperatorModel]
    bare: dict[str, tuple[float, float]]
    others: dict[str, OperatorModel]


def _fitted(samples: Samples, subjects: Sequence[Subject], ahead: bool) -> _Fitted:
    known = [subject for subject in subjects if samples.get(subject.key)]
    models = {subject.key: fit.operator(samples[subject.key]) for subject in known}
    host_s = next((fit.whole(models[s.key]) for s in known if isinstance(s, Call)), (0.0, 0.0))
    kernels = {s.key: models[s.key] for s in known if isinstance(s, Layer)}
    return _Fitted(
        host_s,
        {key: fit.called(model, host_s, ahead) for key, model in kernels.items()},
        {key: fit.whole(model) for key, model in kernels.items()},
        {f"{s.kind} {s.dtype}": models[s.key] for s in known if isinstance(s, Other)},
    )
