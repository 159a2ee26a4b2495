"""Ranks that disagree all raise the same error before anything moves or changes, and
nobody waits for a dead one.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hetconv
from hetconv.comm.rank_group import rank_group_of
from hetconv.errors import HetConvError, LostRankError
from hetconv.nn.layers import HetConv2d
from hetconv.schemas.plan import Plan
from hetconv.sharding.layout import Layout
from hetconv.sharding.split import Split
from tests.nets import Chain, ResNet, plan_of, splits_of
from tests.spawn import on_ranks, outcomes

Said = tuple[str, str]  # class and message of the error


def said(action: Callable[[], Any]) -> Said:
    try:
        action()
    except HetConvError as e:
        return type(e).__name__, str(e)
    return "none", ""


def odd_one() -> bool:
    """Whether this rank is the one that differs."""
    return dist.get_rank() == 1


def assert_all_raise(found: list[Said], kind: str, *words: str) -> None:
    assert [name for name, _ in found] == [kind] * len(found)
    assert len({message for _, message in found}) == 1
    for word in words:
        assert word in found[0][1]


def chain_plan(kind: Any = "filter", world: int = 3) -> Plan:
    model = Chain()
    return plan_of(model, splits_of(model, (kind,), (2, 1, 1)[:world]), world)


def unchanged(model: nn.Module, before: nn.Module) -> bool:
    same = all(
        torch.equal(a, b)
        for a, b in zip(model.parameters(), before.parameters(), strict=True)
    )
    return same and [type(m) for m in model.modules()] == [
        type(m) for m in before.modules()
    ]


def parallelizing(how: str) -> tuple[Said, bool]:
    torch.manual_seed(dist.get_rank())  # a broadcast that came too early would show
    model: Any = Chain()
    plan: Any = chain_plan("filter")
    if odd_one():
        model = {"another model": ResNet, "no model": lambda: None}.get(how, Chain)()
        plans = {"another plan": lambda: chain_plan("height"), "no plan": lambda: None}
        plan = plans.get(how, lambda: plan)()
    if how == "another world":
        plan = chain_plan("filter", 2)
    if how == "an unknown layer":
        model.two = nn.Identity()
    if how == "a missing layer":
        del model.head
    before = copy.deepcopy(model)
    error = said(lambda: hetconv.parallelize(model, plan))
    return error, model is None or unchanged(model, before)


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        (
            "another plan",
            "DisagreementError",
            ["rank 0: parallelize", "rank 1: parallelize", "plan "],
        ),
        ("another model", "PlanError", ["on rank 1", "'one'", "no such module"]),
        ("no model", "HetConvError", ["on rank 1", "named_modules"]),
        ("no plan", "HetConvError", ["on rank 1", "world"]),
        ("another world", "PlanError", ["for 2 ranks", "has 3"]),
        ("an unknown layer", "PlanError", ["'two'", "Identity"]),
        ("a missing layer", "PlanError", ["'head'", "no such module"]),
    ],
)
def test_parallelize(how: str, kind: str, words: list[str]) -> None:
    found = on_ranks(3, parallelizing, how)
    assert_all_raise([error for error, _ in found], kind, *words)
    assert all(same for _, same in found)


def calling(how: str) -> tuple[Said, float]:
    model = hetconv.parallelize(Chain(), chain_plan())
    x = torch.ones(2, 4, 16, 16)
    if odd_one():
        changed = {
            "shape": x[:1],
            "dtype": x.double(),
            "values": x * 2,
            "gradients": x.clone().requires_grad_(),
        }
        x = changed.get(how, x)
        model.train(how != "mode")
    with torch.set_grad_enabled(not (how == "no gradients" and odd_one())):
        error = said(lambda: model(x))
    model.train()
    again = torch.full((2, 4, 16, 16), 0.5)
    return error, model(again).sum().item()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("shape", ["(2, 4, 16, 16)", "(1, 4, 16, 16)"]),
        ("dtype", ["torch.float32", "torch.float64"]),
        ("values", ["checksums of input values"]),
        ("gradients", ["requiring gradients"]),
        ("mode", ["training True", "training False"]),
        ("no gradients", ["gradients True", "gradients False"]),
    ],
)
def test_a_forward_with_other_inputs_on_one_rank(how: str, words: list[str]) -> None:
    found = on_ranks(3, calling, how)
    assert_all_raise(
        [error for error, _ in found],
        "DisagreementError",
        "rank 0: forward",
        "rank 1: forward",
        *words,
    )
    assert (
        len({value for _, value in found}) == 1
    )  # the model works as before once the ranks agree


def constructing(options: dict[str, Any]) -> Said:
    given: dict[str, Any] = {"split": Split("filter", (4, 2, 2))}
    return said(lambda: HetConv2d(6, 8, 3, **(given | options if odd_one() else given)))


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        (
            {"split": Split("filter", (4, 4))},
            "SplitError",
            ["on rank 1", "2 sizes for 3 ranks"],
        ),
        (
            {"split": Split("filter", (4, 2, 3))},
            "SplitError",
            ["on rank 1", "adds up to 9"],
        ),
        ({"split": None}, "HetConvError", ["on rank 1"]),
        ({"groups": 5}, "HetConvError", ["on rank 1", "groups"]),
        ({"padding": "full"}, "HetConvError", ["on rank 1", "full"]),
        ({"padding": "same", "stride": 2}, "HetConvError", ["on rank 1", "stride"]),
        ({"padding": -1}, "HetConvError", ["on rank 1", "-1"]),
        ({"dtype": torch.int64}, "HetConvError", ["on rank 1"]),
        ({"output": "whole"}, "HetConvError", ["on rank 1", "whole"]),
        (
            {"stride": 2},
            "DisagreementError",
            ["rank 0: HetConv2d", "rank 1: HetConv2d"],
        ),
        ({"output": "split"}, "DisagreementError", ["replicated", "split"]),
        (
            {"split": Split("height", (4, 2, 2))},
            "DisagreementError",
            ["filter", "height"],
        ),
    ],
)
def test_hetconv2d(options: dict[str, Any], kind: str, words: list[str]) -> None:
    assert_all_raise(on_ranks(3, constructing, options), kind, *words)


def wrapping(how: str) -> tuple[Said, bool]:
    torch.manual_seed(dist.get_rank())
    conv: Any = nn.Conv2d(6, 8, 3)
    split = Split("filter", (4, 2, 2))
    if odd_one():
        conv = {"a linear": nn.Linear(6, 8), "a stride": nn.Conv2d(6, 8, 3, 2)}.get(
            how, conv
        )
        split = Split("filter", (4, 4, 1)) if how == "a split" else split
    before = copy.deepcopy(conv)
    return said(lambda: HetConv2d.from_conv(conv, split)), unchanged(conv, before)


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("a linear", "HetConvError", ["on rank 1", "Linear"]),
        ("a split", "SplitError", ["on rank 1", "adds up to 9"]),
        (
            "a stride",
            "DisagreementError",
            ["rank 0: HetConv2d.from_conv", "stride=(2, 2)"],
        ),
    ],
)
def test_from_conv(how: str, kind: str, words: list[str]) -> None:
    found = on_ranks(3, wrapping, how)
    assert_all_raise([error for error, _ in found], kind, *words)
    assert all(same for _, same in found)


def moving(how: str) -> Said:
    src, dst = Layout.replicated((6,), 3), Layout.sharded((6,), 0, (3, 2, 1))
    local: Any = torch.zeros(6)
    if odd_one():
        local = {
            "shape": torch.zeros(5),
            "gradient": torch.zeros(6).requires_grad_(),
            "type": None,
        }.get(how, local)
        dst = Layout.sharded((6,), 0, (1, 2, 3)) if how == "layout" else dst
        src = Layout.replicated((6,), 2) if how == "world" else src
    return said(lambda: hetconv.redistribute(local, src, dst))


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("shape", "LayoutError", ["on rank 1", "(5,)", "(6,)"]),
        ("world", "LayoutError", ["on rank 1", "2 and 3 ranks", "group of 3"]),
        ("type", "HetConvError", ["on rank 1"]),
        (
            "layout",
            "DisagreementError",
            ["rank 0: redistribute", "rank 1: redistribute"],
        ),
        ("gradient", "DisagreementError", ["True", "False"]),
    ],
)
def test_redistribute(how: str, kind: str, words: list[str]) -> None:
    assert_all_raise(on_ranks(3, moving, how), kind, *words)


def loading(how: str) -> tuple[Said, bool]:
    model = hetconv.parallelize(Chain(), chain_plan())
    state: Any = {
        k: torch.zeros_like(v) for k, v in hetconv.full_state_dict(model).items()
    }
    before = copy.deepcopy(model)
    if odd_one():
        if how == "missing":
            del state["one.bias"]
        elif how == "shape":
            state["one.bias"] = torch.zeros(3)
        else:
            state = None
    return said(lambda: hetconv.load_full_state_dict(model, state)), unchanged(
        model, before
    )


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("missing", "HetConvError", ["on rank 1", "missing ['one.bias']"]),
        ("shape", "HetConvError", ["on rank 1", "one.bias: (3,), expected (8,)"]),
        ("none", "HetConvError", ["on rank 1", "NoneType"]),
    ],
)
def test_load_full_state_dict(how: str, kind: str, words: list[str]) -> None:
    found = on_ranks(3, loading, how)
    assert_all_raise([error for error, _ in found], kind, *words)
    assert all(same for _, same in found)


def standing_alone() -> Said:
    conv = HetConv2d(3, 4, 3, split=Split("height", (1, 1, 1)))
    return said(lambda: conv(torch.zeros(1, 3, 9 if odd_one() else 8, 8)))


def test_a_convolution_by_itself() -> None:
    assert_all_raise(
        on_ranks(3, standing_alone), "DisagreementError", "(1, 3, 8, 8)", "(1, 3, 9, 8)"
    )


def dying(where: str, kind: Any) -> Said:
    """Rank 1 dies in the middle of a step."""
    model = hetconv.parallelize(Chain(), chain_plan(kind))
    x = torch.ones(2, 4, 16, 16, requires_grad=True)

    def die(*_: Any) -> None:
        os._exit(1)

    if odd_one():
        if where == "forward":
            model.two.register_forward_pre_hook(die)
        elif where == "backward":
            model.pool.register_forward_hook(
                lambda module, args, y: y.local.register_hook(die) and None
            )
        else:
            die()

    def step() -> Tensor:
        y = model(x)
        y.sum().backward()
        return y

    return said(step)


@pytest.mark.parametrize("kind", ["height", "channel"])
@pytest.mark.parametrize("where", ["between steps", "forward", "backward"])
def test_the_others_learn_of_a_dead_rank(where: str, kind: str) -> None:
    (ok, first), (alive, _), (also, last) = outcomes(3, dying, where, kind)
    assert ok
    assert also
    assert not alive
    for name, message in (first, last):
        assert name == LostRankError.__name__
        assert "another rank" in message


def all_alone() -> Said:
    return said(lambda: HetConv2d(6, 8, 3, split=Split("filter", (4, 4))))


def test_one_rank_alone_is_told_as_well() -> None:
    assert_all_raise(on_ranks(1, all_alone), "SplitError", "2 sizes for 1 ranks")


def test_without_a_process_group_the_error_says_what_to_do() -> None:
    with pytest.raises(HetConvError, match="torchrun"):
        rank_group_of()
