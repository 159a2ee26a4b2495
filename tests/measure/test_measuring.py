"""Measuring on ranks: whatever each needs, all make the same collective calls; and what
becomes of the samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetconv.autotune.measure import pace, timer
from hetconv.autotune.measure.layer_workloads import LayerWorkload
from hetconv.autotune.measure.sampling import PassCalls, Passes, TimePasses
from hetconv.autotune.search import operator_samples, stages
from hetconv.comm.rank_group import rank_group_of
from hetconv.runtime.throttle import DeviceName
from hetconv.schemas.device_model import LinkModel
from hetconv.sharding.conv_spec import ConvSpec
from hetconv.sharding.layer_rules import Conv
from tests.spawn import on_ranks

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Uneven:
    """A workload of which each rank needs another number of shares."""

    fails_on: int = -1
    key: str = "uneven"

    def samples(
        self,
        time_passes: TimePasses,
        device: torch.device,
        shares: Collection[float] = (),
    ) -> dict[float, Passes]:
        rank = dist.get_rank()
        if rank == self.fails_on:
            raise torch.OutOfMemoryError("no more")
        calls = PassCalls(lambda: time.sleep(0.001), lambda: None)
        return {float(share): time_passes(calls) for share in range(1, 2 + 3 * rank)}


def timed_at_once(
    workloads: Any, enough: Callable[[], bool]
) -> list[tuple[str, dict[float, Passes]]]:
    """What is timed of each, without the time that samples take."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timer, "_time_passes", lambda *_: QUIET)
        return list(timer.time_workloads(workloads, CPU, enough))


def uneven(fails_on: int) -> list[int]:
    """How many shares were measured of each workload."""
    workloads: Any = [Uneven(fails_on), Uneven()]
    found = [len(samples) for _, samples in timed_at_once(workloads, lambda: False)]
    dist.barrier()  # every rank comes here
    return found


def test_ranks_stay_in_step_however_much_each_measures() -> None:
    assert on_ranks(3, uneven, -1) == [[1, 1], [4, 4], [7, 7]]


def test_a_rank_without_the_memory_has_no_samples_and_stays_in_step() -> None:
    assert on_ranks(3, uneven, 1) == [[1, 1], [0, 4], [7, 7]]


def stopped_early() -> list[str]:
    subjects: Any = [Uneven(key=key) for key in "abc"]
    rank_0_had_enough = iter([True, False, dist.get_rank() == 0])
    return [key for key, _ in timed_at_once(subjects, lambda: next(rank_0_had_enough))]


def test_rank_0_says_when_it_is_enough_but_something_is_measured() -> None:
    assert on_ranks(2, stopped_early) == [["a", "b"]] * 2


QUIET, LOUD = (
    Passes([1.0] * 6, [1.0] * 6),
    Passes([1.0, 5.0, 9.0], [1.0] * 6),
)


@dataclass(frozen=True)
class Again:
    """Notes at which shares it was measured; each call took three seconds."""

    key: str
    count: int = 1
    asked: list[list[float]] = field(default_factory=list, compare=False)

    def samples(
        self,
        time_passes: TimePasses,
        device: torch.device,
        shares: Collection[float] = (),
    ) -> dict[float, Passes]:
        self.asked.append([*shares])
        return {share: Passes([3.0] * 50, [3.0] * 50) for share in shares}


def more() -> tuple[list[list[float]], dict[float, Passes]]:
    """Rank 0 is in doubt at one share, rank 1 at none."""
    workload: Any = Again("again")
    known = {0.5: QUIET, 1.0: QUIET if dist.get_rank() else LOUD}
    found = timer.time_again(workload, known, CPU, True)
    return workload.asked, found


def test_what_is_in_doubt_is_measured_again_while_all_are_at_work() -> None:
    (asked, found), (others, _) = on_ranks(2, more)
    assert (asked, others) == ([[1.0]], [[0.5, 1.0]])
    assert found == {
        0.5: QUIET,
        1.0: LOUD.joined(Passes([3.0] * 50, [3.0] * 50)),
    }


SPEC = ConvSpec(1, 24, (6, 6), 40, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))


PIXELS = LayerWorkload(Conv(SPEC), "pixels", "float32")
FILTERS, CHANNELS = replace(PIXELS, axis="filters"), replace(PIXELS, axis="channels")


def looked_within() -> tuple[list[str], list[int], list[int]]:
    """What is to be timed again, and the parts of filters that are asked for and known.

    No rank but the last lacks any of filters, and all lack some of channels.
    """
    samples: timer.Samples = {
        layer.key: {1.0: QUIET} for layer in (PIXELS, FILTERS, CHANNELS)
    }
    if dist.get_rank() == 0:
        samples[FILTERS.key] = dict.fromkeys(FILTERS.fine_shares(CPU), QUIET)
    order = timer.most_uncertain([PIXELS, FILTERS, CHANNELS], samples, CPU, True)
    asked: list[int] = []

    def noted(_: Any, size: int, __: Any) -> PassCalls:
        asked.append(size)
        return PassCalls(lambda: None, lambda: None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerWorkload, "calls", noted)
        known = timer.time_again(FILTERS, samples[FILTERS.key], CPU, True)
    return [layer.key for layer in order], asked, [round(40 * share) for share in known]


def test_layers_are_looked_into_where_grains_begin_and_end() -> None:
    steps = FILTERS.granularity(CPU)
    assert steps is not None
    assert FILTERS.fine_shares(CPU) == [size / 40 for size in steps.ends]
    assert PIXELS.fine_shares(CPU) == []
    for order, asked, known in on_ranks(2, looked_within):
        assert order == [FILTERS.key, CHANNELS.key]
        assert set(steps.ends[:-1]) <= set(asked) <= set(steps.ends)
        assert set(known) == set(steps.ends)


def uncertain(backward: bool) -> list[str]:
    """What is to be timed again; rank 1 doubts most one of which rank 0 has no doubts."""
    workloads: Any = [
        Again("few", 1),
        Again("quiet", 9),
        Again("many", 2),
        Again("other", 4),
        Again("back", 8),
        Again("never timed", 99),
    ]
    samples = {w.key: {1.0: QUIET} for w in workloads[:-1]}
    samples |= {
        "few": {1.0: LOUD},
        "many": {1.0: LOUD},
        "back": {1.0: Passes(QUIET.forward, LOUD.forward)},
    }
    samples |= {"other": {1.0: LOUD}} if dist.get_rank() else {}
    return [w.key for w in timer.most_uncertain(workloads, samples, CPU, backward)]


def test_time_that_is_left_goes_to_what_steps_may_be_off_by_most() -> None:
    assert on_ranks(2, uncertain, True) == [["back", "other", "many", "few"]] * 2
    assert on_ranks(2, uncertain, False) == [["other", "many", "few"]] * 2


def revisited(enough_after: int) -> list[str]:
    """The visits of a stage of which nothing converges, until rank 0 has had enough."""
    layers = [PIXELS, replace(PIXELS, op=Conv(replace(SPEC, K=8)))]
    kept: list[str] = []
    run: Any = SimpleNamespace(
        graph=None,
        job=SimpleNamespace(mode="train", budget=60.0),
        group=rank_group_of(),
        device=CPU,
        memory_format="contiguous_format",
        name=DeviceName("cpu"),
        known=lambda *_: None,
        keep=lambda stage, key, value: kept.append(key),
        say=SimpleNamespace(
            stage=lambda *_: None,
            advance=lambda *_: None,
            line=lambda _: None,
            detail=lambda _: None,
        ),
        on_gpu=False,
        passed=lambda _: lambda: len(kept) >= enough_after and dist.get_rank() == 0,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "workloads_of", lambda *_: layers)
        patch.setattr(
            stages, "link_models", lambda *_, **__: {"0-1": LinkModel(1.0, 1.0)}
        )
        patch.setattr(stages, "with_contention", lambda profile, *_: profile)
        patch.setattr(pace, "DISTURBED", inf)
        patch.setattr(stages, "with_overlap", lambda profile, *_: profile)
        patch.setattr(timer, "_time_passes", lambda *_: LOUD)
        stages.operators(run)
    return kept


def test_visits_end_with_the_budget_or_after_some() -> None:
    both = [PIXELS.key, replace(PIXELS, op=Conv(replace(SPEC, K=8))).key]
    for kept in on_ranks(2, revisited, 99):
        assert sorted(kept) == sorted(both * (1 + operator_samples.MAX_REVISITS))
    for kept in on_ranks(2, revisited, 3):
        assert kept[:2] == both
        assert len(kept) == 3


ENOUGH_CALLS = 100


def loaded(folder: Path) -> int:
    """How often a rank that is done runs on while the other one still measures.

    The other one waits until that was often enough.
    """
    calls, ran_on = 0, folder / "ran on"

    def forward() -> None:
        nonlocal calls
        calls += 1
        if calls == ENOUGH_CALLS and dist.get_rank() == 0:
            ran_on.touch()

    @dataclass(frozen=True)
    class Long:
        key: str = "long"

        def samples(
            self,
            time_passes: TimePasses,
            device: torch.device,
            shares: Collection[float] = (),
        ) -> dict[float, Passes]:
            nonlocal calls
            time_passes(PassCalls(forward, lambda: None))
            dist.barrier()
            calls = 0
            ran_on.unlink(missing_ok=True)
            dist.barrier()
            while dist.get_rank() and not ran_on.exists():
                time.sleep(0.001)
            return {}

    dict(timer.time_workloads([Long()], CPU, lambda: False))  # type: ignore[list-item]
    return calls


def test_who_is_done_keeps_up_the_load(tmp_path: Path) -> None:
    first, _ = on_ranks(2, loaded, tmp_path)
    assert first >= ENOUGH_CALLS


def of_parts(backward: bool) -> list[bool]:
    """Whether backward was measured of a part of a layer, and of the whole."""

    @dataclass(frozen=True)
    class Parts:
        key: str = "parts"

        def samples(
            self,
            time_passes: TimePasses,
            device: torch.device,
            shares: Collection[float] = (),
        ) -> dict[float, Passes]:
            run = PassCalls(lambda: None, lambda: None)
            return {0.5: time_passes(run._replace(whole=False)), 1.0: time_passes(run)}

    ((_, found),) = timer.time_workloads([Parts()], CPU, lambda: False, backward)  # type: ignore[list-item]
    return [bool(passes.backward) for passes in found.values()]


@pytest.mark.parametrize("backward", [False, True])
def test_where_backward_does_not_matter_that_of_the_whole_is_measured(
    backward: bool,
) -> None:
    assert on_ranks(2, of_parts, backward) == [[backward, True]] * 2
