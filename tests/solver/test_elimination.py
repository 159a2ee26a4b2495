"""Minima by elimination and presolve, against brute force and definitions."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetconv.solver.elimination import (
    MAX_BLOCK_ELEMENTS,
    Solution,
    elimination_order,
    min_plus,
    solve,
)
from hetconv.solver.factor_graph import FactorGraph
from hetconv.solver.presolve import contract, prune, undominated
from tests.random_tables import (
    KINDS,
    Array,
    brute,
    check,
    drawn,
    minimize,
    minimize_milp,
    price,
    tables,
)


def test_a_thousand_small_graphs_as_by_brute_force() -> None:
    leasts = []
    for seed in range(1000):
        small = drawn(seed, nodes=8, choices=5)
        leasts.append(brute(*small))
        check(small, leasts[-1])
    assert 20 < np.isinf(leasts).sum() < 500


CHAIN = list(pairwise(range(7)))
GRAPHS = {
    "one": (1, []),
    "isolated": (5, []),
    "chain": (7, CHAIN),
    "star": (7, [(3, v) for v in range(7) if v != 3]),
    "tree": (7, [(v, (v - 1) // 2) for v in range(1, 7)]),
    "cycle": (7, [*CHAIN, (0, 6)]),
    "clique": (6, list(combinations(range(6), 2))),
    "two parts": (7, [(0, 1), (1, 2), (0, 2), (4, 5), (5, 6)]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("graph", GRAPHS)
def test_graphs_of_every_form(graph: str, kind: Callable[..., Array]) -> None:
    n, edges = GRAPHS[graph]
    for seed in range(10):
        found = tables(
            np.random.default_rng(seed),
            [1 + (seed + v) % 5 for v in range(n)],
            edges,
            kind,
        )
        check(found, brute(*found))


@pytest.mark.parametrize("seed", range(60))
def test_merging_what_another_node_decides_leaves_the_least(seed: int) -> None:
    """Of random tables with some nodes more, each decided by another one, and tied to others."""
    rng = np.random.default_rng(seed)
    unary, pairs = drawn(seed, nodes=4, choices=3)
    for k in range(int(rng.integers(1, 4))):
        by, name, choices = (
            str(rng.choice(list(unary))),
            f"w{k}",
            int(rng.integers(1, 4)),
        )
        decided = np.where(
            np.arange(choices) == rng.integers(0, choices, (len(unary[by]), 1)),
            rng.random(),
            np.inf,
        )
        others = [other for other in unary if other != by and rng.random() < 0.7]
        pairs |= {(by, name): decided}
        pairs |= {
            (name, other): KINDS[seed % 3](rng, (choices, len(unary[other])))
            for other in others
        }
        unary[name] = rng.random(choices)
    graph = FactorGraph.of(unary, pairs)
    merged = contract(graph)
    assert {m.node for m in merged.merges} >= {
        v for v, name in enumerate(graph.names) if name.startswith("w")
    }
    rest = merged.graph
    alone = {
        rest.names[v]: table for (v, *more), table in rest.tables.items() if not more
    }
    beside = {
        (rest.names[s[0]], rest.names[s[1]]): table
        for s, table in rest.tables.items()
        if len(s) == 2
    }
    least = brute(unary, pairs)
    assert brute(alone, beside) == pytest.approx(least)
    if np.isfinite(least):
        left, _ = minimize(alone, beside)
        found = merged.restored({v: left[name] for v, name in enumerate(rest.names)})
        assert price(
            {graph.names[v]: k for v, k in found.items()}, unary, pairs
        ) == pytest.approx(least)


def test_a_wide_graph_of_nodes_that_one_decides_is_eliminated() -> None:
    """Each of twelve nodes is decided by one, and tied to every one of twelve others:
    merged, a star is left.
    """
    rng, n = np.random.default_rng(0), 12
    chosen = np.where(np.eye(4), 0.0, np.inf)
    unary = {
        name: rng.random(4)
        for name in ["hub", *(f"{side}{k}" for side in "ab" for k in range(n))]
    }
    pairs = {("hub", f"a{k}"): chosen for k in range(n)}
    pairs |= {
        (f"a{k}", f"b{j}"): rng.random((4, 4)) for k in range(n) for j in range(n)
    }
    found = solve(unary, pairs, memory_bytes=10_000)
    assert found.method == "elimination"
    costs = []
    for hub in range(4):
        own = sum(unary[name][hub] for name in ["hub", *(f"a{k}" for k in range(n))])
        tied = (
            unary[f"b{j}"] + sum(pairs[f"a{k}", f"b{j}"][hub] for k in range(n))
            for j in range(n)
        )
        costs.append(own + sum(both.min() for both in tied))
    assert found.cost == pytest.approx(min(costs))
    assert price(found.choice, unary, pairs) == pytest.approx(min(costs))


def test_nothing_costs_nothing() -> None:
    assert minimize({}, {}) == ({}, 0.0)
    assert solve({}, {}) == Solution({}, 0.0, 0.0, "elimination")
    assert minimize_milp({}, {}) == ({}, 0.0, 0.0)


def test_a_long_chain_as_by_dynamic_programming() -> None:
    rng = np.random.default_rng(0)
    unary = {f"{v:03}": rng.random(40) for v in range(300)}
    pairs = {(u, v): rng.random((40, 40)) for u, v in pairwise(unary)}
    least = unary["000"]
    for (_, v), table in pairs.items():
        least = (least[:, None] + table).min(axis=0) + unary[v]
    check((unary, pairs), least.min())


@pytest.mark.parametrize(
    "shape", [(), (7,), (MAX_BLOCK_ELEMENTS + 5,), (3, 200, 181), (2, 33, 34, 35)]
)
def test_min_plus_by_its_definition(shape: tuple[int, ...]) -> None:
    rng, n = np.random.default_rng(0), 9
    masks = [np.ones(len(shape), dtype=int), *np.eye(len(shape), dtype=int)]
    summands = [rng.random((n, *np.where(mask, shape, 1))) for mask in masks] + [
        rng.random((n, *[1] * len(shape)))
    ]
    out = np.full(shape, np.nan)
    min_plus(summands[::-1], out)
    assert np.allclose(out, reduce(np.add, summands).min(axis=0), rtol=1e-14)


def test_tables_larger_than_a_block_are_made_in_parts() -> None:
    clique = tables(np.random.default_rng(0), [34] * 4, combinations(range(4), 2))
    small, _ = prune(FactorGraph.of(*clique))
    assert (
        max(step.table_bytes for step in elimination_order(small))
        > 8 * MAX_BLOCK_ELEMENTS
    )
    check(clique, brute(*clique))


@given(st.integers(0, 10**6), st.randoms())
def test_neither_the_order_nor_the_names_matter(seed: int, random: Any) -> None:
    unary, pairs = drawn(
        3 * seed, nodes=7, choices=4
    )  # uniform, so that the minimum is unique
    found, cost = minimize(unary, pairs)
    nodes = random.sample(list(unary), len(unary))
    names = dict(
        zip(nodes, random.sample([f"n{i}" for i in range(20)], len(nodes)), strict=True)
    )
    flipped = {
        (v, u) if random.random() < 0.5 else (u, v): (u, v)
        for u, v in random.sample(list(pairs), len(pairs))
    }
    renamed = {
        (names[a], names[b]): pairs[pair] if (a, b) == pair else pairs[pair].T
        for (a, b), pair in flipped.items()
    }
    assert minimize({names[v]: unary[v] for v in nodes}, renamed) == (
        {names[v]: c for v, c in found.items()},
        cost,
    )


@given(st.integers(0, 10**6), st.randoms())
def test_among_equals_the_order_of_mappings_does_not_matter(
    seed: int, random: Any
) -> None:
    unary, pairs = drawn(3 * seed + 1, nodes=7, choices=4)
    shuffled = [
        dict(random.sample(list(table.items()), len(table))) for table in (unary, pairs)
    ]
    assert minimize(*shuffled) == minimize(unary, pairs)


def test_tables_of_both_directions_add_up() -> None:
    a, b = np.array([[0.0, 5], [3, 9]]), np.array([[4.0, 0], [0, 0]])
    assert minimize({"u": [0, 0], "v": [0, 0]}, {("u", "v"): a, ("v", "u"): b}) == (
        {"u": 1, "v": 0},
        3.0,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_only_dominated_choices_are_left_out(kind: Callable[..., Array]) -> None:
    """By the definition; and none that is left is dominated by another one that is."""
    dropped = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        K = int(rng.integers(1, 9))
        own, beside = (
            kind(rng, (K,)),
            [kind(rng, (K, n)) for n in rng.integers(1, 3, int(rng.integers(0, 3)))],
        )
        joint = reduce(
            lambda a, b: (a[:, :, None] + b[:, None]).reshape(K, -1),
            beside,
            own[:, None],
        )
        keep = set(undominated(own, beside).tolist())
        for a in range(K):
            better = {b for b in keep - {a} if (joint[b] <= joint[a]).all()}
            assert np.isinf(joint[a]).all() or bool(better) == (a not in keep)
            assert not np.isinf(own[a]) or a not in keep
        dropped += K - len(keep)
    assert dropped > 100


def test_leaving_out_goes_on_until_nothing_changes() -> None:
    """c's second choice is forbidden, then b's first has nothing to win by, then a's second."""
    unary = {"a": [0.0, 1], "b": [5.0, 0], "c": [0, np.inf]}
    pairs = {("a", "b"): [[0.0, 0], [-3, 0]], ("b", "c"): [[0.0, -9], [0, 0]]}
    _, kept = prune(FactorGraph.of(unary, pairs))
    assert [k.tolist() for k in kept] == [[0], [1], [0]]


def residual(blocks: int) -> list[tuple[str, str]]:
    """Convolutions and additions of a residual net, one block in three with a
    convolution on the short way.
    """
    edges, x = [], "stem"
    for i in range(blocks):
        way = [x, *(f"{i}.{name}" for name in ("conv1", "conv2", "conv3", "add"))]
        edges += pairwise(way)
        edges += [(x, way[-1])] if i % 3 else [(x, f"{i}.down"), (f"{i}.down", way[-1])]
        x = way[-1]
    return edges


def branching(blocks: int) -> list[tuple[str, str]]:
    """Six parallel branches of one to three convolutions between one concatenation and the next."""
    return [
        edge
        for i in range(blocks)
        for b in range(6)
        for edge in pairwise(
            [f"cat{i}", *(f"{i}.{b}.{j}" for j in range(1 + b % 3)), f"cat{i + 1}"]
        )
    ]


@pytest.mark.parametrize(
    "edges", [residual(50), branching(11)], ids=["residual", "branching"]
)
def test_nets_of_blocks_are_two_wide(edges: list[tuple[str, str]]) -> None:
    unary = {v: np.zeros(3) for pair in edges for v in pair}
    steps = elimination_order(
        FactorGraph.of(unary, dict.fromkeys(edges, np.zeros((3, 3))))
    )
    assert len(steps) == len(unary)
    assert max(len(step.neighbours) for step in steps) == 2


def test_nodes_with_one_choice_are_no_dimensions_of_a_table() -> None:
    """Forty of them, each tied to all others and to two nodes with a choice."""
    rng, fixed, free = (
        np.random.default_rng(0),
        [f"f{i}" for i in range(40)],
        ["a", "b"],
    )
    unary: dict[str, Array] = {v: rng.random(1) for v in fixed} | {
        v: rng.random(3) for v in free
    }
    pairs = {
        (u, v): rng.random((len(unary[u]), len(unary[v])))
        for u, v in combinations([*fixed, *free], 2)
    }
    check((unary, pairs), brute(unary, pairs))


def test_numpy_is_never_given_more_dimensions_than_it_takes() -> None:
    """Whatever memory is allowed: 40 nodes of two choices, each tied to all others."""
    unary: dict[str, Array] = {f"v{i}": np.array([0.0, 1.0]) for i in range(40)}
    pairs = dict.fromkeys(combinations(unary, 2), np.array([[0.0, 0.5], [0.25, 1.0]]))
    pairs = {
        pair: table + 0.01 * i * np.array([[0, 1], [1, 0]])
        for i, (pair, table) in enumerate(pairs.items())
    }
    unary = {v: t - [0, 30.0] for v, t in unary.items()}
    assert solve(unary, pairs, memory_bytes=1 << 60, time_limit=0).method == "milp"


ODD = (
    {v: np.zeros(2) for v in "abc"},
    dict.fromkeys(combinations("abc", 2), np.diag([np.inf, np.inf])),
)
