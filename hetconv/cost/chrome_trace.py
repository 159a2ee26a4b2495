"""A simulated step as a document in Chrome's trace event format, for Perfetto and chrome://tracing. Pure.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, get_args

from .timeline import Event, Thread

THREADS: tuple[Thread, ...] = get_args(Thread)


def _pid(rank: int) -> int:
    return rank + 1  # 0 is the idle process


def _tid(rank: int, thread: Thread) -> int:
    """Readers may take equal numbers for one thread, of whatever process."""
    return 1000 * _pid(rank) + THREADS.index(thread)


def document(devices: Sequence[str], events: Iterable[Event]) -> dict[str, Any]:
    """A process for each device, with a thread that computes and one that transfers, and every event as it was told.

    Times are in microseconds since the step began, to the nanosecond. What waits is called "wait"; ``args`` say for
    which operator.
    """
    names = [said for rank, device in enumerate(devices) for said in _names(rank, device)]
    return {"traceEvents": [*names, *map(_complete, events)], "displayTimeUnit": "ms"}


def _names(rank: int, device: str) -> Iterable[dict[str, Any]]:
    """Metadata events: what the process and its threads are called, and in which order they are shown."""
    process = {"ph": "M", "pid": _pid(rank), "tid": _tid(rank, THREADS[0])}
    yield process | {"name": "process_name", "args": {"name": f"{rank}: {device}"}}
    yield process | {"name": "process_sort_index", "args": {"sort_index": rank}}
    for order, thread in enumerate(THREADS):
        yield process | {"tid": _tid(rank, thread), "name": "thread_name", "args": {"name": thread}}
        yield process | {"tid": _tid(rank, thread), "name": "thread_sort_index", "args": {"sort_index": order}}


def _complete(event: Event) -> dict[str, Any]:
    what = "wait" if event.waits else event.thread
    start, end = round(event.start_s * 1e9), round(event.end_s * 1e9)  # readers count nanoseconds: no spans overlap
    return {
        "ph": "X",
        "pid": _pid(event.device),
        "tid": _tid(event.device, event.thread),
        "name": "wait" if event.waits else event.name,
        "cat": f"{'backward' if event.backward else 'forward'},{what}",
        "ts": start / 1e3,
        "dur": (end - start) / 1e3,
        "args": {"operator": event.name},
    }
