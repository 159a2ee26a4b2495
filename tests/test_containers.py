"""Tensors inside containers and objects of all kinds, also of those that refer to each other."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from hetconv.containers import map_tensors, tensors_in
from hetconv.errors import HetConvError


class Node:
    """An object that may refer to others."""

    def __init__(self, x: Tensor | None = None) -> None:
        self.x = x
        self.other: Any = None

    def method(self) -> None: ...


class Pair(NamedTuple):
    first: Any
    second: Any


def doubled(x: Tensor) -> Tensor:
    return x * 2


def ones(n: int) -> Tensor:
    return torch.ones(n)


def test_objects_that_refer_to_each_other() -> None:
    a, b = Node(ones(2)), Node(ones(3))
    a.other, b.other = b, a
    for new in (map_tensors(doubled, [a, b])[0], map_tensors(doubled, a)):
        assert new.other.other is new
        assert torch.equal(new.x, 2 * ones(2))
        assert torch.equal(new.other.x, 2 * ones(3))
    assert torch.equal(a.x, ones(2))
    assert b.other is a


def test_an_object_without_tensors_that_refers_to_one_with_some() -> None:
    a, b = Node(ones(2)), Node()
    a.other, b.other = b, a
    new = map_tensors(doubled, b)
    assert new is not b
    assert new.other.other is new
    assert torch.equal(new.other.x, 2 * ones(2))


def test_containers_that_hold_themselves() -> None:
    of_list: list[Any] = [ones(1)]
    of_list.append((of_list, {"list": of_list}))
    new = map_tensors(doubled, of_list)
    assert new[1][0] is new
    assert new[1][1]["list"] is new
    assert torch.equal(new[0], 2 * ones(1))
    tuple_first = of_list[1]
    again = map_tensors(doubled, tuple_first)
    assert again[0][1] is again


def test_what_holds_no_tensor_stays_the_very_object() -> None:
    empty: list[Any] = []
    empty.append(empty)
    assert map_tensors(doubled, empty) is empty
    held = Node()
    found = map_tensors(doubled, {"x": ones(1), "held": held})
    assert found["held"] is held


@pytest.mark.parametrize(
    "made",
    [lambda x: [x], lambda x: (x, 1), lambda x: Pair(x, "a"), lambda x: {"x": x}, lambda x: OrderedDict(x=x),
     lambda x: {x}, lambda x: frozenset([x]), lambda x: deque([x], 3), lambda x: defaultdict(list, x=x), Node],
)  # fmt: skip
def test_every_kind_keeps_its_type(made: Any) -> None:
    x = ones(2)
    value = made(x)
    new = map_tensors(doubled, value)
    assert type(new) is type(value)
    (y,) = tensors_in(new)
    assert torch.equal(y, 2 * x)
    assert [id(t) for t in tensors_in(value)] == [id(x)]


def test_a_method_goes_on_with_the_new_object() -> None:
    node = Node(ones(2))
    node.other = node.method
    new = map_tensors(doubled, node)
    assert new.other.__self__ is new


@pytest.mark.parametrize("kind", [set, frozenset])
def test_several_tensors_in_a_set_are_refused(kind: Any) -> None:
    """Ranks would find them in different orders."""
    with pytest.raises(HetConvError, match=f"a {kind.__name__} of 2 tensors.*give a list"):
        map_tensors(doubled, kind([ones(1), ones(1)]))


def test_a_closure_over_a_tensor_is_refused() -> None:
    x = ones(1)
    with pytest.raises(HetConvError, match=r"a function was found.*cannot be reached"):
        map_tensors(doubled, [lambda: x])
    assert map_tensors(doubled, [len])[0] is len


def test_long_chains() -> None:
    chain: Any = ones(1)
    for _ in range(300):
        chain = [chain]
    new = map_tensors(doubled, chain)
    for _ in range(300):
        (new,) = new
    assert torch.equal(new, 2 * ones(1))
