"""The stage of plans as a whole: what is measured beside the plan, and what studies
remember of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetconv.autotune.measure.model_inputs import ModelInputs
from hetconv.autotune.measure.paired_rounds import Paced
from hetconv.autotune.search import plan_search
from hetconv.autotune.search.journal import Store, Study, studies_of
from hetconv.autotune.search.plan_search import _Plans, even_split
from hetconv.autotune.search.race import Alone, Order, Outcome
from hetconv.autotune.search.study import TrialFailedError
from hetconv.cost.estimator import StepEstimator
from hetconv.planner.candidates import EVEN, Candidates
from hetconv.planner.make_plan import contenders
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import SINGLE_DEVICE
from hetconv.schemas.tuning_results import TunedPlan
from hetconv.sharding.split import Split
from tests.cli.test_summary import PAIR, captured


class Raced:
    """Rank 0's race, in which a device alone takes ``alone_s``, and plans what
    ``seconds`` says by how they are cut.
    """

    def __init__(
        self,
        seconds: Callable[[Mapping[str, Split]], float | None],
        alone_s: float = 1.0,
    ):
        self.seconds, self.alone_s = seconds, alone_s

    def lead(
        self, order: Order, enough: Callable[[Any], bool] = lambda _: False
    ) -> Outcome:
        took: dict[str, Paced] = {}
        for name, way in order.ways.items():
            found = self.alone_s if isinstance(way, Alone) else self.seconds(way.splits)
            if found is None:
                raise TrialFailedError("on rank 1: there is no more memory")
            took[name] = Paced(found, (1.0, 1.0))
        return Outcome([took] * order.rounds, (1.0, 1.0), (0.0, 0.0), (1.0, 1.0))


class Unsteady(Raced):
    """Each other step of the first plan takes half as long while it is measured first."""

    first: Any = None

    def lead(
        self, order: Order, enough: Callable[[Any], bool] = lambda _: False
    ) -> Outcome:
        found, own = super().lead(order, enough), order.ways.get("trial")
        if own is None or self.first is not None:
            return found
        self.first = own
        (steady, *_), seconds = found.rounds, found.rounds[0]["trial"].seconds
        other = {**steady, "trial": Paced(seconds / 2, (1.0, 1.0))}
        return found._replace(rounds=[steady, other, other, steady, other])


def studied(
    folder: Path,
    seconds: Callable[[Mapping[str, Split]], float | None],
    link: str = "host",
    raced: Callable[[Any], Raced] = Raced,
) -> tuple[TunedPlan | None, tuple[Study, ...], list[str]]:
    """What the stage of plans finds, its studies, and what it says."""
    lines: list[str] = []
    say = SimpleNamespace(
        stage=lambda *_: None, advance=lambda *_: None, line=lines.append
    )
    graph, store = captured(), Store(folder, {}, resume=False)
    run: Any = SimpleNamespace(
        graph=graph,
        job=SimpleNamespace(mode="train", seed=0, budget=100.0, trials=0),
        spent=0.0,
        store=store,
        say=say,
        race=raced(seconds),
        inputs=ModelInputs.of(torch.zeros(2, 4, 16, 16)),
        device=torch.device("cpu"),
        on_gpu=False,
        passed=lambda part: lambda: False,
        known=lambda *_: None,
        keep=lambda *_: None,
    )
    found = _Plans(run, ClusterProfile.from_devices(PAIR, link=link)).found().plan
    return found, studies_of(store), lines


def even(splits: Mapping[str, Split]) -> bool:
    cut = [split for split in splits.values() if split.kind != "replicate"]
    return all(max(split.sizes) - min(split.sizes) <= 1 for split in cut)


FIELD = "uneven height split", "even split by sample"


def test_the_even_split_is_measured_beside_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        plan_search, "near", lambda found, *_: [c for c in found if c.name in FIELD]
    )
    found, studies, _ = studied(tmp_path, lambda splits: 3.0 if even(splits) else 0.5)
    assert found is not None
    assert (found.step_s, found.alone_s, found.even_s) == (0.5, 1.0, 3.0)
    assert (found.name, found.even, found.trials) == (*FIELD, 2)
    assert [(s.title, s.beside) for s in studies] == [("plans", found.alone)]
    assert {t.what: t.value for t in studies[0].trials} == dict(
        zip(FIELD, (0.5, 3.0), strict=True)
    )


def test_an_even_split_that_fails_spoils_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        plan_search, "near", lambda found, *_: [c for c in found if c.name in FIELD]
    )
    found, studies, lines = studied(
        tmp_path, lambda splits: None if even(splits) else 0.5
    )
    assert found is not None
    assert (found.step_s, found.alone_s, found.even, found.even_s) == (
        0.5,
        1.0,
        None,
        None,
    )
    assert [(t.what, t.value, t.why) for t in studies[0].trials if t.value is None] == [
        (FIELD[1], None, "on rank 1: there is no more memory")
    ]
    assert any(
        "beside an even split failed on rank 1: there is no more memory" in line
        for line in lines
    )
    assert not any(
        "side by side" in line for line in lines
    )  # who failed does not race again


def test_a_plan_that_is_surprisingly_slow_is_measured_again(tmp_path: Path) -> None:
    """Something else ran while it did; all others take what is predicted."""
    pricer = StepEstimator(
        captured(), ClusterProfile.from_devices(PAIR, link="host"), "train"
    )
    alone_s = pricer.step_s(
        SINGLE_DEVICE,
        Candidates(captured(), pricer.profile, "train").single_device(0) or {},
    )
    disturbed = iter([9.0])

    def seconds(splits: Mapping[str, Split]) -> float:
        return next(disturbed, 1.0) * pricer.step_s("a split", splits)

    _, studies, _ = studied(
        tmp_path, seconds, raced=lambda of_plans: Raced(of_plans, alone_s)
    )
    assert [s.title for s in studies] == ["plans", "plans again"]
    (first, *_), (again,) = (
        [t for t in s.trials if t.what == studies[0].trials[0].what] for s in studies
    )
    assert first.value is not None
    assert again.value == pytest.approx(first.value / 9)


def test_a_plan_whose_steps_vary_is_measured_again(tmp_path: Path) -> None:
    """What was steady counts, though it was faster at first."""
    pricer = StepEstimator(
        captured(), ClusterProfile.from_devices(PAIR, link="host"), "train"
    )
    alone_s = pricer.step_s(
        SINGLE_DEVICE,
        Candidates(captured(), pricer.profile, "train").single_device(0) or {},
    )
    _, studies, _ = studied(
        tmp_path,
        lambda splits: pricer.step_s("a split", splits) / alone_s,
        raced=Unsteady,
    )
    assert [s.title for s in studies] == ["plans", "plans again"]
    (first, *_), (again,) = (s.trials for s in studies)
    assert first.value is not None
    assert again.value == pytest.approx(2 * first.value)
    assert again.what == first.what


def trial(value: float, noise: float) -> Any:
    return SimpleNamespace(value=value, user_attrs={plan_search.NOISE: noise})


@pytest.mark.parametrize(
    ("first", "second", "counts"),
    [
        ((1.0, 0.01), (2.0, 0.02), 0),
        ((2.0, 0.01), (1.0, 0.02), 1),
        ((1.0, 0.3), (2.0, 0.02), 1),
        ((1.0, 0.3), (2.0, 0.2), 0),
        ((2.0, 0.02), (1.0, 0.3), 0),
    ],
)
def test_of_two_outcomes_the_steady_one_counts_and_then_the_faster(
    first: tuple[float, float], second: tuple[float, float], counts: int
) -> None:
    plan, other, *_ = contenders(
        captured(), ClusterProfile.from_devices(PAIR, link="host")
    )
    tried = [(plan, trial(*first)), (other, trial(9.0, 0.5)), (plan, trial(*second))]
    assert sorted(t.value for _, t in plan_search.least_disturbed(tried)) == [
        (first, second)[counts][0],
        9.0,
    ]


def test_a_device_alone_that_nothing_comes_near_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_search, "near", lambda found, *_: [])
    found, studies, _ = studied(tmp_path, lambda splits: 3.0)
    assert found is not None
    assert found.name == found.alone
    assert (found.step_s, found.alone_s, found.even_s, found.trials) == (
        1.0,
        1.0,
        3.0,
        0,
    )
    assert studies == ()


def test_studies_of_a_database_are_those_of_the_job_since_it_began(
    tmp_path: Path,
) -> None:
    url = f"sqlite:///{tmp_path}/trials.db"

    def store(resume: bool, seed: int = 0) -> Store:
        folder = tmp_path / str(seed)
        folder.mkdir(exist_ok=True)
        return Store(folder, {"seed": seed}, resume=resume, url=url)

    store(False, seed=1).study("ratio", beside="another job's")
    store(False).study("plans 0", "plans", "it")
    store(True).study("plans 1", "plans", "it")
    assert studies_of(store(True)) == (Study("plans", "it", ()),) * 2
    assert studies_of(store(True, seed=1)) == (Study("ratio", "another job's", ()),)
    assert studies_of(store(False)) == ()


def test_an_even_split_is_known_under_the_name_of_a_plan_that_equals_it() -> None:
    graph, alike = captured(), ClusterProfile.from_devices(("cpu", "cpu"), link="host")
    whole = Candidates(graph, alike, "train").whole_models()
    found = contenders(graph, alike)
    known = [c._replace(name="another") if even(c.splits) else c for c in found]
    asked: Sequence[Any] = known
    best = even_split(whole, asked)
    assert best is not None
    assert best[0].startswith(EVEN)
    assert best[1].name == "another"
    assert best[1].predicted.step_s == min(
        c.predicted.step_s for c in known if c.splits in whole_even(whole)
    )
    assert even_split(whole, []) is None


def whole_even(whole: Mapping[str, Any]) -> list[Any]:
    return [splits for name, splits in whole.items() if name.startswith(EVEN)]
