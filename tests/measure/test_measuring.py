"""Measuring on ranks: whatever each needs, all make the same collective calls; and what
becomes of the samples.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetconv.autotune.measure import sampling, timer
from hetconv.autotune.measure.layer_workloads import Layer
from hetconv.autotune.measure.sampling import Passes, Run, Time
from hetconv.autotune.search import stages
from hetconv.comm.rank_group import rank_group_of
from hetconv.sharding.conv_spec import ConvSpec
from hetconv.sharding.layer_rules import Conv
from tests.spawn import on_ranks

CPU = torch.device("cpu")
PULSE_S = 2**-12


@dataclass(frozen=True)
class Uneven:
    """A subject that each rank needs other work for; notes when it ran on this one."""

    alone: bool = False
    fails_on: int = -1
    key: str = "uneven"
    ran: list[tuple[float, float]] = field(default_factory=list, compare=False)

    def samples(
        self, time_: Time, device: torch.device, known: Collection[float] = ()
    ) -> dict[float, Passes]:
        start, rank = time.monotonic(), dist.get_rank()
        if rank == self.fails_on:
            raise torch.OutOfMemoryError("no more")
        run = Run(lambda: time.sleep(0.001), lambda: None)
        found = {float(share): time_(run) for share in range(1, 2 + 3 * rank)}
        self.ran.append((start, time.monotonic()))
        return found


def uneven(alone: bool, fails_on: int) -> tuple[list[int], tuple[float, float] | None]:
    """How many shares were measured of each subject, and when the first one ran."""
    subjects: Any = [Uneven(alone, fails_on), Uneven(alone)]
    found = [
        len(samples)
        for _, samples in timer.operator_samples(subjects, CPU, lambda: False)
    ]
    dist.barrier()  # every rank comes here
    return found, subjects[0].ran[0] if subjects[0].ran else None


@pytest.mark.parametrize("alone", [False, True])
def test_ranks_stay_in_step_however_much_each_measures(alone: bool) -> None:
    found = on_ranks(3, uneven, alone, -1)
    assert [counts for counts, _ in found] == [[1, 1], [4, 4], [7, 7]]
    spans = [span for _, span in found]
    in_turn = all(
        a is not None and b is not None and a[1] <= b[0] for a, b in pairwise(spans)
    )
    assert in_turn is alone


@pytest.mark.parametrize("alone", [False, True])
def test_a_rank_without_the_memory_has_no_samples_and_stays_in_step(
    alone: bool,
) -> None:
    assert [counts for counts, _ in on_ranks(3, uneven, alone, 1)] == [
        [1, 1],
        [0, 4],
        [7, 7],
    ]


def stopped_early() -> list[str]:
    subjects: Any = [Uneven(key=key) for key in "abc"]
    rank_0_had_enough = iter([True, False, dist.get_rank() == 0])
    return [
        key
        for key, _ in timer.operator_samples(
            subjects, CPU, lambda: next(rank_0_had_enough)
        )
    ]


def test_rank_0_says_when_it_is_enough_but_something_is_measured() -> None:
    assert on_ranks(2, stopped_early) == [["a", "b"]] * 2


QUIET, LOUD = (
    Passes([1.0] * 6, [1.0] * 6, PULSE_S),
    Passes([1.0, 5.0, 9.0], [1.0] * 6, PULSE_S),
)


@dataclass(frozen=True)
class Again:
    """Notes at which shares it was measured; each call took three seconds."""

    key: str
    count: int = 1
    alone: bool = False
    asked: list[list[float]] = field(default_factory=list, compare=False)

    def samples(
        self, time_: Time, device: torch.device, known: Collection[float] = ()
    ) -> dict[float, Passes]:
        self.asked.append([*known])
        return {share: Passes([3.0] * 50, [3.0] * 50, PULSE_S) for share in known}


def more(
    alone: bool, new: bool = False
) -> tuple[list[list[float]], dict[float, Passes]]:
    """Rank 0 is in doubt at one share, rank 1 at none. Rank 0 may want a ``new`` share."""
    subject, known = (
        Again("again", alone=alone),
        {0.5: QUIET, 1.0: QUIET if dist.get_rank() else LOUD},
    )
    wanted = [0.75] if new and not dist.get_rank() else []
    found = timer.more_samples(subject, known, CPU, True, wanted)  # type: ignore[arg-type]
    return subject.asked, found


@pytest.mark.parametrize("alone", [False, True])
def test_what_is_in_doubt_is_measured_again_while_all_are_at_work(alone: bool) -> None:
    (asked, found), (others, _) = on_ranks(2, more, alone)
    assert (asked, others) == ([[1.0]], [[0.5, 1.0]])
    assert found == {
        0.5: QUIET,
        1.0: LOUD.and_again(Passes([3.0] * 50, [3.0] * 50, PULSE_S)),
    }


def test_new_shares_are_added_while_all_are_at_work() -> None:
    (asked, found), (others, kept) = on_ranks(2, more, False, True)
    assert (asked, others) == ([[0.75]], [[0.5, 1.0]])
    assert found == {
        0.5: QUIET,
        0.75: Passes([3.0] * 50, [3.0] * 50, PULSE_S),
        1.0: LOUD,
    }
    assert list(kept) == [0.5, 1.0]


SPEC = ConvSpec(1, 24, (6, 6), 40, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))


def ends(layer: Layer) -> list[int]:
    steps = layer.steps(CPU)
    return steps.ends if steps else []


def looked_within(enough: bool) -> tuple[list[str], list[list[int]]]:
    """What was kept, in order, and the parts that are known then; no rank but the last
    lacks any of filters.
    """
    pixels = Layer(Conv(SPEC), "pixels", "float32")
    layers = [
        pixels,
        replace(pixels, axis="filters"),
        replace(pixels, axis="channels"),
        replace(pixels, alone=True),
    ]
    whole = {1.0: QUIET}
    samples = {layer.key: whole for layer in layers}
    if dist.get_rank() == 0:
        samples[layers[1].key] = {part / 40: QUIET for part in ends(layers[1])}
    kept: list[str] = []
    run: Any = SimpleNamespace(
        job=SimpleNamespace(mode="train"),
        group=rank_group_of(),
        device=CPU,
        keep=lambda stage, key, value: kept.append(key),
        say=SimpleNamespace(stage=lambda *_: None, advance=lambda *_: None),
    )
    stages.look_within(run, layers, samples, lambda: enough and dist.get_rank() == 0)
    return kept, [
        sorted(round(share * layer.extent) for share in samples[layer.key])
        for layer in layers[:3]
    ]


def test_layers_are_looked_into_where_grains_begin_and_end() -> None:
    pixels = Layer(Conv(SPEC), "pixels", "float32")
    filters, channels = (
        replace(pixels, axis="filters"),
        replace(pixels, axis="channels"),
    )
    for kept, parts in on_ranks(2, looked_within, False):
        assert kept == [filters.key, channels.key]
        assert parts == [[6], ends(filters), ends(channels)]
    for kept, parts in on_ranks(2, looked_within, True):
        assert kept == []
        assert parts[2] == [24]


def settled(mode: str, enough_after: int) -> tuple[list[str], list[str], timer.Samples]:
    """In what order subjects were measured again, and kept; rank 1 doubts most one of
    which rank 0 has no doubts.
    """
    subjects: Any = [
        Again("few", 1),
        Again("quiet", 9),
        Again("many", 2),
        Again("other", 4),
        Again("back", 8),
    ]
    samples = {s.key: {1.0: QUIET} for s in subjects}
    samples |= {
        "few": {1.0: LOUD},
        "many": {1.0: LOUD},
        "back": {1.0: Passes(QUIET.forward, LOUD.forward, PULSE_S)},
    }
    samples |= {"other": {1.0: LOUD}} if dist.get_rank() else {}
    order: list[str] = []
    run: Any = SimpleNamespace(
        job=SimpleNamespace(mode=mode),
        group=rank_group_of(),
        device=CPU,
        keep=lambda stage, key, value: order.append(key),
        say=SimpleNamespace(stage=lambda *_: None, advance=lambda *_: None),
    )
    stages.settle(
        run,
        subjects,
        samples,
        lambda: dist.get_rank() == 0 and len(order) >= enough_after,
    )
    return order, [s.key for s in subjects if s.asked], samples


def test_time_that_is_left_goes_to_what_steps_may_be_off_by_most() -> None:
    for order, asked, samples in on_ranks(2, settled, "train", 99):
        assert order == ["back", "other", "many", "few"]
        assert set(asked) == {*order}
        assert not any(sampling.doubts(of, backward=True) for of in samples.values())
    assert [order for order, *_ in on_ranks(2, settled, "infer", 99)] == [
        ["other", "many", "few"]
    ] * 2
    assert [order for order, *_ in on_ranks(2, settled, "train", 2)] == [
        ["back", "other"]
    ] * 2
    assert [order for order, *_ in on_ranks(2, settled, "train", 0)] == [[]] * 2


def loaded() -> int:
    """How often a rank that is done runs on while the other one still measures."""
    calls = 0

    @dataclass(frozen=True)
    class Long:
        key: str = "long"
        alone: bool = False

        def samples(
            self, time_: Time, device: torch.device, known: Collection[float] = ()
        ) -> dict[float, Passes]:
            nonlocal calls

            def forward() -> None:
                nonlocal calls
                calls += 1

            time_(Run(forward, lambda: None))
            calls = 0
            if dist.get_rank():
                time.sleep(0.3)
            return {}

    dict(timer.operator_samples([Long()], CPU, lambda: False))  # type: ignore[list-item]
    return calls


def test_who_is_done_keeps_up_the_load() -> None:
    first, last = on_ranks(2, loaded)
    assert first > 10 * max(last, 1)


def of_parts(backward: bool) -> list[bool]:
    """Whether backward was measured of a part of a layer, and of the whole."""

    @dataclass(frozen=True)
    class Parts:
        key: str = "parts"
        alone: bool = False

        def samples(
            self, time_: Time, device: torch.device, known: Collection[float] = ()
        ) -> dict[float, Passes]:
            run = Run(lambda: None, lambda: None)
            return {0.5: time_(run._replace(whole=False)), 1.0: time_(run)}

    ((_, found),) = timer.operator_samples([Parts()], CPU, lambda: False, backward)  # type: ignore[list-item]
    return [bool(passes.backward) for passes in found.values()]


@pytest.mark.parametrize("backward", [False, True])
def test_where_backward_does_not_matter_that_of_the_whole_is_measured(
    backward: bool,
) -> None:
    assert on_ranks(2, of_parts, backward) == [[backward, True]] * 2
