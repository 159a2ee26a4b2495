"""Statistics of repeated measurements."""

from __future__ import annotations

from collections.abc import Sequence
from math import log, pi, sqrt
from statistics import stdev

UNKNOWN_LOG_ERROR = 0.2  # of what was measured once


def log_error_of_median(seconds: Sequence[float]) -> float:
    """Computes the standard error of the median's logarithm, as of a normal distribution.

    Args: seconds: the measurements. Of one nothing is known, nor of zeros: a device
        without a share computes for no time.

    Returns:
        The error, or `UNKNOWN_LOG_ERROR`.
    """
    if len(seconds) < 2 or min(seconds) <= 0:
        return UNKNOWN_LOG_ERROR
    return error_of_median([log(s) for s in seconds])


def error_of_median(values: Sequence[float]) -> float:
    """Computes the standard error of the median of two or more values, as of a normal
    distribution.
    """
    return sqrt(pi / 2 / len(values)) * stdev(values)


def inverse_variance_mean(*known: tuple[float, float]) -> tuple[float, float]:
    """Combines several estimates of one value.

    Args:
        known: estimates, each with its standard error.

    Returns:
        The mean weighted by the inverse variances, and its standard error.
    """
    weight = sum(error**-2 for _, error in known)
    return sum(value * error**-2 for value, error in known) / weight, weight**-0.5
