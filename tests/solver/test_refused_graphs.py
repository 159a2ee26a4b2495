"""Graphs whose choices are forbidden, and graphs that do not fit, are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hetconv.errors import PlanError
from hetconv.solver.elimination import (
    solve,
)
from tests.random_tables import (
    drawn,
    minimize,
    minimize_milp,
)
from tests.solver.test_elimination import ODD


@pytest.mark.parametrize("function", [minimize, minimize_milp])
def test_a_choice_may_be_forbidden_by_every_table(function: Callable[..., Any]) -> None:
    unary, pairs = (
        {"a": [0, 0], "b": [0, np.inf]},
        {("a", "b"): [[1, np.inf], [0, np.inf]]},
    )
    assert function(unary, pairs)[:2] == ({"a": 1, "b": 0}, 0.0)


@pytest.mark.parametrize(
    ("unary", "pairs", "name"),
    [
        ({"a": [0.0], "b": [np.inf, np.inf]}, {}, "'b'"),
        ({"a": [0.0], "b": [0.0, 1]}, {("a", "b"): [[np.inf, np.inf]]}, "'[ab]'"),
        (
            {"a": [0, np.inf], "b": [0, np.inf]},
            {("a", "b"): [[np.inf, 0], [0, 0]]},
            "'[ab]'",
        ),
        (
            *ODD,
            "'b' is forbidden beside every choice of 'c'",
        ),  # two colours for a triangle
    ],
)
def test_where_all_is_forbidden_a_node_is_named(
    unary: Any, pairs: Any, name: str
) -> None:
    with pytest.raises(PlanError, match=f"every choice of {name}"):
        minimize(unary, pairs)
    with pytest.raises(PlanError, match="every choice is forbidden"):
        minimize_milp(unary, pairs)


@pytest.mark.parametrize(
    ("unary", "pairs", "message"),
    [
        ({"a": []}, {}, r"'a' has shape \(0,\)"),
        ({"a": [[1.0]]}, {}, r"'a' has shape \(1, 1\)"),
        ({"a": [np.nan]}, {}, "'a' holds NaN or -inf"),
        ({"a": [-np.inf]}, {}, "'a' holds NaN or -inf"),
        ({"a": ["x"]}, {}, "'a' holds <U1"),
        ({"a": [1j]}, {}, "'a' holds complex128"),
        ({"a": [0], "b": [0]}, {("a", "b"): [[np.nan]]}, r"\('a', 'b'\) holds NaN"),
        (
            {"a": [0], "b": [0, 0]},
            {("a", "b"): [[0], [0]]},
            r"\('a', 'b'\) has shape \(2, 1\).*\(1, 2\)",
        ),
        ({"a": [0], "b": [0]}, {("a", "b"): [0]}, r"\('a', 'b'\) has shape \(1,\)"),
        ({"a": [0]}, {("a", "c"): [[0]]}, r"\('a', 'c'\) is over no two nodes"),
        ({"a": [0]}, {("c", "a"): [[0]]}, r"\('c', 'a'\) is over no two nodes"),
        ({"a": [0]}, {("a", "a"): [[0]]}, r"\('a', 'a'\) is over no two nodes"),
    ],
)
@pytest.mark.parametrize("function", [minimize, solve, minimize_milp])
def test_what_does_not_fit_is_refused_by_name(
    function: Callable[..., Any], unary: Any, pairs: Any, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        function(unary, pairs)


def test_what_is_given_stays_as_it_was() -> None:
    unary, pairs = drawn(3, nodes=8, choices=5, density=0.5)
    before = [
        {key: table.copy() for key, table in given_tables.items()}
        for given_tables in (unary, pairs)
    ]
    solve(unary, pairs, memory_bytes=0)
    for now, then in zip((unary, pairs), before, strict=True):
        assert all(np.array_equal(now[key], table) for key, table in then.items())
