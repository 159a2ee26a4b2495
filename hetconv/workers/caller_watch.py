"""How a worker notices that the calling process is gone.

It imports nothing large, so that a worker notices while it imports PyTorch, too.
"""

from __future__ import annotations

import os
import select
import signal
from threading import Thread

CHECK_PARENT_MS = 1000


def end_with_caller(connection: int, caller: int) -> None:
    """Has this process end with the calling one, and not by Ctrl-C, which is that one's.

    Args:
        connection: Descriptor of the connection to the calling process.
        caller: Process id of the calling process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_wait, args=(connection, caller), daemon=True).start()


def _wait(connection: int, caller: int) -> None:
    """Ends this process when the other end of the connection is closed.

    A process that the calling one forked may hold that end open for longer.
    """
    closed = select.poll()
    closed.register(connection, 0)  # a poll always tells of the end
    while not closed.poll(CHECK_PARENT_MS):
        if os.getppid() != caller:
            break
    os._exit(1)
