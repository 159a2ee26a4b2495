"""The only stopwatch, and workloads that are timed while all ranks are at work."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import inf
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from hetconv.comm.rank_group import (
    all_gather_object,
    rank_group_of,
    translate_backend_errors,
)
from hetconv.runtime.throttle import discard_core_waits
from hetconv.torch_internals import gpu_sleep

from .barrier import barrier
from .cpu_share import clock_and_factor
from .layer_workloads import LayerWorkload, Workload
from .other_workloads import NonLayerOperator
from .sampling import PassCalls, Passes, sample, uncertainties

try:
    import resource
except ImportError:  # not on Unix
    resource = None  # type: ignore[assignment]

MIN_SAMPLE_S, MIN_GPU_SAMPLE_S = 2e-4, 2e-3  # of calls one after the other
MAX_CALLS_PER_SAMPLE = 20
MAX_NEW_PAGES = 256  # of memory that the system gives to a sample that counts
MAX_DISCARDED_SAMPLES = 20
GPU_SLEEP_CYCLES = 2_000_000  # about a millisecond, in which the host gets ahead

Samples = dict[str, dict[float, Passes]]
"""By a workload's key, its passes by share, or by bytes."""

Clock = Callable[[], float]


def pages_taken() -> int:
    """Returns how many pages of memory the system has given this process so far.

    It is 0 where the system does not say.
    """
    if resource is None:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def timed(
    action: Callable[[], Any], device: torch.device, clock: Clock = time.perf_counter
) -> float:
    """Returns the seconds of one call, with the device idle before and after."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    discard_core_waits()
    start = clock()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - start


def stopwatch(
    call: Callable[[], Any], device: torch.device, clock: Clock = time.perf_counter
) -> Callable[[], float]:
    """Makes a function that returns the seconds of one call whenever it is called.

    Where one call is too short for the clock, it makes a few in a row. On a GPU the
    seconds are its own, between events, without what the host needs to launch kernels.
    Calls for which the system had to give memory do not count, but for too many: in a
    step they take what earlier ones freed, and what is new is cleared first, which
    takes longer than they do.

    Args:
        call: what is timed.
        device: where it computes.
        clock: returns seconds; not asked on a GPU after the first call.
    """
    calls, discarded = 0, 0

    def without_new_memory(action: Callable[[], Any]) -> float:
        nonlocal discarded
        while True:
            before = pages_taken()
            seconds = timed(action, device, clock)
            new = pages_taken() - before
            if new < MAX_NEW_PAGES or discarded == MAX_DISCARDED_SAMPLES:
                return seconds
            discarded += 1

    def repeat() -> None:
        for _ in range(calls):
            call()

    def seconds() -> float:
        nonlocal calls
        if not calls:
            once = without_new_memory(call)
            shortest = MIN_GPU_SAMPLE_S if device.type == "cuda" else MIN_SAMPLE_S
            calls = min(max(int(shortest / once), 1), MAX_CALLS_PER_SAMPLE)
            return once
        if device.type == "cuda":
            return _between_events(repeat) / calls
        return without_new_memory(repeat) / calls

    return seconds


def call_seconds(
    call: Callable[[], Any], device: torch.device, samples: int = 5
) -> float:
    """Returns the median seconds of a short call, see `stopwatch`."""
    seconds = stopwatch(call, device)
    for _ in range(2):
        seconds()
    return median(seconds() for _ in range(samples))


def _between_events(action: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    gpu_sleep(GPU_SLEEP_CYCLES)
    start.record()
    action()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def time_workloads(
    workloads: Sequence[Workload],
    device: torch.device,
    enough: Callable[[], bool],
    backward: bool = True,
) -> Iterator[tuple[str, dict[float, Passes]]]:
    """Times workloads while all ranks are at work on the same one. Collective.

    Args:
        workloads: what to time, in this order on every rank.
        device: the device of this rank.
        enough: asked on rank 0 before each workload but the first: whether to stop.
        backward: whether that pass matters. Otherwise it is timed of whole layers
            alone: it takes twice as long as forward, and time may be short.

    Yields:
        The key of each workload and its passes by share or bytes; no passes where the
        memory does not suffice.
    """
    for i, workload in enumerate(workloads):
        if broadcast_object(enough()) and i:
            return
        yield (
            workload.key,
            _time_together(workload, device, (), lambda calls: backward or calls.whole),
        )


def most_uncertain(
    workloads: Sequence[Workload],
    samples: Samples,
    device: torch.device,
    backward: bool,
) -> list[Workload]:
    """Lists what is to be timed again, alike on all ranks. Collective.

    Args:
        workloads: all workloads of the model.
        samples: the passes of this rank so far; of some workloads there may be none.
        device: the device of this rank.
        backward: whether that pass matters.

    Returns:
        Layers that lack some of their `LayerWorkload.fine_shares`, which is only known
        once all have been timed; then what may be most off in a step, on any rank.
    """
    timed_once = [workload for workload in workloads if workload.key in samples]
    own_s = []
    for workload in timed_once:
        known = samples[workload.key]
        uncertain = uncertainties(known, backward).values()
        missing = _missing_shares(workload, known, device)
        own_s.append(inf if missing else workload.count * max(uncertain, default=0.0))
    of_ranks = all_gather_object(rank_group_of(), own_s)
    seconds = [max(of_workload) for of_workload in zip(*of_ranks, strict=True)]
    order = sorted(range(len(seconds)), key=lambda i: -seconds[i])
    return [timed_once[i] for i in order if seconds[i] > 0]


def _missing_shares(
    workload: Workload, known: Mapping[float, Passes], device: torch.device
) -> list[float]:
    """None of a layer for which the memory did not suffice."""
    if not isinstance(workload, LayerWorkload) or not known:
        return []
    return [share for share in workload.fine_shares(device) if share not in known]


def time_again(
    workload: Workload,
    known: Mapping[float, Passes],
    device: torch.device,
    backward: bool,
) -> dict[float, Passes]:
    """Times shares of a workload that are missing, or have not converged. Collective.

    Minutes may lie between: what disturbed the device for some seconds then is gone. A
    rank that needs nothing times all once more, for the others want it to be at work.

    Args:
        workload: what to time, the same on every rank.
        known: the passes of this rank so far, by share or bytes.
        device: the device of this rank.
        backward: whether that pass matters; otherwise forward alone is timed.

    Returns:
        The passes so far with those that were added.
    """
    missing = _missing_shares(workload, known, device)
    shares = missing or [*uncertainties(known, backward)] or [*known]
    added = _time_together(workload, device, shares, lambda _: backward)
    return added | {
        share: passes.joined(added[share]) if share in added else passes
        for share, passes in known.items()
    }


def _time_together(
    workload: Workload,
    device: torch.device,
    shares: Collection[float],
    backward: Callable[[PassCalls], bool],
) -> dict[float, Passes]:
    """Times shares of a workload while all ranks work.

    Each rank takes as many shares and repeats as its own curve needs. A rank that is done
    repeats what it ran last until all are done, so that nobody has more of the memory's
    bandwidth, or of the power, than in a step.
    """
    group = rank_group_of()
    throttled = not isinstance(workload, NonLayerOperator)
    clock, factor = clock_and_factor(device, group, throttled)
    last: list[PassCalls] = []

    def time_passes(calls: PassCalls) -> Passes:
        last[:] = [calls]
        return _time_passes(calls, device, backward(calls), clock).times(factor)

    try:
        found = workload.samples(time_passes, device, shares)
    except torch.OutOfMemoryError:
        found = {}
    all_done = dist.barrier(group=group.control, async_op=True)
    assert all_done is not None
    while last and not all_done.is_completed():
        timed(last[0].forward, device)
    translate_backend_errors(group, all_done.wait)
    return found


def _time_passes(
    calls: PassCalls,
    device: torch.device,
    backward: bool = True,
    clock: Clock = time.perf_counter,
) -> Passes:
    forward = sample(stopwatch(calls.forward, device, clock))
    if not backward:
        return Passes(forward, [])
    both = sample(stopwatch(calls.backward, device, clock))
    before = median(forward) if calls.includes_forward else 0.0
    return Passes(forward, [max(seconds - before, 0.0) for seconds in both])


def broadcast_object(value: Any, source: int = 0) -> Any:
    """Returns, on every rank, the ``value`` of rank ``source``."""
    values, group = [value], rank_group_of()
    translate_backend_errors(
        group,
        lambda: dist.broadcast_object_list(
            values, group=group.control, group_src=source
        ),
    )
    return values[0]


def copy_bandwidth(device: torch.device, numel: int = 1 << 22) -> float:
    """Measures an elementwise operator on a large tensor, on all ranks at once.

    Args:
        device: the device of this rank.
        numel: elements of the tensor, of float32.

    Returns:
        Bytes read and written per second.
    """
    x, y = torch.randn(numel, device=device), torch.empty(numel, device=device)
    barrier(rank_group_of())
    torch.relu(x)
    seconds = [timed(lambda: torch.clamp_min(x, 0, out=y), device) for _ in range(5)]
    return (x.nbytes + y.nbytes) / median(seconds)
