"""Memory limits are met where anything meets them; else the error names what would."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch

import hetconv
from hetconv.cost.estimator import estimate
from hetconv.planner import memory_limits
from hetconv.planner.candidates import Candidates
from hetconv.planner.cost_tables import CostTables, ReceiveBuffers
from hetconv.planner.memory_limits import MemoryOfChoice, least_memory, solve_within
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import Plan
from hetconv.sharding.split import SplitKind
from hetconv.tracing.graph import Graph
from tests.nets import ResNet, UNet

PROFILE = ClusterProfile.from_devices(
    "A100-SXM4-80GB, V100-SXM2-32GB, T4", link="pcie3-x16"
)
GB = re.compile(r"the leanest needs ([\d., e+-]+) GB per device")


def unet() -> Graph:
    return hetconv.capture(UNet(), torch.randn(8, 3, 96, 96))


def memory(plan: Plan) -> tuple[int, ...]:
    assert plan.predicted is not None
    return plan.predicted.memory_bytes


def test_a_cap_that_only_an_uneven_plan_meets_is_met() -> None:
    """Two devices have room for a fifth of what the third one holds: no even split
    fits, and none alone.
    """
    graph = unet()
    whole = max(memory(hetconv.make_plan(graph, PROFILE, kinds=("replicate",))))
    caps = 0.9 * whole, 0.3 * whole, 0.2 * whole
    plan = hetconv.make_plan(graph, PROFILE, memory_limit=caps)
    assert all(m <= c for m, c in zip(memory(plan), caps, strict=True))
    candidates = Candidates(graph, PROFILE, "train")
    for name, splits in candidates.whole_models().items():
        if name.startswith(("even split", "fastest device alone", "replicated")):
            used = estimate(graph, PROFILE, splits, "train")[0].memory_bytes
            assert any(m > c for m, c in zip(used, caps, strict=True)), name


@pytest.mark.parametrize("kinds", [("sample",), ("height", "filter"), None])
def test_a_refusal_names_memory_with_which_planning_succeeds(
    kinds: tuple[SplitKind, ...] | None,
) -> None:
    graph = hetconv.capture(ResNet(), torch.randn(6, 3, 64, 64))
    with pytest.raises(hetconv.PlanError, match="no split fits") as refused:
        hetconv.make_plan(graph, PROFILE, memory_limit=(2e5, 1e5, 5e4), kinds=kinds)
    found = GB.search(str(refused.value))
    assert found is not None
    needed = [
        1.01e9 * float(s) for s in found[1].split(",")
    ]  # three digits are printed
    plan = hetconv.make_plan(graph, PROFILE, memory_limit=needed, kinds=kinds)
    assert all(m <= n for m, n in zip(memory(plan), needed, strict=True))


def test_less_memory_never_makes_a_step_faster() -> None:
    """But for what the rounding of shares to rows or samples happens to gain."""
    graph = unet()
    whole = max(memory(hetconv.make_plan(graph, PROFILE, kinds=("replicate",))))
    steps = []
    for part in (1.0, 0.7, 0.45):
        plan = hetconv.make_plan(graph, PROFILE, memory_limit=part * whole)
        assert plan.predicted is not None
        assert max(memory(plan)) <= part * whole
        steps.append(plan.predicted.step_s)
    assert steps[0] < 1.05 * steps[1] < steps[2]


def built(
    held: Mapping[str, Sequence[Sequence[float]]], slower_s: Sequence[float]
) -> tuple[CostTables, MemoryOfChoice]:
    """Operators of two choices each on two devices. ``held``: by choice; the second one
    takes as much longer.
    """
    tables = CostTables()
    for (name, sizes), more in zip(held.items(), slower_s, strict=True):
        tables.add(name, np.array([1.0, 1.0 + more]))
        tables.add_bytes(name, np.array(sizes, dtype=float))

    def used(choice: Mapping[str, int]) -> tuple[float, ...]:
        return tuple(
            sum(held[name][k][device] for name, k in choice.items())
            for device in range(2)
        )

    return tables, used


def plain() -> tuple[CostTables, MemoryOfChoice]:
    """The faster choice takes 4 bytes of one device, the slower one a byte."""
    return built(
        {"a": [(4, 1), (1, 1)], "b": [(4, 1), (1, 1)], "c": [(1, 4), (1, 1)]},
        (1.0, 2.0, 3.0),
    )


@pytest.mark.parametrize("asks_highs", [True, False])
@pytest.mark.parametrize(
    ("caps", "best"),
    [
        ((9.0, 9.0), (0, 0, 0)),
        ((6.0, 6.0), (1, 0, 0)),
        ((9.0, 5.0), (0, 0, 1)),
        ((3.0, 3.0), (1, 1, 1)),
    ],
)
def test_the_cheapest_choice_within_caps(
    caps: tuple[float, float],
    best: tuple[int, ...],
    asks_highs: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not asks_highs:
        monkeypatch.setattr(memory_limits, "_by_highs", lambda *_: None)
    tables, used = plain()
    assert solve_within(tables, caps, used) == dict(zip("abc", best, strict=True))


def test_nothing_within_caps() -> None:
    tables, used = plain()
    assert solve_within(tables, (2.0, 9.0), used) is None


def test_the_least_memory_is_found_by_raising_the_price_of_what_is_exceeded() -> None:
    """Bytes at equal prices would all be put on the second device."""
    tables, used = built(
        {"a": [(3, 0), (0, 2)], "b": [(5, 0), (0, 3)], "c": [(7, 0), (0, 4)]},
        (1.0, 1.0, 1.0),
    )
    assert least_memory(tables, (2.0, 2.0), used) == (3, 7)


@pytest.mark.parametrize("asks_highs", [True, False])
def test_copies_between_two_operators_count(
    asks_highs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where two choose differently the second one gets a copy, for which there is no room."""
    if not asks_highs:
        monkeypatch.setattr(memory_limits, "_by_highs", lambda *_: None)
    tables = CostTables()
    tables.add("a", np.array([1.0, 2.0]))
    tables.add("b", np.array([2.0, 1.5]))
    tables.add_pair("b", "a", np.zeros((2, 2)))
    copied = np.array(
        [[[0.0], [5.0]], [[7.0], [0.0]]]
    )  # (choices of b, choices of a, devices)
    tables.receive_buffers.append(ReceiveBuffers("b", "a", lambda: copied))

    def used(choice: Mapping[str, int]) -> tuple[float, ...]:
        return tuple(copied[choice["b"], choice["a"]])

    assert solve_within(tables, (9.0,), used) == {"a": 0, "b": 1}
    assert solve_within(tables, (6.0,), used) == {"a": 0, "b": 0}


def test_a_layer_that_gathers_counts_what_it_gathers() -> None:
    """By filter every rank holds the whole input of a layer, by height its own rows."""
    graph = hetconv.capture(UNet(), torch.randn(1, 3, 96, 96))
    used = {}
    for kind in ("height", "filter"):
        splits = Candidates(graph, PROFILE, "train").whole(kind, (1.0, 1.0, 1.0))
        used[kind] = max(estimate(graph, PROFILE, splits, "train")[0].memory_bytes)
    assert used["filter"] > 1.5 * used["height"]
