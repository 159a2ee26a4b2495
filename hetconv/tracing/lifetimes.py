"""How long the results of operators stay in memory, as the run that is recorded holds them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from hetconv.torch_internals import storage_id


@dataclass(frozen=True)
class Lifetimes:
    """How long results stay in memory, by node.

    Attributes:
        last: Last node that runs while the program refers to the result; the number of
            nodes for results that outlive them all.
        saves: Nodes whose results autograd saves for the backward pass of this one.
        saved_bytes: Bytes of what it saves besides results, inputs and parameters.
    """

    last: tuple[int, ...]
    saves: tuple[frozenset[int], ...]
    saved_bytes: tuple[int, ...]


class LifetimeRecorder:
    """Observes memory by weak references while a model runs on fake tensors.

    What autograd saves is not held, so that a result lives as long as the program
    refers to it. A backward pass within the run gets new fake tensors.

    Args:
        known: Tensors that are no results: parameters, buffers and inputs.
    """

    def __init__(self, known: Iterable[Tensor]):
        self._known = {storage_id(x) for x in known}
        self._owner: dict[int, int] = {}  # node by storage; see `_alive`
        # Weak references keep the ids of storages from being used again.
        self._alive: list[tuple[StorageWeakRef, int]] = []
        self._kept: list[StorageWeakRef] = []
        self._saving: list[tuple[int, int]] = []
        self._last: list[int] = []
        self._saves: list[frozenset[int]] = []
        self._saved_bytes: list[int] = []

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Sees what autograd saves."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _FakeLayout.tensor):
            yield

    def before_node(self) -> None:
        """Notes, before an operator runs, which results are free."""
        now = len(self._last) - 1
        still = []
        for ref, node in self._alive:
            if ref.expired():
                self._last[node] = now
            else:
                still.append((ref, node))
        self._alive = still

    def add_node(self, results: Sequence[Tensor]) -> None:
        """Adds a node that returned or wrote to these tensors."""
        node = len(self._last)
        for x in results:
            memory = storage_id(x)
            if memory in self._owner or memory in self._known:
                continue
            self._owner[memory] = node
            ref = StorageWeakRef(x.untyped_storage())
            self._kept.append(ref)
            self._alive.append((ref, node))
        self._last.append(node)
        # What was saved between operators, as a checkpoint does, is of the next one.
        saved = dict(self._saving)
        self._saving.clear()
        owners = {self._owner[m] for m in saved if m in self._owner}
        self._saves.append(frozenset(owners))
        others = (n for m, n in saved.items() if m not in self._owner)
        self._saved_bytes.append(sum(others))

    def lifetimes(self) -> Lifetimes:
        """Returns what was observed; results that are still alive outlive all nodes."""
        self.before_node()
        for _, node in self._alive:
            self._last[node] = len(self._last)
        return Lifetimes(
            tuple(self._last), tuple(self._saves), tuple(self._saved_bytes)
        )

    def _pack(self, x: Tensor) -> _FakeLayout:
        memory = storage_id(x)
        if memory not in self._known:
            self._saving.append((memory, x.untyped_storage().nbytes()))
        return _FakeLayout(x.shape, x.stride(), x.dtype, x.device)


class _FakeLayout(NamedTuple):
    """What there is of a fake tensor, without memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def tensor(self) -> Tensor:
        """Returns a new fake tensor; this runs within the mode of the others."""
        options: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        return torch.empty_strided(self.shape, self.stride, **options)
