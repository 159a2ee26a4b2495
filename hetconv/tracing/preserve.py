"""Puts a model back as it was: its attributes and tensors, what its hooks hold, caches
of its code, random states.
"""

from __future__ import annotations

import functools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hetconv.torch_internals import storage_id

_UNSET = object()  # what an empty cell holds
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
# Objects of these are not looked into: other threads use them, or they hold nothing of a model's.
_FOREIGN = frozenset(
    """
    asyncio concurrent hetconv io _io logging multiprocessing queue threading torch weakref
    """.split()
)


@contextmanager
def preserved(model: nn.Module, *, values: bool = False) -> Iterator[None]:
    """Runs a block, then puts the model back as it was, also if the block raises.

    Every attribute of every module is then the object that it was, and so are the
    contents of the containers and objects that attributes and hooks hold, and
    containers and caches of the code that defines the modules. Random states of torch,
    numpy and Python are those of before.

    Args: model: what the block runs. values: whether to restore the values of tensors
        too, from copies: for a block that computes for real.
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
        for restore, state in states:
            restore(state)


class _Snapshot:
    def __init__(self, values: bool):
        self._values = values
        self._seen: dict[int, Any] = {}  # by id; kept, so that the ids stay theirs
        self._contents: list[tuple[Any, list[Any]]] = []
        self._cells: list[tuple[CellType, Any]] = []
        self._slots: list[tuple[Any, str, Any]] = []
        self._tensors: list[
            tuple[Tensor, Tensor, Tensor | None, bool, Tensor | None]
        ] = []
        self._generators: list[tuple[torch.Generator, Tensor]] = []
        self._caches: list[tuple[Any, int]] = []

    def visit_all(self, found: Iterable[Any]) -> None:
        """Notes everything that can be reached, without recursion: lists of blocks are deep."""
        waiting = list(found)
        while waiting:
            x = waiting.pop()
            if isinstance(x, _ATOMS) or id(x) in self._seen:
                continue
            self._seen[id(x)] = x
            waiting += self._visit(x)

    def visit_code(self, module: ModuleType) -> None:
        """Containers and caches at the top of a file, but not what they hold: that is
        the program's.
        """
        for x in vars(module).values():
            if isinstance(x, _CONTAINERS) and id(x) not in self._seen:
                self._note_contents(x)
            elif isinstance(x, functools._lru_cache_wrapper):
                self._caches.append((x, x.cache_info().misses))

    def _visit(self, x: Any) -> list[Any]:
        if isinstance(x, Tensor):
            self._note_tensor(x)
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
            self._note_contents(x)
            found += x.values() if isinstance(x, dict) else x
        return found

    def _visit_function(self, function: FunctionType) -> list[Any]:
        cells = function.__closure__ or ()
        self._cells += [(cell, _content(cell)) for cell in cells]
        named = [function.__globals__.get(name) for name in function.__code__.co_names]
        found = [*map(_content, cells), *(function.__defaults__ or ())]
        return [*found, *(x for x in named if isinstance(x, _CONTAINERS))]

    def _visit_attributes(self, x: Any) -> list[Any]:
        found: list[Any] = []
        if type(x).__module__.partition(".")[0] in _FOREIGN and not isinstance(
            x, nn.Module
        ):
            return found
        own = getattr(x, "__dict__", None)
        if isinstance(own, dict):
            self._note_contents(own)
            found += own.values()
        for kind in type(x).__mro__:
            names = kind.__dict__.get("__slots__", ())
            for name in (names,) if isinstance(names, str) else names:
                if (
                    name not in ("__dict__", "__weakref__")
                    and (value := getattr(x, name, _UNSET)) is not _UNSET
                ):
                    self._slots.append((x, name, value))
                    found.append(value)
        return found

    def _note_contents(self, x: Any) -> None:
        self._contents.append((x, [*x.items()] if isinstance(x, dict) else [*x]))

    def _note_tensor(self, x: Tensor) -> None:
        copy = (
            x.detach().clone() if self._values and x.layout == torch.strided else None
        )
        self._tensors.append(
            (x, x.data, copy, x.requires_grad, x.grad if x.is_leaf else None)
        )

    @torch.no_grad()
    def restore(self) -> None:
        for x, contents in self._contents:
            _put_back(x, contents)
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


def _put_back(x: Any, contents: list[Any]) -> None:
    """Compares by identity: contents may not be comparable, as tensors are not."""
    flat_now = (
        [part for item in x.items() for part in item] if isinstance(x, dict) else [*x]
    )
    flat = (
        [part for item in contents for part in item]
        if isinstance(x, dict)
        else contents
    )
    if len(flat_now) == len(flat) and all(
        a is b for a, b in zip(flat_now, flat, strict=True)
    ):
        return
    x.clear()
    x.extend(contents) if isinstance(x, (list, deque)) else x.update(contents)


def _code_of(model: nn.Module) -> list[ModuleType]:
    """The Python modules that define the classes of a model's modules, but for torch's own."""
    names = dict.fromkeys(
        kind.__module__ for module in model.modules() for kind in type(module).__mro__
    )
    return [
        sys.modules[n]
        for n in names
        if n in sys.modules and n.partition(".")[0] not in ("torch", "builtins")
    ]


def _random_states() -> list[tuple[Callable[[Any], Any], Any]]:
    """Each with what puts it back."""
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
