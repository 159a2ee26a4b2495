"""Times of a thread: that it waits for a CPU core, and for messages of other ranks."""

from __future__ import annotations

import os
import time

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
        waited_s: Seconds so far.
    """

    waited_s = 0.0
    _since = 0.0

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.waited_s += time.perf_counter() - self._since


MESSAGE_WAITS = WaitClock()
"""Counts the waits of this process for messages, in host memory, of other ranks."""
