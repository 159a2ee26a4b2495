"""Caches of what was found out about calls, of each signature of a model's inputs apart.

How an operator runs on parts, and what moves for it, depends on the shapes of its
inputs. It is found out once and remembered. Inputs that come in ever new sizes would
fill the memory: a model keeps what belongs to the signatures that it was called with
last, and no more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

MAX_ENTRIES = 4096
"""Of one cache and one signature: numbers that change with every step would fill it."""
_caches: list[Cache[Any, Any]] = []


class Cache(Generic[K, V]):
    """Values that are kept under the signature of the current call.

    Backward passes read those of the last call.
    """

    def __init__(self) -> None:
        self.current: dict[K, V] = {}
        _caches.append(self)

    def add(self, key: K, value: V) -> V:
        """Remembers and returns ``value``."""
        if len(self.current) >= MAX_ENTRIES:
            self.current.clear()
        self.current[key] = value
        return value


class RecentlyUsed(Generic[K, V]):
    """Values by key; the one that was not used for longest is forgotten.

    Args:
        most: The number of values.
    """

    def __init__(self, most: int):
        self._most = most
        self._known: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: K) -> bool:
        return key in self._known

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Returns the value of ``key``, which is made if it is not remembered."""
        value = self._known.pop(key, None)
        if value is None:
            value = make()
        self._known[key] = value
        if len(self._known) > self._most:
            self._known.popitem(last=False)
        return value


class SignatureCaches:
    """The contents of all caches, for each of the signatures that one model was called with last.

    Args:
        most: the number of signatures; the one that was not called for longest is forgotten.
    """

    def __init__(self, most: int):
        self._most = most
        self._known: RecentlyUsed[str, list[dict[Any, Any]]] = RecentlyUsed(most)

    def __contains__(self, signature: str) -> bool:
        return signature in self._known

    def use(self, signature: str) -> None:
        """Makes what is remembered under a signature the current contents of all caches."""
        contents = self._known.get(signature, lambda: [{} for _ in _caches])
        _install(contents)

    def __deepcopy__(self, memo: Any) -> SignatureCaches:
        """Returns caches without contents, some of which refer to objects by identity."""
        return SignatureCaches(self._most)


@contextmanager
def preserve_current() -> Iterator[None]:
    """Afterwards the contents that are current now are so again."""
    contents = [cache.current for cache in _caches]
    try:
        yield
    finally:
        _install(contents)


def _install(contents: list[dict[Any, Any]]) -> None:
    for cache, content in zip(_caches, contents, strict=True):
        cache.current = content
