"""Statistics of repeated measurements."""

from __future__ import annotations

from collections.abc import Sequence
from math import log, pi, sqrt
from statistics import stdev

DEFAULT_LOG_ERROR = 0.2  # of what was measured once


def log_error_of_median(seconds: Sequence[float]) -> float:
    """Computes the standard error of the median's logarithm, as of a normal distribution.

    Args:
        seconds: the measurements. One says nothing, nor do zeros: a device without a
            share computes for no time.

    Returns:
        The error, or `DEFAULT_LOG_ERROR`.
    """
    if len(seconds) < 2 or min(seconds) <= 0:
        return DEFAULT_LOG_ERROR
    return error_of_median([log(s) for s in seconds])


def error_of_median(values: Sequence[float]) -> float:
    """Computes the standard error of the median, as of a normal distribution.

    Args:
        values: two or more.
    """
    return sqrt(pi / 2 / len(values)) * stdev(values)
