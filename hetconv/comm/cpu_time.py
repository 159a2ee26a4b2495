"""Whether a thread has its core to itself, as the system counts what it waited for it."""

from __future__ import annotations

import os
import time

SHARED = 0.05  # of the time, that a thread waits for a core that is not its own
PERIOD_S = 0.02  # after which that is asked again: a few turns of the system's


def waits_s() -> float:
    """Seconds in which this thread waited for its core while it could have run; none
    where the system does not tell.
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
    """Of a thread, called again and again: whether it had its core to itself of late.
    False where nobody knows.
    """

    def __init__(self) -> None:
        self._since, self._waited, self._own = time.perf_counter(), waits_s(), False

    def __call__(self) -> bool:
        now = time.perf_counter()
        if now > self._since + PERIOD_S:
            waited = waits_s()
            self._own = 0 < waited < self._waited + SHARED * (now - self._since)
            self._since, self._waited = now, waited
        return self._own
