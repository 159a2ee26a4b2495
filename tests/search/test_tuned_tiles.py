"""Tuned tiles: how they are found on small tensors, and their way through profile and
plan to the kernels.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from hetconv import kernels
from hetconv.autotune.launch.progress import Reporter
from hetconv.autotune.measure import timer
from hetconv.autotune.search import tile_stage
from hetconv.autotune.search.tile_search import TRIALS, Found, Trial, WrongResultError
from hetconv.autotune.search.tile_stage import Contest
from hetconv.comm.rank_group import rank_group_of
from hetconv.kernels import Tile, backend_choice, dispatch, tiles
from hetconv.kernels.backend_choice import KernelQuery
from hetconv.kernels.triton import compile_report
from hetconv.kernels.triton.compile_report import Report
from hetconv.schemas.tuning_results import TunedTile
from tests.interpreter import (
    DEVICE,
    ON_GPU,
    PASSES,
    SAME,
    images,
)
from tests.spawn import on_ranks

SPEC = replace(images(16, 16, (12, 12), 3, 3, (1, 1), SAME), N=1)
SMALL = Tile("pointer", 16, 128, 64, 4, 2)
NAME = backend_choice.device_name(DEVICE)


def question(what: Any = "forward", **changed: Any) -> KernelQuery:
    return KernelQuery(what, replace(SPEC, **changed), "ieee", NAME)


def entry(choice: str = str(SMALL), **changed: Any) -> TunedTile:
    usual = TunedTile(
        NAME, *tiles.versions_in_use(), "forward", SPEC, "ieee", choice, 1e-5, 2e-5
    )
    return replace(usual, **changed)


pytestmark = pytest.mark.usefixtures("no_tiles_installed")


@pytest.mark.parametrize("what", PASSES)
@pytest.mark.parametrize(
    "changed",
    [{}, {"stride": (2, 2), "dtype": "float32"}, {"groups": 2, "dtype": "bfloat16"}],
)
def test_a_right_tile_has_a_time(
    what: Any, changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not ON_GPU:  # the interpreter takes seconds
        monkeypatch.setattr(timer, "call_seconds", lambda call, device: 1.0)
    contest = Contest(question(what, **changed), DEVICE)
    works, chip = contest.works
    assert len(works) == (4 if what == "input gradient" and "stride" in changed else 1)
    assert contest(SMALL) > 0
    assert contest("aten") > 0
    assert chip.arch >= 80


@pytest.mark.parametrize(
    "spoil", [lambda y: y * 1.01, lambda y: y.fill_(float("nan")), torch.zeros_like]
)
def test_a_wrong_tile_has_none(spoil: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    contest = Contest(question(), DEVICE)
    right = kernels.conv2d_forward

    def wrong(*args: Any, **options: Any) -> Tensor:
        return spoil(right(*args, **options))

    monkeypatch.setattr(kernels, "conv2d_forward", wrong)
    with pytest.raises(WrongResultError, match="off by"):
        contest(SMALL)


def test_a_tile_of_other_bits_from_call_to_call_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    contest = Contest(question(), DEVICE)
    right, calls = kernels.conv2d_forward, [0]

    def unstable(*args: Any, **options: Any) -> Tensor:
        calls[0] += 1
        y = right(*args, **options)
        y[0, 0, 0, 0] *= 1 + 1e-2 * (
            calls[0] == 3
        )  # within the bound of the norm, once
        return y

    monkeypatch.setattr(kernels, "conv2d_forward", unstable)
    with pytest.raises(WrongResultError, match="other bits"):
        contest(SMALL)


@pytest.mark.parametrize(
    ("left", "said"), [(0, None), (4, "4 left operands from registers")]
)
def test_a_tile_with_left_operands_in_registers_is_not_tried(
    left: int, said: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cuobjdump").touch()
    found = Report(40, 0, 1000, 8, 0, left, 2, 4, 0, 4, 0, 100, 20)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(compile_report, "TOOLS", tmp_path)
    monkeypatch.setattr(compile_report, "report", lambda *_: found)
    why = Contest(question(), DEVICE).obstacle(SMALL)
    assert why is None if said is None else said in str(why)


def test_what_a_tile_leaves_unwritten_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    contest = Contest(question(), DEVICE)
    monkeypatch.setattr(
        kernels, "conv2d_forward", lambda x, *_, **__: x.new_empty(SPEC.y_shape)
    )
    with pytest.raises(WrongResultError, match="nan"):
        contest(SMALL)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_short_call_is_timed() -> None:
    calls: list[int] = []
    assert timer.call_seconds(lambda: calls.append(1), DEVICE) > 0
    assert len(calls) >= 3


def test_a_study_of_a_pass_goes_on_from_what_is_known() -> None:
    first = tile_stage.studied(question(), DEVICE, 2, None, lambda: False)
    assert first is not None
    assert [t.choice == "aten" for t in first.trials] == [False, True]
    made = tile_stage.entry(question(), first)
    assert replace(made, seconds=1e-5, heuristic_s=2e-5, choice=str(SMALL)) == entry()
    assert made.choice == "aten" or Tile.parse(made.choice)
    found = tile_stage.studied(question(), DEVICE, 3, first, lambda: False)
    assert found is not None
    assert found.trials[:2] == first.trials
    assert len([t for t in found.trials if not t.why.startswith("pruned")]) == 3
    assert tile_stage.studied(question(), DEVICE, 3, None, lambda: True) is None


def test_the_passes_of_a_step_are_noted_with_the_most_work_first() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3, padding=1)
    ).to(DEVICE)

    def step(dtype: torch.dtype = torch.float32) -> None:
        y = torch.ones(1, 3, 16, 16, device=DEVICE, dtype=dtype)
        for layer in net.to(dtype):
            c = kernels.conv2d(y, layer.weight, layer.bias, padding=layer.padding)
            y = c
        y.sum().backward()

    found = tile_stage.questions(step)
    whats = [(q.pass_name, q.spec.C, q.spec.padding) for q in found]
    assert (
        len(set(whats)) == len(whats) == 3 * 3 - 1
    )  # nobody asks for the image's gradient
    flops = [q.spec.flops for q in found]
    assert flops == sorted(flops, reverse=True)
    assert {q.device for q in found} == {NAME}
    assert tile_stage.questions(lambda: step(torch.float64)) == []
    assert not dispatch.listeners


class Memory(dict[tuple[str, str], Found]):
    """What a stage keeps."""

    def known(self, stage: str, key: str, _: type[Found]) -> Found | None:
        return self.get((stage, key))

    def keep(self, stage: str, key: str, value: Found) -> None:
        assert (stage, key) not in self, "it is kept twice"
        self[stage, key] = TypeAdapter(Found).validate_json(
            TypeAdapter(Found).dump_json(value)
        )


def staged(
    most: int, kept: Memory | None = None
) -> tuple[list[tuple[int, int]], list[int], int]:
    """The stage, where rank 0 is taken for a GPU: (K and trials on a rank, K of all
    entries, how often it was told).
    """
    kept = kept if kept is not None else Memory()
    group, asked, rounds = rank_group_of(), [], 0

    def step() -> None:
        for k in (16, 32, 48):
            kernels.conv2d_forward(
                torch.ones(1, 16, 4, 4),
                torch.ones(k, 16, 1, 1),
                None,
                (1, 1),
                ((0, 0),) * 2,
                (1, 1),
                1,
            )

    def studied(q: KernelQuery, _: Any, trials: int, *__: Any) -> Found | None:
        asked.append((q.spec.K, trials))
        seen = (
            Trial("aten", 1.0) if q.spec.K > 16 else Trial(SMALL, 1.0)
        )  # ATen was not reached
        return Found(SMALL, 1.0, 1.0, (seen,))

    def enough() -> bool:
        nonlocal rounds
        rounds += 1
        return rounds > most

    with pytest.MonkeyPatch.context() as patch, Reporter("test") as say:
        patch.setattr(tile_stage, "studied", studied)
        device = torch.device("cuda" if group.rank == 0 else "cpu")
        found = tile_stage.tune_tiles(step, device, group, enough, say, kept)
    return asked, [t.spec.K for t in found], rounds


@pytest.mark.skipif(
    ON_GPU, reason="the ranks are on the CPU, whose kernels run in the interpreter"
)
def test_every_rank_learns_what_the_gpus_among_them_tuned() -> None:
    first, second = on_ranks(2, staged, 10)
    assert first == (
        [(k, trials) for trials in (2, TRIALS) for k in (48, 32, 16)],
        [48, 32],
        6,
    )
    assert second == ([], [48, 32], 6)
    assert [found for _, found, _ in on_ranks(2, staged, 1)] == [[48], [48]]


def resumed() -> tuple[list[tuple[int, int]], list[tuple[int, int]], bool]:
    """What is measured where it was interrupted after two of three default tiles, and
    again after that; the entries.
    """
    kept = Memory()
    staged(2, kept)
    again, entries, _ = staged(10, kept)
    none, same, _ = staged(10, kept)
    return again, none, same == entries == [48, 32]


@pytest.mark.skipif(
    ON_GPU, reason="the ranks are on the CPU, whose kernels run in the interpreter"
)
def test_a_pass_is_not_studied_again_by_who_resumes() -> None:
    first, second = on_ranks(2, resumed)
    assert first == ([(16, 2), *((k, TRIALS) for k in (48, 32, 16))], [], True)
    assert second == ([], [], True)


def test_of_two_like_gpus_the_faster_choice_stays() -> None:
    slow, fast = entry(seconds=2.0), entry("aten", seconds=1.0)
    other = entry(what="weight gradient")
    assert tile_stage.merged([[slow, other], [fast]]) == (fast, other)
