"""Tensors inside whatever Python code passes and returns.

These are tuples, dicts, dataclasses, outputs of libraries, and other objects.
"""

from __future__ import annotations

import copy
import enum
import functools
import io
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, ItemsView, Iterable, Iterator, ValuesView
from dataclasses import fields, is_dataclass
from types import (
    BuiltinFunctionType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from .errors import HetConvError
from .torch_internals import tree_node_types

# Values that hold no tensor of a result. A module holds its own; it is no container of
# what a call returns.
_LEAVES: tuple[type, ...] = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    bytearray,
    range,
    slice,
    enum.Enum,
    type,
    ModuleType,
    nn.Module,
    torch.dtype,
    torch.device,
    torch.Size,
    torch.layout,
    torch.memory_format,
    torch.Generator,
    BuiltinFunctionType,
    io.IOBase,
)


def tensors_in(value: Any, *, opaque: bool = False) -> list[Tensor]:
    """Every tensor inside ``value``, each once, in the order in which they are found.

    Args:
        value: any object.
        opaque: pass over what `map_tensors` refuses.

    Raises:
        HetConvError: as `map_tensors` does.
    """
    return [*_Search(value, opaque).tensors.values()]


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """``value`` with ``function(x)`` in the place of each tensor x.

    Searched are containers of Python and those that are registered with PyTorch's
    pytrees, dataclasses, and attributes of other objects. What holds no tensor that
    changes is returned as it is; anything else is a copy, but for its other contents,
    and what is inside refers to the copy where it referred to the original. The
    function is called once for each tensor.

    Raises: HetConvError: ``value`` contains a generator, another iterator or a function
        that holds a tensor, which cannot
            be looked into; or a set of several tensors, which each process would find
            in another order.
    """
    return _Search(value).mapped(function)


class _Opened(NamedTuple):
    """What a container holds, and how one like it is made of what takes the place of these parts.

    ``fill`` puts them into what ``empty`` gives, which exists before them, so that they
    may refer to it. Without ``empty`` it gives a container that is complete at once,
    such as a tuple.
    """

    parts: list[Any]
    fill: Callable[[Any, list[Any]], Any]
    empty: Callable[[], Any] | None = None


class _Search:
    """All that can be reached from a value, by id."""

    def __init__(self, value: Any, opaque: bool = False):
        self._value, self._opaque = value, opaque
        self.tensors: dict[
            int, Tensor
        ] = {}  # in the order in which they are found, alike on all ranks
        self._opened: dict[int, _Opened] = {}
        self._held_by: dict[int, list[int]] = {}
        self._alive: list[Any] = []  # so that the ids stay theirs
        self._sets: list[Any] = []
        self._new: dict[int, Any] = {}  # what takes the place of these
        self._differ: set[int] = set()
        self._begun: dict[
            int, int
        ] = {}  # how many there were when a container was begun that has to be complete
        self._explore()

    def _explore(self) -> None:
        left = [self._value]
        while left:
            value = left.pop()
            if (
                isinstance(value, _LEAVES)
                or id(value) in self._opened
                or id(value) in self.tensors
            ):
                continue
            self._alive.append(value)
            if isinstance(value, Tensor):
                self.tensors[id(value)] = value
                continue
            opened = self._opened[id(value)] = self._open(value)
            for part in opened.parts:
                self._held_by.setdefault(id(part), []).append(id(value))
            left.extend(reversed(opened.parts))
        for value in self._sets:
            self._refuse_several_in_a_set(value)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Any:
        """The value with ``function(x)`` in the place of each tensor x."""
        for x in self.tensors.values():
            y = function(x)
            if y is not x:
                self._new[id(x)] = y
        self._differ = self._holders(self._new)
        return self._built(self._value)

    def _holders(self, parts: Iterable[int]) -> set[int]:
        """What holds one of these, or holds what holds it, and so on."""
        found, left = set[int](), list(parts)
        while left:
            more = [
                holder
                for holder in self._held_by.get(left.pop(), ())
                if holder not in found
            ]
            found.update(more)
            left.extend(more)
        return found

    def _built(self, value: Any) -> Any:
        """Returns the replacement of a value; what does not differ stays the same object."""
        at = id(value)
        if at in self._new or at not in self._differ:
            return self._new.get(at, value)
        opened = self._opened[at]
        if opened.empty is not None:
            self._new[at] = opened.empty()
            opened.fill(self._new[at], [self._built(part) for part in opened.parts])
            return self._new[at]
        if self._begun.get(at) == len(self._new):
            raise HetConvError(
                f"a {type(value).__name__} that contains itself was found among what a model "
                "is given or returns, and "
                f"cannot be made anew; give a list, a dict or an object in its place"
            )
        self._begun[at] = len(self._new)
        parts = [self._built(part) for part in opened.parts]
        if (
            at not in self._new
        ):  # a list inside that refers to this may have had it made
            self._new[at] = opened.fill(None, parts)
        return self._new[at]

    def _open(self, value: Any) -> _Opened:
        kind = type(value)
        if kind in (set, frozenset):
            self._sets.append(value)
        if kind is list:
            return _Opened(value, list.extend, list)
        if kind is set:
            return _Opened([*value], set.update, set)
        if kind is deque:
            return _Opened(
                [*value], deque.extend, functools.partial(deque, maxlen=value.maxlen)
            )
        if isinstance(value, tuple) or kind is frozenset:
            make = getattr(kind, "_make", kind)
            return _Opened([*value], lambda _, parts: make(parts))
        if kind not in (dict, OrderedDict, defaultdict) and kind in tree_node_types():
            node = tree_node_types()[kind]  # such as transformers' outputs
            children, context = node.flatten_fn(value)
            return _Opened(
                [*children], lambda _, parts: node.unflatten_fn(parts, context)
            )
        if isinstance(value, (MappingProxyType, ValuesView, ItemsView)):
            return _view(value)
        if isinstance(value, (Iterator, FunctionType, MethodType, functools.partial)):
            return self._function(value)
        return _object(value)

    def _function(self, value: Any) -> _Opened:
        """Refuses functions and iterators that hold tensors: nothing can be put into them."""

        def refuse(*_: Any) -> NoReturn:
            raise HetConvError(
                f"a {type(value).__name__} was found among what a model is given or returns, "
                "and tensors inside it "
                f"cannot be reached; give a list, a tuple, a dict or a dataclass of tensors"
            )

        if self._opaque:
            return _Opened([], refuse)
        if isinstance(value, Iterator):
            refuse()
        if isinstance(value, MethodType):  # of an object that may hold it
            return _Opened(
                [value.__self__], lambda _, parts: MethodType(value.__func__, *parts)
            )
        return _Opened(_held_by_function(value), refuse)

    def _refuse_several_in_a_set(self, value: Any) -> None:
        """Ranks would find them in different orders, and exchange one for another."""
        holders = self._holders(self.tensors)
        found = sum(id(x) in self.tensors or id(x) in holders for x in value)
        if found > 1 and not self._opaque:
            raise HetConvError(
                f"a {type(value).__name__} of {found} tensors, or of what holds them, was "
                "found among what a model is "
                "given or returns; its order differs between processes: give a list, a tuple "
                "or a dict"
            )


def _view(value: Any) -> _Opened:
    """A mapping that cannot be written to, or the values or items of a mapping."""
    if isinstance(value, ValuesView):
        return _Opened([*value], lambda _, parts: dict(enumerate(parts)).values())
    items = dict(value)
    if isinstance(value, ItemsView):
        return _Opened(
            [*items.values()],
            lambda _, parts: dict(zip(items, parts, strict=True)).items(),
        )
    return _Opened(
        [*items.values()],
        lambda _, parts: MappingProxyType(dict(zip(items, parts, strict=True))),
    )


def _object(value: Any) -> _Opened:
    """An object: its own items if it is a mapping or a list, and its attributes."""
    items = (
        [*value.items()]
        if isinstance(value, dict)
        else [*enumerate(value)]
        if isinstance(value, list)
        else []
    )
    names = _attributes(value)
    old = [item for _, item in items] + [getattr(value, name, None) for name in names]

    def fill(made: Any, parts: list[Any]) -> None:
        for (key, was), item in zip(items, parts, strict=False):
            if item is not was:
                made[key] = item
        for name, was, attribute in zip(
            names, old[len(items) :], parts[len(items) :], strict=True
        ):
            if attribute is not was:
                object.__setattr__(made, name, attribute)

    return _Opened(old, fill, functools.partial(copy.copy, value))


def _attributes(value: Any) -> list[str]:
    names = list(getattr(value, "__dict__", ()))
    if is_dataclass(value):
        names += [field.name for field in fields(value)]
    names += [name for kind in type(value).__mro__ for name in _slots(kind)]
    return [
        name for name in dict.fromkeys(names) if name not in ("__dict__", "__weakref__")
    ]


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _held_by_function(value: Any) -> list[Any]:
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    cells = [cell for cell in value.__closure__ or () if _is_filled(cell)]
    return [cell.cell_contents for cell in cells] + list(value.__defaults__ or ())


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
