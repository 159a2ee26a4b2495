"""What rounds of steps say a plan gains, how sure that is, and what it could."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from hetconv.autotune.measure.paired_rounds import Round
from hetconv.autotune.measure.sampling import log_error_of_median
from hetconv.planner.candidates import EVEN
from hetconv.schemas.plan import SINGLE_DEVICE

SILENT, OF_SILENT = (
    "without messages",
    "of no messages",
)  # a plan's step, and how many times as long it takes with them
FASTEST, NEAR = (
    4,
    1.1,
)  # how many plans run again, and how many times as long as the fastest these take at most


def last(measured: Mapping[str, float], own: str) -> list[str]:
    """Of plans that took so many seconds: ``own``, those that are nearly the fastest, a
    device alone, an even split.
    """
    fastest = sorted(measured, key=measured.__getitem__)
    near = [name for name in fastest if measured[name] <= NEAR * measured[fastest[0]]][
        :FASTEST
    ]
    first = (
        next(name for name in fastest if name.startswith(sort))
        for sort in (SINGLE_DEVICE, EVEN)
    )
    return [*dict.fromkeys((own, *near, *first))]


def gains(rounds: Sequence[Round], own: str) -> dict[str, Any]:
    """``own`` plan's against the fastest device alone, the best even split, all, and
    its own step without messages, if that ran too; what they took, in ms.
    """
    again = {name: median(one[name] for one in rounds) for name in rounds[0]}
    alone, even = (
        min(s for name, s in again.items() if name.startswith(sort))
        for sort in (SINGLE_DEVICE, EVEN)
    )
    found = {
        "vs_alone": alone / again[own],
        "vs_even": even / again[own],
        "regret": regret(rounds, own),
    }
    if SILENT in again:
        found[OF_SILENT] = median(one[own] / one[SILENT] for one in rounds)
    rounded = {name: round(value, 4) for name, value in found.items()}
    return rounded | {
        "measured again ms": {name: round(s * 1e3, 3) for name, s in again.items()}
    }


def regret(rounds: Sequence[Round], own: str) -> float:
    """What ``own`` plan takes more than the fastest, as a part of that.

    Which plan that is half of the rounds say, and how fast it is the others, and the
    other way round: in the rounds in which it seems the fastest, noise alone has made
    it somewhat faster than it is.
    """
    found = []
    for choose, judge in ((rounds[::2], rounds[1::2]), (rounds[1::2], rounds[::2])):
        best = min(_plans(rounds), key=lambda name: median(one[name] for one in choose))
        found.append(
            median(one[own] for one in judge) / median(one[best] for one in judge) - 1
        )
    return max(sum(found) / 2, 0.0)


def _plans(rounds: Sequence[Round]) -> list[str]:
    return [name for name in rounds[0] if name != SILENT]


def doubt(rounds: Sequence[Round], own: str) -> float:
    """Standard error of what ``own`` plan takes against the fastest, in logarithms;
    none where it is the fastest.
    """
    best = min(_plans(rounds), key=lambda name: median(one[name] for one in rounds))
    return log_error_of_median([one[own] / one[best] for one in rounds])


def possible(speeds: Sequence[float]) -> dict[str, float]:
    """What a plan could gain if nothing were sent, on devices of these speeds."""
    found = {
        "possible vs_alone": sum(speeds) / max(speeds),
        "possible vs_even": sum(speeds) / (len(speeds) * min(speeds)),
    }
    return {name: round(value, 4) for name, value in found.items()}
