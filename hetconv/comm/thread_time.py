"""Times of a thread: that it waits for a CPU core, and for messages of other ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

MAX_WAITING_PART = 0.05
"""Part of the time that a thread waits for a core which it has to itself, at most."""
QUERY_INTERVAL_S = 0.02  # a few turns of the system's scheduler


def waits_s() -> float:
    """Returns the seconds for which this thread was ready but waited for a core.

    It is 0 where the system keeps no such count.
    """
    try:
        told = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    except OSError:
        return 0.0
    try:
        return int(os.read(told, 128).split()[1]) / 1e9
    finally:
        os.close(told)


class OwnCore:
    """Tells, when it is called, whether the calling thread had a core to itself lately.

    It answers False where the system does not tell.
    """

    def __init__(self) -> None:
        self._since, self._waited, self._own = time.perf_counter(), waits_s(), False

    def __call__(self) -> bool:
        """Returns whether the calling thread had a core to itself since the last calls."""
        now = time.perf_counter()
        if now > self._since + QUERY_INTERVAL_S:
            waited = waits_s()
            self._own = (
                0 < waited < self._waited + MAX_WAITING_PART * (now - self._since)
            )
            self._since, self._waited = now, waited
        return self._own


class WaitClock:
    """Counts the seconds within its context, in which a rank waits for others.

    Attributes:
        waited_s: Seconds of the host so far.
        mark: Returns a mark of the time on a GPU's stream, while one is measured; None
            otherwise. Messages of GPUs are waited for on the stream.
        marked: First and last mark of each wait.
    """

    waited_s = 0.0
    mark: Callable[[], Any] | None = None
    _since = 0.0
    _first: Any = None

    def __init__(self) -> None:
        self.marked: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        self._since = time.perf_counter()
        self._first = self.mark() if self.mark is not None else None

    def __exit__(self, *_: object) -> None:
        self.waited_s += time.perf_counter() - self._since
        if self.mark is not None:
            self.marked.append((self._first, self.mark()))


MESSAGE_WAITS = WaitClock()
"""Counts the waits of this process for messages of other ranks."""
