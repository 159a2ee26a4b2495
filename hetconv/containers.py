"""Tensors inside whatever Python code passes and returns: tuples, dicts, dataclasses, outputs of libraries, objects."""

from __future__ import annotations

import copy
import enum
import functools
import io
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from .errors import HetConvError
from .torch_internals import tree_node_types

# Values that hold no tensor of a result. A module holds its own; it is no container of what a call returns.
_LEAVES: tuple[type, ...] = (
    type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, enum.Enum, type, ModuleType, nn.Module,
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, torch.Generator, BuiltinFunctionType,
    io.IOBase,
)  # fmt: skip


def tensors_in(value: Any, *, opaque: bool = False) -> list[Tensor]:
    """Every tensor inside ``value``, each once, in the order in which they are found.

    Args:
        value: any object.
        opaque: pass over what `map_tensors` refuses.

    Raises:
        HetConvError: as `map_tensors` does.
    """
    found: dict[int, Tensor] = {}

    def note(x: Tensor) -> Tensor:
        found.setdefault(id(x), x)
        return x

    _Search(note, opaque).map(value)
    return list(found.values())


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """``value`` with ``function(x)`` in the place of each tensor x.

    Searched are containers of Python and those that are registered with PyTorch's pytrees, dataclasses, and attributes
    of other objects. What holds no tensor that changes is returned as it is; anything else is a copy, but for its
    other contents. The function is called once for each tensor.

    Raises:
        HetConvError: ``value`` contains a generator, another iterator or a function that holds a tensor, which cannot
            be looked into.
    """
    return _Search(function).map(value)


class _Search:
    def __init__(self, function: Callable[[Tensor], Tensor], opaque: bool = False):
        self._function, self._opaque = function, opaque
        self._mapped: dict[int, Any] = {}  # by id; what is under way stands for itself
        self._alive: list[Any] = []  # so that the ids stay theirs

    def map(self, value: Any) -> Any:
        if isinstance(value, _LEAVES):
            return value
        if id(value) not in self._mapped:
            self._mapped[id(value)] = value
            self._alive.append(value)
            self._mapped[id(value)] = self._function(value) if isinstance(value, Tensor) else self._rebuilt(value)
        return self._mapped[id(value)]

    def _rebuilt(self, value: Any) -> Any:
        kind = type(value)
        if kind in (list, set, frozenset, deque):
            items = [self.map(x) for x in value]
            if not _differ(items, value):
                return value
            return deque(items, value.maxlen) if kind is deque else kind(items)
        if isinstance(value, tuple):
            items = [self.map(x) for x in value]
            if not _differ(items, value):
                return value
            return kind._make(items) if hasattr(kind, "_make") else kind(items)
        if kind is dict:
            return self._items(value, {})
        if kind in tree_node_types():
            return self._registered(value)
        if isinstance(value, (Iterator, FunctionType, MethodType, functools.partial)):
            return self._refused_if_it_holds_a_tensor(value)
        return self._object(value)

    def _items(self, value: Mapping[Any, Any], into: Any) -> Any:
        """The mapped items of a mapping, or the mapping itself where none changes."""
        items = {key: self.map(x) for key, x in value.items()}
        if not _differ(items.values(), value.values()):
            return value
        into.update(items)
        return into

    def _registered(self, value: Any) -> Any:
        """A container that PyTorch's pytrees know, such as an OrderedDict or transformers' outputs."""
        node = tree_node_types()[type(value)]
        children, context = node.flatten_fn(value)
        items = [self.map(x) for x in children]
        return node.unflatten_fn(items, context) if _differ(items, children) else value

    def _object(self, value: Any) -> Any:
        """Another object: its own items if it is a mapping or a list, and its attributes."""
        made = value
        if isinstance(value, (dict, list)):
            items = {k: self.map(x) for k, x in (value.items() if isinstance(value, dict) else enumerate(value))}
            old = value.values() if isinstance(value, dict) else value
            if _differ(items.values(), old):
                made = copy.copy(value)
                for key, item in items.items():
                    made[key] = item
        for name in _attributes(value):
            attribute = getattr(value, name, None)
            new = self.map(attribute)
            if new is not attribute:
                made = copy.copy(value) if made is value else made
                object.__setattr__(made, name, new)
        return made

    def _refused_if_it_holds_a_tensor(self, value: Any) -> Any:
        """Nothing can be put into a function or an iterator, and an iterator cannot be read without being used up."""
        if self._opaque:
            return value
        held = [*_held_by_function(value)] if not isinstance(value, Iterator) else None
        if held is not None:
            mapped = [self.map(x) for x in held]
            if not _differ(mapped, held):
                return value
        raise HetConvError(
            f"a {type(value).__name__} was found among what a model is given or returns, and tensors inside it cannot "
            f"be reached; give a list, a tuple, a dict or a dataclass of tensors"
        )


def _differ(new: Any, old: Any) -> bool:
    return any(a is not b for a, b in zip(new, old, strict=True))


def _attributes(value: Any) -> list[str]:
    names = list(getattr(value, "__dict__", ()))
    if is_dataclass(value):
        names += [field.name for field in fields(value)]
    names += [name for kind in type(value).__mro__ for name in _slots(kind)]
    return [name for name in dict.fromkeys(names) if name not in ("__dict__", "__weakref__")]


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _held_by_function(value: Any) -> list[Any]:
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__self__]
    cells = [cell for cell in value.__closure__ or () if _is_filled(cell)]
    return [cell.cell_contents for cell in cells] + list(value.__defaults__ or ())


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
