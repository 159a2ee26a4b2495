"""Seconds in which this rank computes, and in which it waits for others, in calls of a model."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

from hetconv.comm.thread_time import MESSAGE_WAITS
from hetconv.torch_internals import at_end_of_backward, graph_task_id

NO_BACKWARD = -1  # torch's number of the graph task outside of backward passes


class RankTimes(NamedTuple):
    """Seconds of one rank in forward and backward passes.

    Attributes:
        busy_s: Seconds in which it computed, or copied messages.
        waited_s: Seconds in which it waited for messages.
    """

    busy_s: float
    waited_s: float


class StepMonitor:
    """Measures forward and backward passes; what runs between them does not count.

    On a CPU a pass is over when it returns. Of a GPU's passes only the host's part is
    seen.
    """

    def __init__(self) -> None:
        self._span_s = self._waited_s = 0.0
        self._began_s = self._waited_before_s = 0.0
        self._backward = NO_BACKWARD

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Measures a forward pass, unless a checkpoint repeats it in a backward pass."""
        if graph_task_id() != NO_BACKWARD:
            yield
            return
        self._begin()
        yield
        self._end()

    def watch_backward(self, results: Iterable[Tensor]) -> None:
        """Measures the backward passes that begin at the results of a forward pass."""
        for result in results:
            if result.requires_grad:
                result.register_hook(self._begin_backward)

    def take(self) -> RankTimes:
        """Returns the seconds since the last call, and counts from zero again."""
        span_s, waited_s = self._span_s, self._waited_s
        self._span_s = self._waited_s = 0.0
        return RankTimes(span_s - waited_s, waited_s)

    def _begin_backward(self, _: Tensor) -> None:
        if self._backward != graph_task_id():  # the first of several results
            self._backward = graph_task_id()
            self._begin()
            at_end_of_backward(self._end)

    def _begin(self) -> None:
        self._began_s = time.perf_counter()
        self._waited_before_s = MESSAGE_WAITS.waited_s

    def _end(self) -> None:
        self._span_s += time.perf_counter() - self._began_s
        self._waited_s += MESSAGE_WAITS.waited_s - self._waited_before_s
