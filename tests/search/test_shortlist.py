"""Which plans are timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from hetconv.autotune.search.shortlist import even_split, key_of, shortlist
from hetconv.planner.candidates import EVEN, Candidates
from hetconv.planner.make_plan import Contender, contenders
from hetconv.planner.partition import Splits
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import Prediction
from hetconv.sharding.split import Split, SplitKind
from tests.cli.test_summary import captured

SINGLE_DEVICE = "fastest device alone (0: cpu)"


def contender(
    name: str, step_s: float, sizes: tuple[int, int], kind: SplitKind = "height"
) -> Contender:
    splits = {"conv": Split(kind, sizes)}
    return Contender(name, splits, Prediction(step_s, 0.0, (), (), ()), {})


def rows(step_s: float, k: int = 1) -> Contender:
    return contender(f"rows {k}", step_s, (k, 1))


@pytest.mark.parametrize(
    ("seconds", "names"),
    [
        ({SINGLE_DEVICE: 1.0, "a": 1.4, "b": 1.2, "c": 1.51}, ["b", "a"]),
        ({SINGLE_DEVICE: 1.0, "a": 2.1, "b": 2.2}, []),
        ({"a": 3.0, "b": 1.0, "c": 1.3}, ["b"]),
        ({SINGLE_DEVICE: 1.0}, []),
        (
            {SINGLE_DEVICE: 1.0} | {f"{k}": 0.5 + k / 1000 for k in range(9)},
            ["0", "1", "2", "3", "4", "5"],
        ),
    ],
)
def test_who_may_be_the_fastest_is_timed(
    seconds: Mapping[str, float], names: list[str]
) -> None:
    planned = [
        contender(name, s, (k + 1, 1)) for k, (name, s) in enumerate(seconds.items())
    ]
    assert [c.name for c in shortlist(planned)] == names


def test_of_every_kind_one_is_timed_after_the_three_likeliest() -> None:
    best, others = rows(1.0), [rows(1.1 + k / 100, k) for k in range(2, 6)]
    filters = contender("filters", 1.8, (1, 1), "filter")
    more_filters = contender("more filters", 1.9, (2, 1), "filter")
    far = contender("far", 3.9, (1, 1), "channel")
    too_far = contender("too far", 4.1, (1, 1), "width")
    whole = best._replace(name="replicated", splits={"conv": Split("replicate")})
    planned = [far, best, *others, filters, more_filters, too_far, whole]
    assert shortlist(planned) == [best, *others[:2], filters, far, *others[2:]]


def test_a_plan_is_of_the_kind_of_most_layers_that_it_splits() -> None:
    cut, filters = Split("height", (1, 1)), Split("filter", (1, 1))
    mixed = rows(1.0)._replace(splits={"a": cut, "b": cut, "c": filters})
    of_filters = contender("filters", 1.8, (1, 1), "filter")
    assert shortlist([mixed, of_filters]) == [mixed, of_filters]


def test_the_even_split_is_timed_with_the_other_kinds() -> None:
    best, even = rows(1.0), rows(1.9, 2)
    assert shortlist([best, even]) == [best]
    assert shortlist([best, even], even) == [best, even]
    too_far = rows(4.1, 2)
    assert shortlist([best, too_far], too_far) == [best]
    assert shortlist([best], best) == [best]


def even(splits: Splits) -> bool:
    cut = [split for split in splits.values() if split.kind != "replicate"]
    return all(max(split.sizes) - min(split.sizes) <= 1 for split in cut)


def test_an_even_split_is_known_under_its_own_name() -> None:
    graph, alike = captured(), ClusterProfile.from_devices(("cpu", "cpu"), link="host")
    whole = Candidates(graph, alike, "train").whole_models()
    planned: Sequence[Contender] = [
        c._replace(name="another") if even(c.splits) else c
        for c in contenders(graph, alike)
    ]
    found = even_split(whole, planned)
    assert found is not None
    assert found.name.startswith(EVEN)
    assert found.splits == whole[found.name]
    fitting = [
        c.predicted.step_s
        for name, splits in whole.items()
        for c in planned
        if name.startswith(EVEN) and c.splits == splits
    ]
    assert found.predicted.step_s == min(fitting)
    assert even_split(whole, []) is None


def test_plans_are_told_apart_by_every_part_of_their_splits() -> None:
    one = Split("channel", (4, 4))
    nodes = Split("channel", (4, 4, 4, 4), nodes=((2, 1), (2, 1)))
    plans: list[Splits] = [
        {"a": one},
        {"b": one},
        {"a": one, "b": one},
        {"a": replace(one, whole=True)},
        {"a": Split("channel", (5, 3))},
        {"a": Split("filter", (4, 4))},
        {"a": nodes},
        {"a": replace(nodes, nodes=((2, 1), (2, 3)))},
    ]
    assert len({key_of(splits) for splits in plans}) == len(plans)
    assert key_of({"a": one, "b": nodes}) == key_of({"b": nodes, "a": one})
