"""On which part of its core a rank works, and what operators take there."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hetconv.autotune.launch import throttle
from hetconv.autotune.measure import barrier, timer
from hetconv.autotune.measure.barrier import Parts
from hetconv.autotune.measure.other_workloads import Other
from hetconv.autotune.measure.sampling import Passes, Run, Time
from hetconv.comm.rank_group import rank_group_of
from tests.spawn import on_ranks

CPU = torch.device("cpu")


def work() -> None:
    """Of five milliseconds, whoever has the core between them."""
    end = time.thread_time() + 0.005
    while time.thread_time() < end:
        pass


@dataclass(frozen=True)
class Work:
    key: str = "work"
    alone: bool = False

    def samples(
        self, time_: Time, device: torch.device, known: Collection[float] = ()
    ) -> dict[float, Passes]:
        return {1.0: time_(Run(work, work))}


class OtherWork(Other):
    def samples(
        self, time_: Time, device: torch.device, known: Collection[float] = ()
    ) -> dict[float, Passes]:
        return {1.0: time_(Run(work, work))}


ALL = Parts(1.0, 1.0)


def worked(subject: Any, speed: float, parts: Parts = ALL) -> float:
    """Seconds of `work` on a slowed device with a part of its core; it is not `stretched`."""
    throttle.set_speed(speed)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(timer, "parts_of_core", lambda _: parts)
            ((_, found),) = timer.operator_samples([subject], CPU, lambda: False)
    finally:
        throttle.set_speed(1.0)
    return min(found[1.0].forward)


def test_a_device_alone_takes_longer_by_what_it_is_slowed() -> None:
    for alone, together in zip(
        on_ranks(2, worked, Work(alone=True), 0.5),
        on_ranks(2, worked, Work(), 0.5),
        strict=True,
    ):
        assert 0.01 <= alone < 0.011
        assert 0.005 <= together < alone


PARTS = Parts(0.5, 0.25)


@pytest.mark.parametrize(
    ("subject", "speed", "longer"),
    [
        (Work(), 1.0, 2),
        (Work(alone=True), 1.0, 4),
        (Work(alone=True), 0.5, 8),
        (OtherWork("work", "float32"), 1.0, 2),
        (OtherWork("work", "float32"), 0.5, 2),
    ],
)
def test_on_a_part_of_a_core_all_that_nobody_sleeps_for_takes_as_many_times_as_long(
    subject: Any, speed: float, longer: float
) -> None:
    """Others' turns fall between short samples and into long ones: neither tells of
    them in its median.
    """
    for seconds in on_ranks(2, worked, subject, speed, PARTS):
        assert seconds == pytest.approx(0.005 * longer, rel=0.1)


def test_a_slowed_device_sleeps_less_for_what_others_have_its_core() -> None:
    """In layers, whose seconds are then as they are."""
    assert min(on_ranks(2, worked, Work(), 0.5, Parts(1e-3, 1.0))) < 1.0


def parts_on_one_core() -> Parts:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        barrier.parts_of_core.cache_clear()
        return barrier.parts_of_core(rank_group_of())
    finally:
        os.sched_setaffinity(0, before)
        barrier.parts_of_core.cache_clear()


def test_ranks_on_one_core_get_all_of_it_together_at_most() -> None:
    """Whatever else this machine does meanwhile."""
    found = on_ranks(2, parts_on_one_core)
    assert sum(parts.together for parts in found) < 1.3
    assert all(0 < part <= 1 for parts in found for part in parts)
