"""What a plan's step looks like in time: when each device computes, sends and receives,
and waits. Pure.

Devices go on by themselves and wait only for the messages that they need, so a step
takes at most, and often less than, the sum of what every operator takes alone, which
the planner minimizes (``summed_s`` of `plan.Prediction`). But sums of gradients cost no
latency there, and running statistics, which are told all at once, nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from .network import Array, Messages

Thread = Literal["compute", "transfer"]


class Event(NamedTuple):
    """What a device did for an operator, or for its gradient, from ``start_s`` to
    ``end_s`` of the step.

    The two threads of a device go on at the same time only where halos travel while it
    computes. ``waits``: the one that transfers for a sender that is not there yet, the
    one that computes for halos that have not all arrived.
    """

    device: int
    thread: Thread
    name: str
    backward: bool
    waits: bool
    start_s: float
    end_s: float


Listener = Callable[[Event], None]


class Pass(NamedTuple):
    """An operator forward, or backward: (P,) seconds of computing, and the rounds of
    messages for it.

    ``hides``: the messages travel while it is computed.
    """

    name: str
    backward: bool
    seconds: Array
    rounds: Sequence[Messages]
    overlaps_halos: bool = False


class Clocks:
    """(P,) seconds: when each device is done, from the start of the step; for how long
    it has computed, or only moved.

    What is left it has waited. ``overlap``: as `ClusterProfile` has it.
    """

    def __init__(
        self, world: int, listener: Listener | None = None, overlap: float = 1.0
    ):
        self.listener, self.overlap = listener, overlap
        self.now, self.busy, self.moving = np.zeros((3, world))

    def step(self, one: Pass) -> None:
        """What the operator needs arrives, unless computing hides it while it travels,
        and it is computed.

        Of what hides and is hidden, the longer one begins later by as much of the
        shorter one as is not hidden.
        """
        starts = leaves = self.now
        if one.overlaps_halos and self.overlap < 1:
            travels = sum(
                (messages.together for messages in one.rounds), np.zeros(len(starts))
            )
            later = (1 - self.overlap) * np.minimum(one.seconds, travels)
            longer = one.seconds >= travels
            starts, leaves = starts + later * longer, leaves + later * ~longer
        computed = starts + one.seconds
        if one.rounds:
            arrived = self._arrivals(
                one,
                leaves,
                (starts, computed) if one.overlaps_halos else (starts, starts),
            )
            if not one.overlaps_halos:
                starts, computed = arrived, arrived + one.seconds
            self.now = np.maximum(computed, arrived)
        else:
            self.now = computed
        self.busy = self.busy + one.seconds
        if self.listener is not None:
            self._tell("compute", one, False, starts, computed)
            if one.overlaps_halos:
                self._tell("compute", one, True, computed, self.now)

    def _arrivals(self, one: Pass, now: Array, computing: tuple[Array, Array]) -> Array:
        """When every rank has what was sent to it, if each starts ``now``; when it
        computes, it is not only moving.
        """
        starts, computed = computing
        for messages in one.rounds:
            before, sent = now, now + messages.sending
            ready = np.maximum(
                sent, np.where(messages.pairs, sent[:, None], 0.0).max(0)
            )
            now = ready + messages.receiving
            for begins, ends in ((before, sent), (ready, now)):
                after = np.maximum(ends - np.maximum(begins, computed), 0.0)
                self.moving = self.moving + (
                    after + np.maximum(np.minimum(ends, starts) - begins, 0.0)
                )
            if self.listener is not None:
                self._tell("transfer", one, False, before, sent)
                self._tell("transfer", one, True, sent, ready)
                self._tell("transfer", one, False, ready, now)
        return now

    def _tell(
        self, thread: Thread, one: Pass, waits: bool, starts: Array, ends: Array
    ) -> None:
        assert self.listener is not None
        for device in np.flatnonzero(ends > starts):
            span = float(starts[device]), float(ends[device])
            self.listener(
                Event(int(device), thread, one.name, one.backward, waits, *span)
            )


THREADS: tuple[Thread, ...] = get_args(Thread)


def _pid(rank: int) -> int:
    return rank + 1  # 0 is the idle process


def _tid(rank: int, thread: Thread) -> int:
    """Readers may take equal numbers for one thread, of whatever process."""
    return 1000 * _pid(rank) + THREADS.index(thread)


def chrome_trace(devices: Sequence[str], events: Iterable[Event]) -> dict[str, Any]:
    """A process for each device, with a thread that computes and one that transfers,
    and every event as it was told.

    Times are in microseconds since the step began, to the nanosecond. What waits is
    called "wait"; ``args`` say for which operator.
    """
    names = [
        said for rank, device in enumerate(devices) for said in _names(rank, device)
    ]
    return {"traceEvents": [*names, *map(_complete, events)], "displayTimeUnit": "ms"}


def _names(rank: int, device: str) -> Iterable[dict[str, Any]]:
    """Metadata events: what the process and its threads are called, and in which order
    they are shown.
    """
    process = {"ph": "M", "pid": _pid(rank), "tid": _tid(rank, THREADS[0])}
    yield process | {"name": "process_name", "args": {"name": f"{rank}: {device}"}}
    yield process | {"name": "process_sort_index", "args": {"sort_index": rank}}
    for order, thread in enumerate(THREADS):
        yield process | {
            "tid": _tid(rank, thread),
            "name": "thread_name",
            "args": {"name": thread},
        }
        yield process | {
            "tid": _tid(rank, thread),
            "name": "thread_sort_index",
            "args": {"sort_index": order},
        }


def _complete(event: Event) -> dict[str, Any]:
    what = "wait" if event.waits else event.thread
    start, end = (
        round(event.start_s * 1e9),
        round(event.end_s * 1e9),
    )  # readers count nanoseconds: no spans overlap
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
