"""The study of tiles, on tables instead of a GPU."""

from __future__ import annotations

import random
from math import inf
from statistics import median
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetconv.autotune.search.tile_search import (
    Choice,
    WrongResultError,
    heuristic,
    search,
    space,
)
from hetconv.kernels import Tile
from hetconv.kernels.triton.backend import usable_tile
from tests.kernels.test_tiles import chips, extents
from tests.tile_tables import Table, load

TABLES = load()
NAMES = [t.name for t in TABLES]
PART = 0.15  # of a table, that a search may ask for
every_table = pytest.mark.parametrize("table", TABLES, ids=NAMES)


def noisy(table: Table, seed: int, noise: float = 0.01) -> Any:
    """The table as a stopwatch would read it."""
    dice = random.Random(seed)
    return lambda choice: table(choice) * (1 + noise * dice.uniform(-1, 1))


def without_aten(evaluate: Any) -> Any:
    def called(choice: Choice) -> float:
        if choice == "aten":
            raise RuntimeError("left out")
        return float(evaluate(choice))

    return called


def test_there_are_tables_of_every_pass() -> None:
    assert {t.name.split(", ")[1] for t in TABLES} == {
        "forward",
        "input gradient",
        "weight gradient",
    }
    assert sum(len(t.rows) for t in TABLES) > 500
    assert all(t.bad for t in TABLES)


@every_table
def test_a_small_part_of_a_table_finds_nearly_the_best(table: Table) -> None:
    """Within 3 % in the median of 20 seeds, of the stopwatch's noise: the search itself
    has no chance in it.
    """
    regrets = []
    for seed in range(20):
        asked = table.again()
        found = search(
            table.tiles,
            table.heuristic,
            without_aten(noisy(asked, seed)),
            trials=int(PART * len(table.rows)),
        )
        assert found is not None
        assert len(asked.asked) <= PART * len(table.rows)
        assert str(found.choice) not in table.bad
        regrets.append(table(found.choice) / table.best)
    assert median(regrets) <= 1.03


@every_table
@pytest.mark.parametrize("warps", [4, 8])
def test_a_cost_model_that_errs_is_mended(table: Table, warps: int) -> None:
    """Some tiles are believed half as slow; a quarter of a table then comes within 15 %."""
    believed = {
        t: cost / 2 if t.warps == warps else cost for t, cost in table.tiles.items()
    }
    found = search(
        believed, table.heuristic, without_aten(table), trials=len(table.rows) // 4
    )
    assert found is not None
    assert found.seconds <= 1.15 * table.best


@every_table
def test_what_fails_or_is_wrong_is_asked_once_and_never_chosen(table: Table) -> None:
    asked = table.again()
    found = search(table.tiles, table.heuristic, asked, trials=1000, patience=1000)
    assert found is not None
    assert sorted(asked.asked) == sorted(
        table.rows
    )  # every choice once, as nothing stopped it
    assert str(found.choice) not in table.bad
    assert (
        found.seconds
        == min(row["us"] for row in table.rows.values() if "us" in row) * 1e-6
    )
    why = {
        str(t.choice): t.why.partition(":")[0]
        for t in found.trials
        if t.seconds is None
    }
    assert why == {
        choice: "wrong" if "wrong" in table.rows[choice] else "failed"
        for choice in table.bad
    }


costs = st.dictionaries(
    st.sampled_from(list(TABLES[0].tiles)), st.floats(1, 100), min_size=1, max_size=20
)
outcomes = st.one_of(
    st.floats(1e-6, 1.0),
    st.sampled_from([WrongResultError("off"), RuntimeError("no memory")]),
)


@settings(max_examples=40)
@given(costs, st.data(), st.integers(0, 12), st.integers(1, 5))
def test_never_worse_than_the_heuristic(
    costs: dict[Tile, float], data: st.DataObject, trials: int, patience: int
) -> None:
    first = data.draw(st.sampled_from(list(costs)))
    table: dict[Choice, Any] = {c: data.draw(outcomes) for c in (*costs, "aten")}
    asked: list[Choice] = []

    def evaluate(choice: Choice) -> float:
        asked.append(choice)
        if isinstance(table[choice], Exception):
            raise table[choice]
        return float(table[choice])

    found = search(costs, first, evaluate, trials=trials, patience=patience)
    assert asked[:2] == [first, "aten"][:trials]
    assert len(asked) == len(set(asked)) <= trials
    ran = {c: table[c] for c in asked if not isinstance(table[c], Exception)}
    assert (found is None) == (not ran)
    if found is not None:
        assert found.seconds == min(ran.values()) == ran[found.choice]
        assert found.heuristic_s == ran.get(first)
        assert found.choice == first or found.seconds < ran.get(first, inf)


def test_a_search_repeats_itself() -> None:
    runs = [
        search(TABLES[1].tiles, TABLES[1].heuristic, noisy(TABLES[1].again(), 5))
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


def test_a_search_stops_when_told_or_when_nothing_gets_better() -> None:
    table = TABLES[0].again()
    assert (
        search(
            table.tiles, table.heuristic, table, enough=lambda: len(table.asked) >= 7
        )
        is not None
    )
    assert len(table.asked) == 7
    asked: list[Choice] = []
    found = search(
        table.tiles, table.heuristic, lambda c: asked.append(c) or 1.0, patience=4
    )  # type: ignore[func-returns-value]
    assert found is not None
    assert (found.choice, len(asked)) == (table.heuristic, 2 + 4)
    assert search(table.tiles, table.heuristic, table, enough=lambda: True) is None


def test_a_resumed_search_asks_for_nothing_again() -> None:
    table = TABLES[2].again()
    first = search(table.tiles, table.heuristic, table, trials=10, patience=99)
    assert first is not None
    before, again = set(table.asked), table.again()
    found = search(
        table.tiles, table.heuristic, again, trials=10, patience=99, known=first.trials
    )
    assert found is not None
    assert again.asked
    assert not before & set(again.asked)
    assert found.trials[: len(first.trials)] == first.trials
    assert found.seconds <= first.seconds
    assert found.heuristic_s == first.heuristic_s
    through = search(
        table.tiles, table.heuristic, table.again(), trials=20, patience=99
    )
    assert through is not None
    assert [t.choice for t in through.trials] == [t.choice for t in found.trials]


def test_what_the_compiler_is_against_is_never_launched() -> None:
    table = TABLES[0].again()
    others = [t for t in table.tiles if t != table.heuristic]
    broken = {t for t in others if t.split_k > 1}
    dear = {t for t in others if t.stages == 3} - broken

    def obstacle(tile: Tile) -> str | None:
        if tile in broken:
            raise RuntimeError("does not compile")
        return "12 spills" if tile in dear else None

    found = search(
        table.tiles,
        table.heuristic,
        table,
        obstacle=obstacle,
        trials=1000,
        patience=1000,
    )
    assert found is not None
    assert broken
    assert dear
    assert not {str(t) for t in broken | dear} & set(table.asked)
    why = {t.choice: t.why for t in found.trials}
    assert all(why[t] == "pruned: 12 spills" for t in dear)
    assert all(why[t].startswith("failed: RuntimeError") for t in broken)


@settings(max_examples=30)
@given(extents(), chips)
def test_the_space_has_the_splits_that_leave_no_program_without_a_step(
    work: Any, chip: Any
) -> None:
    found = space([work], chip)
    assert all(usable_tile(t, work, chip) == t for t in found)
    assert all(
        (t.split_k - 1) * -(-work.steps(t) // t.split_k) < work.steps(t) for t in found
    )
    assert all(cost > 0 for cost in found.values())
    assert usable_tile(heuristic([work], chip), work, chip)
