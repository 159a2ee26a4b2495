"""How a rank begins: it ends with the process that started it, which it watches before
it imports anything slow.
"""

from __future__ import annotations

import os
import pickle
import shutil
import threading
import time
from pathlib import Path

WATCH = 0.5  # seconds between two looks


def guarded(parent: int, folder: Path, call: bytes) -> None:
    """``call``: a function and its arguments, pickled, for reading them imports their modules.

    Without the process ``parent`` there is nobody to end this one, to say how it
    failed, or to remove ``folder``.
    """
    threading.Thread(target=_end_with, args=(parent, folder), daemon=True).start()
    fn, args = pickle.loads(call)
    fn(*args)


def _end_with(parent: int, folder: Path) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
