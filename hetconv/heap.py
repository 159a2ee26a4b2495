"""Memory that one step frees serves the next, in place of what the system clears page by page for it."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from importlib.util import find_spec

TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = -1, -2, -4  # of mallopt(3)
GROWS_BY = 1 << 26  # bytes
_TOLD = find_spec("resource") is not None  # on Unix
CHOSEN = "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_"


@cache
def keep_freed() -> bool:
    """From now on this process keeps for itself what it frees, as allocators of GPU memory do.

    Of glibc: nothing is trimmed from the heap, which grows in large pieces, and all tensors come from it. False where
    that cannot be, or where the user chose another way, by `CHOSEN` in the environment or ``glibc.malloc`` among its
    GLIBC_TUNABLES.
    """
    if any(name in os.environ for name in CHOSEN) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library, another system
        return False
    return all([mallopt(TRIM_THRESHOLD, -1), mallopt(MMAP_MAX, 0), mallopt(TOP_PAD, GROWS_BY)])


def pages_taken() -> int:
    """How many pages of memory the system has given this process so far; 0 where it does not say."""
    if not _TOLD:
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
