"""What torch's profiler sees in one step: seconds within operators, and peak memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile


class StepProfile(NamedTuple):
    """One step of this process.

    Attributes:
        operators_s: Seconds within operators of torch.
        peak_bytes: Most bytes that were allocated during the step and not yet freed.
    """

    operators_s: float
    peak_bytes: int


def profiled(step: Callable[[], Any]) -> StepProfile:
    """Runs one step under torch's profiler, which makes it slower."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    operators_us = sum(
        e.self_cpu_time_total
        for e in found.key_averages()
        if e.key.startswith(("aten::", "mkldnn::"))
    )
    # `found` has sums only, but the peak is one of a running total.
    events = sorted(
        (e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"),
        key=lambda e: e.start_ns(),
    )
    live = peak = 0
    for event in events:
        live += event.nbytes()
        peak = max(peak, live)
    return StepProfile(operators_us / 1e6, peak)
