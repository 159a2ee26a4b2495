"""The stage of whole plans: who is measured, and that a device alone is the plan where
no split beats it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from optuna.trial import create_trial

from hetconv.autotune.launch.progress import Reporter
from hetconv.autotune.measure.model_inputs import ModelInputs
from hetconv.autotune.measure.paired_rounds import Paced, Round
from hetconv.autotune.search import plan_search
from hetconv.autotune.search import plan_search as plans
from hetconv.autotune.search.finalists import Rival
from hetconv.autotune.search.job import Run
from hetconv.autotune.search.plan_search import digest, near, undisproved
from hetconv.autotune.search.race import Alone, Order, Outcome, Race, formats
from hetconv.autotune.search.study import TrialFailedError
from hetconv.cost.estimator import StepEstimator
from hetconv.planner.make_plan import Contender, contenders
from hetconv.schemas import device_model
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import Plan, Prediction
from hetconv.sharding.layer_rules import Split, SplitKind
from tests.spawn import on_ranks

from .test_tune import job

ALONE = "fastest device alone (0: cpu)"


def contender(name: str, step_s: float, sizes: tuple[int, int] = (1, 1)) -> Contender:
    return Contender(
        name,
        {"conv": Split("height", sizes)},
        Prediction(step_s, 0.0, (0.0,) * 2, (), (0, 0)),
        {},
    )


@pytest.mark.parametrize(
    ("seconds", "names"),
    [
        ({ALONE: 1.0, "a": 1.4, "b": 1.2, "c": 1.51}, ["b", "a"]),
        ({ALONE: 1.0, "a": 2.1, "b": 2.2}, []),
        ({"a": 3.0, "b": 1.0, "c": 1.3}, ["b"]),
        ({ALONE: 1.0}, []),
        (
            {ALONE: 1.0} | {f"{k}": 0.5 + k / 1000 for k in range(9)},
            ["0", "1", "2", "3", "4", "5"],
        ),
    ],
)
def test_who_may_be_the_fastest_is_measured(
    seconds: Mapping[str, float], names: list[str]
) -> None:
    assert [c.name for c in near([contender(*of) for of in seconds.items()])] == names


def of_kind(kind: SplitKind, step_s: float) -> Contender:
    return contender(f"{kind} {step_s}", step_s)._replace(
        splits={"conv": Split(kind, (1, 1))}
    )


def test_of_every_kind_one_is_measured_and_the_last_those_that_are_far() -> None:
    best, slower, filters = (
        contender("rows", 1.0),
        contender("slow rows", 1.2, (2, 1)),
        of_kind("filter", 1.8),
    )
    far, too_far = of_kind("channel", 3.9), of_kind("width", 4.1)
    whole = best._replace(name="replicated", splits={"conv": Split("replicate")})
    assert near(
        [best, slower, filters, of_kind("filter", 1.9), far, too_far, whole]
    ) == [best, slower, filters, far]
    close = of_kind("filter", 1.22)
    assert near([best, slower, close, far]) == [best, close, slower, far]
    others = [contender(f"rows {k}", 1.1 + k / 100, (k, 1)) for k in range(3, 6)]
    assert near([best, *others, filters]) == [best, *others[:2], filters, others[2]]
    rows = Split("height", (1, 1))
    mixed = best._replace(splits={"a": rows, "b": rows, "c": Split("filter", (1, 1))})
    assert near([mixed, filters]) == [
        mixed,
        filters,
    ]  # a third of the layers says little of filters


def test_from_the_even_split_something_else_is_learnt() -> None:
    best, like, even = (
        contender("a", 1.0),
        contender("b", 1.1, (2, 1)),
        contender("even split by height", 1.9, (2, 2)),
    )
    assert near([best, like, even], even) == [best, like, even]
    soon = contender("even split by height", 1.2, (2, 2))
    assert near([best, like, soon], soon) == [best, soon, like]
    assert near([best, like], best) == near([best, like], None) == [best, like]
    far, too_far = (
        contender("even split by height", step_s, (2, 2)) for step_s in (2.1, 4.1)
    )
    assert near([best, like, far], far) == [best, like, far]
    assert near([best, like, too_far], too_far) == [best, like]


def test_images_have_two_formats_and_a_field_has_an_order() -> None:
    assert formats(1, ModelInputs.of(torch.ones(1, 2, 3, 4))) == (
        Alone(1, "contiguous"),
        Alone(1, "channels_last"),
    )
    assert formats(1, ModelInputs.of(torch.ones(1, 2, 3))) == (Alone(1, "contiguous"),)
    a, b = contender("a", 1.0), contender("b", 1.0, (2, 1))
    assert len({digest([a]), digest([b]), digest([a, b]), digest([b, a])}) == 4
    assert digest([a, b]) == digest([a, b])


def test_a_trial_that_later_races_disprove_teaches_nothing() -> None:
    a, b = contender("a", 1.0), contender("b", 1.0, (2, 1))
    tried = [(c, create_trial(value=part)) for c, part in ((a, 0.8), (b, 0.9))]
    assert (
        undisproved(tried, [])
        == undisproved(tried, [Rival(a, 0.85, 0.0), Rival(b, 0.85, 0.0)])
        == tried
    )
    assert undisproved(tried, [Rival(a, 0.6, 0.0)]) == tried[1:]
    assert (
        undisproved(tried, [Rival(a, 0.6, 0.0), Rival(b, 1.2, 0.0)]) == tried
    )  # something must


SLOWNESS = 1.3


class Decided(NamedTuple):
    """``raced``: how many ways; ``learnt``: kinds; ``slowness`` of each device;
    ``alone_s``: of the fastest; ``predicted_s``: from the profile.
    """

    plans: Any
    raced: int
    learnt: list[str]
    slowness: list[float]
    alone_s: float
    predicted_s: float


def decided(folder: Path, faster: float | None) -> Decided:
    """What comes of it where each split takes ``faster`` of one alone, which takes
    `SLOWNESS` times what is predicted.

    None: where they fail.
    """
    profile, raced = (
        ClusterProfile.from_devices(["cpu", "cpu@0.5"], link="host"),
        list[Any](),
    )
    profile = replace(
        profile,
        devices=tuple(replace(d, alone=device_model.Alone()) for d in profile.devices),
    )

    def lead(self: Race, order: Order, enough: Any = lambda _: False) -> Outcome:
        rounds: list[Round] = []
        for _ in range(order.rounds):
            split = {name for name, way in order.ways.items() if isinstance(way, Plan)}
            if split and faster is None:
                raise TrialFailedError("on rank 1: there is no memory")
            took = {
                name: alone_s * (faster if name in split and faster else 1.0)
                for name in order.ways
            }
            rounds.append(
                {name: Paced(seconds, (1.0, 1.0)) for name, seconds in took.items()}
            )
            if enough(rounds[-1]):
                break
        raced.append(order)
        return Outcome(rounds, (1.0, 1.0), (0.0, 0.0), (1.0, 1.0))

    with (
        pytest.MonkeyPatch.context() as patch,
        ExitStack() as stack,
        Reporter("test") as say,
    ):
        patch.setattr(Race, "lead", lead)
        patch.setattr(plan_search, "FAR", 1e9)
        run = Run(job(folder), say, stack)
        alone = next(
            c
            for c in contenders(run.graph, profile, mode=run.job.mode)
            if c.name == ALONE
        )
        alone_s = SLOWNESS * alone.predicted.step_s
        found = plans.plans(run, profile)
    slowness = [d.alone.slowness for d in found.devices if d.alone]
    (plan,) = found.plans
    predicted_s = StepEstimator(run.graph, found, run.job.mode).step_s(
        plan.name, plan.splits
    )
    return Decided(
        found.plans,
        len(raced),
        [*found.devices[1].corrections],
        slowness,
        alone_s,
        predicted_s,
    )


@pytest.mark.parametrize(
    ("faster", "alone"), [(0.95, False), (0.97, True), (1.5, True), (None, True)]
)
def test_a_plan_must_beat_a_device_alone_by_4_percent(
    tmp_path: Path, faster: float | None, alone: bool
) -> None:
    first, other = on_ranks(2, decided, tmp_path, faster)
    (found,) = first.plans
    assert other.plans == first.plans
    assert other.raced == 0
    assert first.raced > 2
    assert (found.name == found.alone) is alone
    assert found.name.startswith("fastest device alone") is alone
    assert found.alone_s == first.alone_s
    assert found.predicted_s == first.predicted_s
    assert found.step_s == first.alone_s * (1.0 if alone or faster is None else faster)
    assert (found.trials > 0) is (faster is not None)
    assert bool(first.learnt) is (faster is not None)
    assert (
        first.slowness
        == other.slowness
        == [pytest.approx(SLOWNESS if faster is not None else 1.0)] * 2
    )
