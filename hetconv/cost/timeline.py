"""Timeline of a predicted step: when each device computes, transfers and waits.

Devices go on by themselves and wait only for the messages that they need. So a step
takes at most, and often less than, the sum of what every operator takes alone, which the
planner minimizes (``operator_sum_s`` of `schemas.plan.Prediction`). Only sums of
gradients, which cost no latency there, and the exchange of running statistics, which
costs nothing there, may add to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from hetconv.schemas.timeline import THREADS, Event, Thread

from .network import Array, Messages

Listener = Callable[[Event], None]


class Pass(NamedTuple):
    """Forward or backward pass of an operator.

    Attributes:
        name: Name of the operator.
        backward: Whether it is the backward pass.
        seconds: Seconds of computation on each device, (P,).
        rounds: Rounds of messages that it needs.
        overlaps_halos: Whether the messages travel while it is computed.
    """

    name: str
    backward: bool
    seconds: Array
    rounds: Sequence[Messages]
    overlaps_halos: bool = False


class Clocks:
    """Clocks of the devices, from the start of a step.

    Args:
        world: Number of devices.
        listener: Called for each event.
        overlap: Part of the shorter one of computation and halo exchange that costs no
            time; see `ClusterProfile`.

    Attributes:
        now: Seconds at which each device is done, (P,).
        busy: Seconds in which each device has computed, (P,).
        moving: Seconds in which each device has only transferred, (P,). In the rest it
            has waited.
    """

    def __init__(
        self, world: int, listener: Listener | None = None, overlap: float = 1.0
    ):
        self.listener, self.overlap = listener, overlap
        self.now, self.busy, self.moving = np.zeros((3, world))

    def step(self, one: Pass) -> None:
        """Advances the clocks by one pass: messages arrive, then it is computed.

        Where halos overlap the computation, the longer of both begins later by the part
        of the shorter one that is not hidden.
        """
        starts = sends = self.now
        if one.overlaps_halos and self.overlap < 1:
            travel = sum((m.together for m in one.rounds), np.zeros(len(starts)))
            delay = (1 - self.overlap) * np.minimum(one.seconds, travel)
            computes_longer = one.seconds >= travel
            starts = starts + delay * computes_longer
            sends = sends + delay * ~computes_longer
        computed = starts + one.seconds
        self.now = computed
        if one.rounds:
            computing = (starts, computed) if one.overlaps_halos else (starts, starts)
            arrived = self._arrivals(one, sends, computing)
            if not one.overlaps_halos:
                starts, computed = arrived, arrived + one.seconds
            self.now = np.maximum(computed, arrived)
        self.busy = self.busy + one.seconds
        self._report("compute", one, False, starts, computed)
        if one.overlaps_halos:
            self._report("compute", one, True, computed, self.now)

    def _arrivals(self, one: Pass, now: Array, computing: tuple[Array, Array]) -> Array:
        """Computes when every rank has what was sent to it.

        Args:
            one: Pass that needs the messages.
            now: Seconds at which each rank starts to send.
            computing: Span in which each rank computes, which does not count as moving.
        """
        starts, computed = computing
        for messages in one.rounds:
            before, sent = now, now + messages.sending
            last_sender = np.where(messages.pairs, sent[:, None], 0.0).max(0)
            ready = np.maximum(sent, last_sender)
            now = ready + messages.receiving
            for begin, end in ((before, sent), (ready, now)):
                after = np.maximum(end - np.maximum(begin, computed), 0.0)
                earlier = np.maximum(np.minimum(end, starts) - begin, 0.0)
                self.moving = self.moving + (after + earlier)
            self._report("transfer", one, False, before, sent)
            self._report("transfer", one, True, sent, ready)
            self._report("transfer", one, False, ready, now)
        return now

    def _report(
        self, thread: Thread, one: Pass, waits: bool, starts: Array, ends: Array
    ) -> None:
        if self.listener is None:
            return
        for rank in np.flatnonzero(ends > starts).tolist():
            span = float(starts[rank]), float(ends[rank])
            self.listener(Event(rank, thread, one.name, one.backward, waits, *span))


def chrome_trace(devices: Sequence[str], events: Iterable[Event]) -> dict[str, Any]:
    """Converts events to the Chrome trace format.

    Each device is a process, with a thread that computes and one that transfers. Times
    are in microseconds, to the nanosecond. Waiting events are named "wait"; their
    ``args`` name the operator.

    Args:
        devices: Name of each device.
        events: Events of a step.
    """
    metadata = [
        event
        for rank, device in enumerate(devices)
        for event in _metadata(rank, device)
    ]
    return {
        "traceEvents": [*metadata, *map(_complete_event, events)],
        "displayTimeUnit": "ms",
    }


def _process_id(rank: int) -> int:
    return rank + 1  # 0 is the idle process


def _thread_id(rank: int, thread: Thread) -> int:
    # Trace viewers may merge threads of equal numbers, even of different processes.
    return 1000 * _process_id(rank) + THREADS.index(thread)


def _metadata(rank: int, device: str) -> Iterator[dict[str, Any]]:
    """Names a process and its threads, and sets the order in which they are shown."""
    process_name = f"{rank}: {device}"
    yield _metadata_event(rank, THREADS[0], "process_name", name=process_name)
    yield _metadata_event(rank, THREADS[0], "process_sort_index", sort_index=rank)
    for order, thread in enumerate(THREADS):
        yield _metadata_event(rank, thread, "thread_name", name=thread)
        yield _metadata_event(rank, thread, "thread_sort_index", sort_index=order)


def _metadata_event(
    rank: int, thread: Thread, kind: str, **args: Any
) -> dict[str, Any]:
    return {
        "ph": "M",
        "pid": _process_id(rank),
        "tid": _thread_id(rank, thread),
        "name": kind,
        "args": args,
    }


def _complete_event(event: Event) -> dict[str, Any]:
    # Both ends are rounded to nanoseconds, so that adjacent spans do not overlap.
    start_ns, end_ns = round(event.start_s * 1e9), round(event.end_s * 1e9)
    direction = "backward" if event.backward else "forward"
    return {
        "ph": "X",
        "pid": _process_id(event.device),
        "tid": _thread_id(event.device, event.thread),
        "name": "wait" if event.waits else event.name,
        "cat": f"{direction},{'wait' if event.waits else event.thread}",
        "ts": start_ns / 1e3,
        "dur": (end_ns - start_ns) / 1e3,
        "args": {"operator": event.name},
    }
