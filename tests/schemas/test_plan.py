"""Plan files are read as they were written; an error names what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from hetconv.errors import PlanError
from hetconv.schemas.plan import LayerPlan, Plan, Prediction
from hetconv.sharding.split import Split
from tests.nets import Chain, plan_of, splits_of


def plan(kind: Any = "filter") -> Plan:
    return plan_of(Chain(), splits_of(Chain(), (kind,), (3, 1)), 2)


def predicted() -> Plan:
    bare = plan()
    layers = {
        n: LayerPlan(x.op, x.split, (0.1, 0.2), (0.3, 0.4), 5)
        for n, x in bare.layers.items()
    }
    prediction = Prediction(1.0, 0.25, (0.5, 0.75), ((0, 8), (4, 0)), (100, 50))
    return Plan(
        ("cuda:0", "cpu@0.5"),
        "infer",
        "m",
        ((1, 3, 8, 8),),
        layers,
        "x",
        prediction,
        {"alone": 2.0},
        True,
    )


def edited(path: Path, change: Any) -> Path:
    plan().save(path)
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(
    "made", [plan(), plan("height"), plan("replicate"), predicted()]
)
def test_a_plan_comes_back_as_it_was(made: Plan, tmp_path: Path) -> None:
    made.save(tmp_path / "new" / "plan.json")
    assert Plan.load(tmp_path / "new" / "plan.json") == made


def test_a_saved_plan_replaces_the_old_one_and_leaves_nothing_else(
    tmp_path: Path,
) -> None:
    plan().save(tmp_path / "plan.json")
    plan("height").save(tmp_path / "plan.json")
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    assert Plan.load(str(tmp_path / "plan.json")) == plan("height")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda d: d.update(colour="red"), "colour"),
        (lambda d: d["layers"]["one"].update(speed=1), r"layers\.one\.speed"),
        (
            lambda d: d["layers"]["one"]["split"].update(kind="diagonal"),
            r"layers\.one\.split",
        ),
        (
            lambda d: d["layers"]["one"]["split"].update(sizes=[8, 1]),
            "'one'.*8 filters",
        ),
        (
            lambda d: d["layers"]["one"]["split"].update(sizes=[4, 2, 2]),
            "'one'.*3 sizes for 2 ranks",
        ),
        (lambda d: d.pop("devices"), "devices"),
        (lambda d: d.update(mode="play"), "mode"),
        (lambda d: d.update(version=99), "version is 99"),
        (lambda d: d.pop("version"), "version is None"),
        (lambda d: d.update(format="hetconv-profile"), "'hetconv-profile'"),
        (lambda d: d.pop("format"), "format is None"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_name(
    change: Any, match: str, tmp_path: Path
) -> None:
    path = edited(tmp_path / "broken.json", change)
    with pytest.raises(PlanError, match=match) as error:
        Plan.load(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "3", "\x00"])
def test_what_is_no_plan_at_all_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=r"broken\.json"):
        Plan.load(path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="not JSON"):
        Plan.load(tmp_path / "broken.json")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"none\.json: cannot be read"):
        Plan.load(tmp_path / "none.json")


def test_with_splits_changes_the_layers_named_alone() -> None:
    changed = predicted().with_splits({"two": Split("height", (1, 1))})
    assert dict(changed.splits) == dict(plan().splits) | {
        "two": Split("height", (1, 1))
    }
    assert (changed.chosen, changed.predicted, changed.alternatives) == (
        "by hand",
        None,
        None,
    )


@pytest.mark.parametrize(
    ("splits", "match"),
    [
        ({"three": Split("filter", (4, 1))}, "'three'.*4 filters"),
        ({"three": Split("filter", (2, 1, 1))}, "'three'.*3 sizes"),
        ({"head": Split("height", (1, 1))}, "'head'.*no height"),
        ({"nowhere": Split("height", (1, 1))}, "no layer 'nowhere'"),
    ],
)
def test_with_splits_refuses_what_does_not_fit(
    splits: dict[str, Split], match: str
) -> None:
    with pytest.raises(PlanError, match=match):
        plan().with_splits(splits)


def test_splits_cannot_be_changed_in_place() -> None:
    with pytest.raises(TypeError):
        plan().splits["one"] = Split("replicate")  # type: ignore[index]


def test_the_digest_is_of_what_ranks_must_agree_on() -> None:
    assert (
        plan().digest == plan_of(Chain(), plan().splits, 2).digest == predicted().digest
    )
    assert plan().digest != plan("height").digest
    assert plan().digest != plan().with_splits({"two": Split("replicate")}).digest
    assert (
        plan_of(nn.Sequential(), {}, 2).digest != plan_of(nn.Sequential(), {}, 3).digest
    )
