"""Runs code on a model and restores the model, its code and random states."""

from __future__ import annotations

import functools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hetconv.torch_internals import storage_id

_UNSET = object()  # stands for the content of an empty cell
_ATOMS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    ModuleType,
    BuiltinFunctionType,
    torch.dtype,
)
_CONTAINERS = (dict, list, set, deque)
# Packages whose objects are not searched: other threads use them, or they hold nothing
# of a model.
_OPAQUE_PACKAGES = frozenset(
    """
    asyncio concurrent hetconv io _io logging multiprocessing queue threading torch weakref
    """.split()
)


@contextmanager
def preserved(model: nn.Module, *, values: bool = False) -> Iterator[None]:
    """Runs a block, then restores the model, even if the block raises.

    Every attribute of every module is the same object as before, with the same
    contents; so is what containers, attributes and hooks hold. Containers and caches of
    the files that define the modules are restored too, and the random states of torch,
    numpy and Python.

    Args:
        model: The model that the block runs.
        values: Whether to restore the values of tensors too, from copies. A block that
            does not run on fake tensors needs that.
    """
    snapshot = _Snapshot(values)
    snapshot.visit_all([model])
    for module in _code_of(model):
        snapshot.visit_code(module)
    states = _random_states()
    try:
        yield
    finally:
        snapshot.restore()
        for set_state, state in states:
            set_state(state)


class _Snapshot:
    """What can be reached from a model, and its state when it was visited."""

    def __init__(self, values: bool):
        self._values = values
        # By id. The objects are kept alive, so that no other one gets their ids.
        self._seen: dict[int, Any] = {}
        self._contents: list[tuple[Any, list[Any]]] = []
        self._cells: list[tuple[CellType, Any]] = []
        self._slots: list[tuple[Any, str, Any]] = []
        self._tensors: list[
            tuple[Tensor, Tensor, Tensor | None, bool, Tensor | None]
        ] = []
        self._generators: list[tuple[torch.Generator, Tensor]] = []
        self._caches: list[tuple[Any, int]] = []

    def visit_all(self, roots: Iterable[Any]) -> None:
        """Visits everything that can be reached from ``roots``.

        It does not recurse, because models nest deeply.
        """
        waiting = list(roots)
        while waiting:
            x = waiting.pop()
            if isinstance(x, _ATOMS) or id(x) in self._seen:
                continue
            self._seen[id(x)] = x
            waiting += self._visit(x)

    def visit_code(self, module: ModuleType) -> None:
        """Visits containers and caches of a file, but not the objects in them."""
        for x in vars(module).values():
            if isinstance(x, _CONTAINERS) and id(x) not in self._seen:
                self._record_contents(x)
            elif isinstance(x, functools._lru_cache_wrapper):
                self._caches.append((x, x.cache_info().misses))

    def _visit(self, x: Any) -> list[Any]:
        if isinstance(x, Tensor):
            self._record_tensor(x)
            return []
        if isinstance(x, torch.Generator):
            self._generators.append((x, x.get_state()))
            return []
        if isinstance(x, FunctionType):
            return self._visit_function(x)
        if isinstance(x, MethodType):
            return [x.__self__, x.__func__]
        if isinstance(x, functools.partial):
            return [x.func, *x.args, *x.keywords.values()]
        if isinstance(x, (tuple, frozenset)):
            return [*x, *self._visit_attributes(x)]
        found = self._visit_attributes(x)
        if isinstance(x, _CONTAINERS):
            self._record_contents(x)
            found += x.values() if isinstance(x, dict) else x
        return found

    def _visit_function(self, function: FunctionType) -> list[Any]:
        """Returns what a function's closure, defaults and global containers hold."""
        cells = function.__closure__ or ()
        self._cells += [(cell, _content(cell)) for cell in cells]
        names = function.__code__.co_names
        global_values = [function.__globals__.get(name) for name in names]
        containers = [x for x in global_values if isinstance(x, _CONTAINERS)]
        return [*map(_content, cells), *(function.__defaults__ or ()), *containers]

    def _visit_attributes(self, x: Any) -> list[Any]:
        found: list[Any] = []
        package = type(x).__module__.partition(".")[0]
        if package in _OPAQUE_PACKAGES and not isinstance(x, nn.Module):
            return found
        attributes = getattr(x, "__dict__", None)
        if isinstance(attributes, dict):
            self._record_contents(attributes)
            found += attributes.values()
        for name in _slot_names(type(x)):
            value = getattr(x, name, _UNSET)
            if value is not _UNSET:
                self._slots.append((x, name, value))
                found.append(value)
        return found

    def _record_contents(self, x: Any) -> None:
        self._contents.append((x, [*x.items()] if isinstance(x, dict) else [*x]))

    def _record_tensor(self, x: Tensor) -> None:
        copied = self._values and x.layout == torch.strided
        copy = x.detach().clone() if copied else None
        grad = x.grad if x.is_leaf else None
        self._tensors.append((x, x.data, copy, x.requires_grad, grad))

    @torch.no_grad()
    def restore(self) -> None:
        """Restores everything that was visited."""
        for x, contents in self._contents:
            _restore_contents(x, contents)
        for cell, content in self._cells:
            if content is not _UNSET and _content(cell) is not content:
                cell.cell_contents = content
        for x, name, value in self._slots:
            if getattr(x, name, _UNSET) is not value:
                object.__setattr__(x, name, value)
        for generator, state in self._generators:
            generator.set_state(state)
        for cache, misses in self._caches:
            if cache.cache_info().misses != misses:
                cache.cache_clear()
        for x, data, copy, requires_grad, grad in self._tensors:
            if copy is not None:
                data.copy_(copy)
            if x.is_leaf:
                if storage_id(x) != storage_id(data) or x.shape != data.shape:
                    x.data = data
                if x.requires_grad != requires_grad:
                    x.requires_grad_(requires_grad)
                if x.grad is not grad:
                    x.grad = grad


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _UNSET


def _slot_names(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                yield name


def _restore_contents(x: Any, contents: list[Any]) -> None:
    """Restores a container unless it holds the same objects."""
    current = [*x.items()] if isinstance(x, dict) else [*x]
    if _identities(current, x) == _identities(contents, x):
        return
    x.clear()
    x.extend(contents) if isinstance(x, (list, deque)) else x.update(contents)


def _identities(contents: list[Any], container: Any) -> list[int]:
    """Returns the ids of objects, of a dict's keys and values, for tensors have no ==."""
    objects = chain(*contents) if isinstance(container, dict) else contents
    return [id(x) for x in objects]


def _code_of(model: nn.Module) -> list[ModuleType]:
    """Returns the files that define the classes of a model's modules, except torch's."""
    classes = (kind for module in model.modules() for kind in type(module).__mro__)
    names = dict.fromkeys(kind.__module__ for kind in classes)
    return [
        sys.modules[name]
        for name in names
        if name in sys.modules and name.partition(".")[0] not in ("torch", "builtins")
    ]


def _random_states() -> list[tuple[Callable[[Any], Any], Any]]:
    """Returns the state of each random generator, with the function that sets it."""
    states: list[tuple[Callable[[Any], Any], Any]] = [
        (torch.set_rng_state, torch.get_rng_state()),
        (random.setstate, random.getstate()),
    ]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append((torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    if "numpy" in sys.modules:
        numpy: Any = sys.modules["numpy"]
        states.append((numpy.random.set_state, numpy.random.get_state()))
    return states
