"""The tuning job on two ranks: its stages, what it keeps, and how it goes on."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetconv.autotune.launch.launcher import parse_devices
from hetconv.autotune.measure import pace, timer
from hetconv.autotune.measure.layer_workloads import LayerWorkload, workloads_of
from hetconv.autotune.measure.links import link_models
from hetconv.autotune.models.inputs import InputSpec, TensorSpec
from hetconv.autotune.search import operator_samples, race, stages
from hetconv.autotune.search.job import Job
from hetconv.autotune.search.journal import journal_of
from hetconv.autotune.search.tune import REFINING, tune
from hetconv.errors import HetConvError
from hetconv.planner.make_plan import make_plan
from hetconv.runtime import throttle
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import SINGLE_DEVICE
from hetconv.tracing.tracer import capture
from tests.spawn import on_ranks

DEVICES = tuple(parse_devices("cpu,cpu@0.5"))
IMAGE = InputSpec((TensorSpec((1, 3, 32, 32)),))


class Net(nn.Module):
    """Two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.two(torch.relu(self.one(x)))
        return y


def job(folder: Path, **changed: Any) -> Job:
    usual = Job(
        DEVICES,
        "tests.search.test_tune:Net",
        "{}",
        IMAGE,
        "train",
        3,
        600.0,
        folder / "cluster.json",
        0,
    )
    return replace(usual, **changed)


class StoppedError(Exception):
    """In place of a signal."""


class Counted(NamedTuple):
    """How often a rank measured an operator, or ways of whole steps."""

    operators: int
    races: int


def tuned(asked: Job, stop_in: str | None = None) -> tuple[Any, Counted]:
    """The profile, or what was raised; and what this rank measured.

    ``stop_in``: the stage that does not come to its end. Nothing is measured again that
    has not converged.
    """
    operators, races, samples, raced = 0, 0, timer.time_workloads, race.Race._run

    def counting(subjects: Any, *rest: Any) -> Any:
        nonlocal operators
        for found in samples(subjects, *rest):
            operators += 1
            yield found
            if stop_in == "operators" and operators == 3:
                raise StoppedError

    def racing(*args: Any) -> Any:
        nonlocal races
        races += 1
        return raced(*args)

    def stopping(run: Any, profile: Any) -> Any:
        raise StoppedError

    throttle.set_speed(DEVICES[dist.get_rank()].speed)
    with (
        pytest.MonkeyPatch.context() as patch
    ):  # layers, short messages, and nothing else, which takes seconds
        patch.setattr(
            stages,
            "workloads_of",
            lambda *of: [w for w in workloads_of(*of) if isinstance(w, LayerWorkload)],
        )
        patch.setattr(
            stages, "link_models", partial(link_models, sizes=(1 << 10, 1 << 14))
        )
        patch.setattr(stages, "with_contention", lambda profile, *rest: profile)
        patch.setattr(operator_samples, "MAX_REVISITS", 0)
        patch.setattr(pace, "DISTURBED", inf)
        patch.setattr(timer, "time_workloads", counting)
        patch.setattr(race.Race, "_run", racing)
        if stop_in in REFINING:
            patch.setitem(REFINING, stop_in, stopping)
        try:
            return tune(asked).profile, Counted(operators, races)
        except (StoppedError, HetConvError) as e:
            return f"{type(e).__name__}: {e}", Counted(operators, races)
        finally:
            throttle.set_speed(1.0)


def test_every_stage_is_written_and_nothing_is_measured_twice(tmp_path: Path) -> None:
    asked = job(tmp_path)
    found = on_ranks(2, tuned, asked, "operators")
    assert found == [("StoppedError: ", (3, 0))] * 2
    assert not asked.output.exists()
    assert [stage for stage, _, _ in records(asked)] == ["operators"] * 3

    found = on_ranks(2, tuned, replace(asked, resume=True), "plans")
    assert {said for said, _ in found} == {"StoppedError: "}
    profile = ClusterProfile.load(asked.output)
    assert len(profile.devices[0].operators) == 4
    assert not profile.plans
    kept = records(asked)
    assert sum(stage == "operators" for stage, _, _ in kept) > 3

    (whole, counted), (same, _) = on_ranks(2, tuned, replace(asked, resume=True))
    assert whole == same == ClusterProfile.load(asked.output)
    assert (whole.tuned, whole.links) == (profile.tuned, profile.links)
    assert len(whole.plans) == 1
    assert counted.operators == 0
    assert counted.races > 0
    assert records(asked)[: len(kept)] == kept

    asked.output.unlink()
    assert on_ranks(2, tuned, replace(asked, resume=True)) == [(whole, (0, 0))] * 2
    assert ClusterProfile.load(asked.output) == whole


def records(asked: Job) -> list[tuple[str, str, str]]:
    """Stages, keys and values, in the order in which they were kept."""
    with closing(sqlite3.connect(journal_of(asked.output))) as db:
        rows = db.execute("SELECT * FROM hetconv_records ORDER BY rowid").fetchall()
    return rows[1:]


def test_what_is_asked_for_decides_whether_anything_is_measured_again(
    tmp_path: Path,
) -> None:
    asked = job(tmp_path, trials=0)
    (first, counted), _ = on_ranks(2, tuned, asked)
    assert counted.operators > 0

    found = on_ranks(2, tuned, replace(asked, resume=True, seed=5))
    assert {said for said, _ in found} == {found[0][0]}, (
        "one rank refuses, and the other does not know it"
    )
    assert "seed is 0 there, 5 here" in found[0][0]

    (_, more), _ = on_ranks(2, tuned, replace(asked, resume=True, budget=700.0))
    assert more.operators == 0
    assert more.races > 0

    (second, again), _ = on_ranks(2, tuned, asked)
    assert again.operators == counted.operators
    assert first != second


def test_the_plan_is_what_was_measured_to_be_fastest(tmp_path: Path) -> None:
    (profile, _), _ = on_ranks(2, tuned, job(tmp_path))
    (found,) = profile.plans
    with torch.enable_grad():
        graph = capture(
            Net().to(memory_format=torch.channels_last), torch.ones(1, 3, 32, 32)
        )
    plan = make_plan(graph, profile)
    assert plan.splits == found.splits
    assert plan.chosen == (
        found.name if found.name.startswith(SINGLE_DEVICE) else "tuned plan"
    )
    assert plan.predicted is not None
    assert plan.predicted.step_s == found.step_s
    assert found.alone is not None
    assert found.alone_s is not None
    assert found.trials or found.name.startswith(
        SINGLE_DEVICE
    )  # on a busy machine nothing may come near a device alone
    # Of whom a plan asks the most, something is learnt; the other may have had too
    # little work to tell.
    assert not found.trials or any(d.corrections for d in profile.devices)
