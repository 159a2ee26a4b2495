"""Tensors inside containers and objects, which may refer to each other."""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hetconv.containers import map_tensors, tensors_in
from hetconv.errors import HetConvError

ZERO, ONE = torch.zeros(1), torch.ones(1)


def other(x: Tensor) -> Tensor:
    return x + 10


class Slots:
    __slots__ = ("beside", "x")


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    beside: Any


class Bound:
    def __init__(self) -> None:
        self.x, self.call = ZERO, self.value

    def value(self) -> Tensor:
        return self.x


def two_objects() -> Any:
    a, b = SimpleNamespace(x=ZERO), SimpleNamespace(x=ONE)
    a.beside, b.beside = b, a
    return a


def slots() -> Any:
    a, b = Slots(), Slots()
    a.x, b.x, a.beside, b.beside = ZERO, ONE, b, a
    return a


def through(make: Callable[[Any], Any]) -> Callable[[], Any]:
    """An object that holds itself in a container."""

    def made() -> Any:
        a = SimpleNamespace(x=ZERO)
        a.beside = make(a)
        return a

    return made


def of_mapping(kind: type[Any], *args: Any) -> Any:
    found = kind(*args)
    found["x"], found["self"] = ZERO, found
    return found


def own_list() -> Any:
    found: list[Any] = [ZERO]
    found.append(found)
    return found


def tuple_first() -> Any:
    inside: list[Any] = [ZERO]
    found = (inside, inside)
    inside.append(found)
    return found


CYCLES: dict[str, Callable[[], Any]] = {
    "objects": two_objects,
    "slots": slots,
    "itself": through(lambda a: a),
    "list": through(lambda a: [a, ONE]),
    "tuple": through(lambda a: (a, (a, ONE))),
    "dict": through(lambda a: {"a": a, "x": ONE}),
    "deque": through(lambda a: deque([a, ONE], maxlen=3)),
    "set": through(lambda a: {(1, 2), 3, ONE}),
    "frozenset": through(lambda a: frozenset([ONE])),
    "frozen dataclass": through(lambda a: Frozen(ONE, a)),
    "size and values": through(lambda a: torch.return_types.max((ONE, ZERO))),
    "view": through(lambda a: {"a": a, "x": ONE}.values()),
    "items": through(lambda a: {"a": a, "x": ONE}.items()),
    "proxy": through(lambda a: MappingProxyType({"a": a, "x": ONE})),
    "method": Bound,
    "own list": own_list,
    "tuple first": tuple_first,
    "own dict": lambda: of_mapping(dict),
    "own OrderedDict": lambda: of_mapping(OrderedDict),
    "own defaultdict": lambda: of_mapping(defaultdict, list),
}


def reached(value: Any) -> list[Any]:
    """Returns all objects that can be reached by Python's own means, in some order."""
    found: dict[int, Any] = {}
    left = [value]
    while left:
        x = left.pop()
        if id(x) in found or isinstance(x, (type, str, int, type(None))):
            continue
        found[id(x)] = x
        if isinstance(x, (dict, MappingProxyType)):
            left += x.values()
        elif isinstance(
            x, (list, tuple, set, frozenset, deque, type({}.values()), type({}.items()))
        ):
            left += x
        elif not isinstance(x, Tensor):
            left += [
                getattr(x, name)
                for name in ("x", "beside", "call", "__self__")
                if hasattr(x, name)
            ]
    return [*found.values()]


@pytest.mark.parametrize("make", CYCLES.values(), ids=CYCLES)
def test_in_a_cycle_everything_is_the_copys_own(make: Callable[[], Any]) -> None:
    before = make()
    kinds = sorted(type(x).__name__ for x in reached(before))
    found = map_tensors(other, before)
    tensors = [float(x) for x in reached(found) if isinstance(x, Tensor)]
    assert tensors
    assert min(tensors) >= 10
    assert sorted(type(x).__name__ for x in reached(found)) == kinds
    assert sorted(float(x) + 10 for x in tensors_in(before)) == sorted(
        tensors
    )  # the original is what it was


@pytest.mark.parametrize("make", CYCLES.values(), ids=CYCLES)
def test_where_no_tensor_changes_nothing_is_copied(make: Callable[[], Any]) -> None:
    before = make()
    assert map_tensors(lambda x: x, before) is before


def test_what_does_not_change_stays_the_same_object() -> None:
    same, before = [ONE], two_objects()
    before.beside.kept = same
    found = map_tensors(lambda x: x if x is ONE else other(x), before)
    assert found.beside.kept is same
    assert found.beside.beside is found
    assert found.beside.x is ONE


def test_tensors_are_found_in_order_and_once() -> None:
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    found = tensors_in([(a, {"b": [b]}), SimpleNamespace(x=c, y=a), b])
    assert [id(x) for x in found] == [id(a), id(b), id(c)]


def test_long_chains_are_searched() -> None:
    chain: Any = ONE
    for _ in range(5000):
        chain = [chain]
    assert tensors_in(chain) == [ONE]


def held_by_a_function() -> Any:
    inside = ONE
    return SimpleNamespace(call=lambda: inside)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (iter([ONE]), "a list_iterator was found"),
        (held_by_a_function(), "a function was found"),
        (functools.partial(torch.add, ONE), "a partial was found"),
        ({ONE, ZERO}, "a set of 2 tensors, or of what holds them, was found"),
        ([frozenset([ONE, (ZERO, 1)])], "a frozenset of 2 tensors"),
    ],
)
def test_what_cannot_be_reached_is_refused(value: Any, said: str) -> None:
    with pytest.raises(HetConvError, match=said):
        map_tensors(other, value)
    assert len(tensors_in(value, opaque=True)) in (0, 2)


def test_a_registered_container_that_contains_itself_is_refused() -> None:
    class Registered:
        inside: Any = None

    torch.utils._pytree.register_pytree_node(
        Registered, lambda r: ([ONE, r.inside], None), lambda parts, _: Registered()
    )
    value = Registered()
    value.inside = value
    with pytest.raises(
        HetConvError, match="a Registered that contains itself was found"
    ):
        map_tensors(other, value)
