"""Seconds in which this rank computes, and in which it waits for others, in calls of a model.

Of a GPU they are measured by events on its stream, which are read once they are over, a
step later: nothing waits for them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hetconv.comm.thread_time import MESSAGE_WAITS
from hetconv.torch_internals import at_end_of_backward, graph_task_id

NO_BACKWARD = -1  # torch's number of the graph task outside of backward passes
MS = 1e-3  # in which events tell times


class RankTimes(NamedTuple):
    """Seconds of one rank in forward and backward passes.

    Attributes:
        busy_s: Seconds in which it computed, or copied messages.
        waited_s: Seconds in which it waited for messages.
    """

    busy_s: float
    waited_s: float


class _Marks(NamedTuple):
    """First and last event of each pass, and of each wait."""

    passes: list[tuple[Any, Any]]
    waits: list[tuple[Any, Any]]

    def are_over(self) -> bool:
        return not self.passes or bool(self.passes[-1][1].query())

    def times(self) -> RankTimes:
        span, waited = (
            sum(first.elapsed_time(last) for first, last in pairs) * MS
            for pairs in (self.passes, self.waits)
        )
        return RankTimes(span - waited, waited)


def event_marks(device: torch.device) -> Callable[[], Any] | None:
    """Returns what records an event on a GPU's current stream; None for other devices."""
    return partial(_event, device) if device.type == "cuda" else None


def _event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


class StepMonitor:
    """Measures forward and backward passes; what runs between them does not count.

    Args:
        mark: Records an event on the stream of the rank's GPU; None on CPUs, where a
            pass is over when it returns.
    """

    def __init__(self, mark: Callable[[], Any] | None = None) -> None:
        self._mark = mark
        self._span_s = self._waited_s = 0.0
        self._began_s = self._waited_before_s = 0.0
        self._first: Any = None
        self._marks = _Marks([], [])
        self._pending: deque[_Marks] = deque()
        self._last = RankTimes(0.0, 0.0)
        self._backward = NO_BACKWARD

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Measures a forward pass, unless a checkpoint repeats it in a backward pass."""
        if graph_task_id() != NO_BACKWARD:
            yield
            return
        self._begin()
        try:
            yield
        finally:
            self._end()

    def watch_backward(self, results: Iterable[Tensor]) -> None:
        """Measures the backward passes that begin at the results of a forward pass."""
        for result in results:
            if result.requires_grad:
                result.register_hook(self._begin_backward)

    def take(self) -> RankTimes:
        """Ends a step, and returns its seconds; on a GPU, those of the last step that is over."""
        if self._mark is None:
            span_s, waited_s = self._span_s, self._waited_s
            self._span_s = self._waited_s = 0.0
            return RankTimes(span_s - waited_s, waited_s)
        while self._pending and self._pending[0].are_over():
            self._last = self._pending.popleft().times()
        self._pending.append(self._marks)
        self._marks = _Marks([], [])
        return self._last

    def discard(self) -> None:
        """Drops what was measured since the last step ended."""
        self._span_s = self._waited_s = 0.0
        self._marks = _Marks([], [])

    def _begin_backward(self, _: Tensor) -> None:
        if self._backward != graph_task_id():  # the first of several results
            self._backward = graph_task_id()
            self._begin()
            at_end_of_backward(self._end)

    def _begin(self) -> None:
        self._began_s = time.perf_counter()
        self._waited_before_s = MESSAGE_WAITS.waited_s
        if self._mark is not None:
            self._first = self._mark()
            MESSAGE_WAITS.mark, MESSAGE_WAITS.marked = self._mark, self._marks.waits

    def _end(self) -> None:
        self._span_s += time.perf_counter() - self._began_s
        self._waited_s += MESSAGE_WAITS.waited_s - self._waited_before_s
        if self._mark is not None:
            self._marks.passes.append((self._first, self._mark()))
            MESSAGE_WAITS.mark = None
