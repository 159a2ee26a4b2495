"""The only stopwatch, pulses, and operators: measured while all ranks are at work, and
one rank after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from hetconv.autotune.launch.throttle import (
    at_work_s,
    forget_waits,
    slowness,
    tells_turns,
    work_clock,
)
from hetconv.comm.rank_group import rank_group_of
from hetconv.torch_internals import gpu_sleep

from .barrier import meet, parts_of_core
from .layer_workloads import Subject
from .other_workloads import Other
from .sampling import Passes, Run, doubts, sampled

try:
    import resource
except ImportError:  # not on Unix
    resource = None  # type: ignore[assignment]

SHORT, SHORT_ON_GPU = (
    2e-4,
    2e-3,
)  # seconds that a sample lasts at least, of calls one after the other
MOST_CALLS = 20
FEW_PAGES, MOST_NEW = (
    256,
    20,
)  # of memory that the system gives to a sample that counts; how many others there may be
# seconds after which work that follows a pause is as fast as ever: a pulse at once
# takes twice as long
WARM_S = 5e-3
PULSE, PULSE_ON_GPU = (
    192,
    2048,
)  # rows and columns of a matrix that is multiplied with itself
TURNS, TURN_S = 15, 0.01  # of all at work, and of each alone; seconds
Samples = dict[str, dict[float, Passes]]
"""By a subject's key, seconds of its passes by share, or by bytes."""

Clock = Callable[[], float]


def _by_the_wall() -> float:
    return time.perf_counter()


def pages_taken() -> int:
    """Pages of memory that the system has given this process so far; 0 where it does not say."""
    if resource is None:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def timed(
    action: Callable[[], Any], device: torch.device, clock: Clock = _by_the_wall
) -> float:
    """Seconds of one call, with the device idle before and after."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    forget_waits()
    start = clock()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - start


def stopwatch(
    call: Callable[[], Any], device: torch.device, clock: Clock = _by_the_wall
) -> Callable[[], float]:
    """Gives seconds of one call whenever it is called, from a few in a row where one is
    too short for the clock.

    On a GPU they are its own, between events, without what the host needs to launch
    them. Calls for which the system had to give memory do not count, but for too many:
    in a step they take what earlier ones freed, and what is new is cleared first, which
    takes longer than they do.
    """
    calls, new = 0, 0

    def counting(sample: Callable[[], float]) -> float:
        nonlocal new
        while True:
            before = pages_taken()
            found = sample()
            if pages_taken() - before < FEW_PAGES or new == MOST_NEW:
                return found
            new += 1

    def seconds() -> float:
        nonlocal calls
        if not calls:
            once = counting(lambda: timed(call, device, clock))
            least = SHORT_ON_GPU if device.type == "cuda" else SHORT
            calls = min(max(int(least / once), 1), MOST_CALLS)
            return once
        if device.type == "cuda":
            return _between_events(call, calls)
        return (
            counting(
                lambda: timed(lambda: [call() for _ in range(calls)], device, clock)
            )
            / calls
        )

    return seconds


def call_seconds(
    call: Callable[[], Any], device: torch.device, samples: int = 5
) -> float:
    """Median seconds of a short call, see `stopwatch`."""
    seconds = stopwatch(call, device)
    for _ in range(2):
        seconds()
    return median(seconds() for _ in range(samples))


@cache
def pulse(device: torch.device) -> Callable[[], float]:
    """Gives seconds of a small fixed piece of work whenever it is called: how fast the
    device is just now.

    Clocks go up and down, and neighbours come and go. What takes longer because of
    these takes as many times as long as the pulses beside it. Who else uses the core of
    a device that is slowed on purpose does not matter, see `work_clock`.
    """
    side = PULSE_ON_GPU if device.type == "cuda" else PULSE
    a = torch.ones(side, side, device=device)
    y = torch.empty_like(a)

    def work() -> None:
        for _ in range(2):
            torch.mm(a, a, out=y)

    work()
    seconds = stopwatch(work, device, lambda: work_clock(device))
    seconds()  # decides how often it calls

    def now() -> float:
        work()  # what ran before has left its own in the caches
        if device.type == "cpu":
            warm = time.perf_counter() + WARM_S - at_work_s()
            while time.perf_counter() < warm:
                work()
        return seconds()

    return now


def resting(device: torch.device) -> float:
    """Collective: how many times as long a pulse takes while all others rest as it does
    while all are at work.

    The median of many turns that follow closely on each other, for which the device has one speed.
    """
    beat, group, found = pulse(device), rank_group_of(), []

    def now(seconds: float) -> float:
        end, beats = time.perf_counter() + seconds, [beat()]
        while time.perf_counter() < end:
            beats.append(beat())
        return median(beats)

    for _ in range(TURNS):
        meet(group)
        together = now(TURN_S)
        for rank in range(group.size):
            meet(group)
            if rank == group.rank:
                found.append(now(TURN_S) / together)
    meet(group)
    return median(found)


def _between_events(call: Callable[[], Any], calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    gpu_sleep(2_000_000)  # cycles, about a millisecond in which the host gets ahead
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / calls


def operator_samples(
    subjects: Sequence[Subject],
    device: torch.device,
    enough: Callable[[], bool],
    backward: bool = True,
) -> Iterator[tuple[str, dict[float, Passes]]]:
    """(key, share or bytes -> seconds of the passes) of each subject; nothing where the
    memory does not suffice.

    Collective. Stops early, after the first, once ``enough`` says so on rank 0. Unless
    ``backward`` matters, that of a layer is measured of the whole alone: it takes twice
    as long as forward, and time may be short.
    """
    for i, subject in enumerate(subjects):
        if told(enough()) and i:
            return
        measured = _in_turn if subject.alone else _together
        yield (
            subject.key,
            measured(subject, device, (), lambda run: backward or run.whole),
        )


def more_samples(
    subject: Subject,
    known: Mapping[float, Passes],
    device: torch.device,
    backward: bool,
    new: Collection[float] = (),
) -> dict[float, Passes]:
    """What this rank has ``known`` of a subject, and ``new`` shares, or as many samples
    again where it is in doubt.

    Collective. Minutes may lie between: what disturbed the device for some seconds then
    is gone. A rank that has no doubts measures all once more, for the others want it to
    be at work. Forward alone, unless ``backward`` matters.
    """
    at = [*new] or [*doubts(known, backward)] or [*known]
    again = (_in_turn if subject.alone else _together)(
        subject, device, at, lambda _: backward
    )
    return again | {
        share: p.and_again(again[share]) if share in again else p
        for share, p in known.items()
    }


def _together(
    subject: Subject,
    device: torch.device,
    known: Collection[float],
    backward: Callable[[Run], bool],
) -> dict[float, Passes]:
    """While all ranks are at work on the same: each takes as many shares and repeats as
    its own curve wants.

    No rank waits for another while it measures. One that is done goes on with what it
    ran last until all are, so that nobody is left with more of the memory's bandwidth,
    or of the power, than there is in a plan's step, in which all are done at about the
    same time, whatever their shares.
    """
    last: list[Run] = []
    clock, longer = _clock(
        device, isinstance(subject, Other), parts_of_core(rank_group_of()).together
    )

    def passes(run: Run) -> Passes:
        last[:] = [run]
        return _passes(run, device, backward(run), clock).times(longer)

    found = _fitting(lambda: subject.samples(passes, device, known))
    others = dist.barrier(group=rank_group_of().control, async_op=True)
    assert others is not None
    while last and not others.is_completed():
        timed(last[0].forward, device)
    others.wait()
    return found


def _in_turn(
    subject: Subject,
    device: torch.device,
    known: Collection[float],
    backward: Callable[[Run], bool],
) -> dict[float, Passes]:
    """One rank after the other, while all others rest.

    A device that is slowed on purpose is not while it is measured: alone it takes as
    much longer for all that it does, and sleeps for that once, at the end of a step.
    After a sleep for every operator these would begin cold.
    """
    group, found = rank_group_of(), {}
    clock, longer = _clock(device, True, parts_of_core(group).alone)

    def passes(run: Run) -> Passes:
        return _passes(run, device, backward(run), clock).times(longer * slowness())

    for rank in range(group.size):
        if rank == group.rank:
            found = _fitting(lambda: subject.samples(passes, device, known))
        dist.barrier(group=group.control)
    return found


def _clock(
    device: torch.device, never_sleeps: bool, part: float
) -> tuple[Clock, float]:
    """By which an operator is timed, and how many times as long it takes, on a ``part``
    of the core, in a step.

    Without others' turns on the core, which fall into long samples and between short ones.
    """
    return (
        (time.thread_time, 1 / part)
        if by_own_clock(device, never_sleeps)
        else (_by_the_wall, 1.0)
    )


def by_own_clock(device: torch.device, never_sleeps: bool = False) -> bool:
    """Whether what a device computes is timed by the thread's own clock, over the part
    of the core that it gets.

    A device that is slowed sleeps less for others' turns, and takes what the wall says
    for what it sleeps for.
    """
    return tells_turns(device) and (never_sleeps or slowness() == 1)


def _fitting(samples: Callable[[], dict[float, Passes]]) -> dict[float, Passes]:
    try:
        return samples()
    except torch.OutOfMemoryError:
        return {}


def _passes(
    run: Run, device: torch.device, backward: bool = True, clock: Clock = _by_the_wall
) -> Passes:
    beat = pulse(device)
    forward, pulse_s = sampled(stopwatch(run.forward, device, clock), beat)
    if not backward:
        return Passes(forward, [], pulse_s)
    behind, then_s = sampled(stopwatch(run.backward, device, clock), beat)
    less = median(forward) if run.both else 0.0
    return Passes(
        forward,
        [max(seconds * pulse_s / then_s - less, 0.0) for seconds in behind],
        pulse_s,
    )


def told(word: Any, source: int = 0) -> Any:
    """What rank ``source`` says, on every rank."""
    words = [word]
    dist.broadcast_object_list(words, group=rank_group_of().control, group_src=source)
    return words[0]


def copy_bandwidth(device: torch.device, numel: int = 1 << 22) -> float:
    """Bytes read and written per second by an elementwise operator on a large tensor."""
    x, y = torch.randn(numel, device=device), torch.empty(numel, device=device)
    dist.barrier()
    torch.relu(x)
    return (
        8
        * numel
        / median(timed(lambda: torch.clamp_min(x, 0, out=y), device) for _ in range(5))
    )
