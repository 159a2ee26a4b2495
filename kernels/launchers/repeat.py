"""A kernel call that is made again on tensors at other addresses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .interface import CompiledCall, KernelCall

MAX_TENSOR_MAPS = 64
"""Addresses per parameter whose tensor maps are kept."""


class _Pointer(NamedTuple):
    """Where an argument's address comes from.

    Attributes:
        position: Position of the argument.
        source: Position of its tensor among those that a call is given.
        offset: Bytes from the tensor's address.
    """

    position: int
    source: int
    offset: int


@dataclass(frozen=True)
class _Address:
    """What a tensor descriptor needs of a tensor."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


class Repeat:
    """A compiled call with all its arguments but the addresses.

    Args:
        call: The call.
        compiled: What makes it.
        tensors: Tensors of the call, of which further calls give the addresses.
        sources: Position among those of each tensor, or tuple of tensors, in
            ``call.arguments``. An argument may be a view of its tensor.
    """

    def __init__(
        self,
        call: KernelCall,
        compiled: CompiledCall,
        tensors: Sequence[Tensor],
        sources: Mapping[str, int | tuple[int, ...]],
    ):
        self._launch = compiled.launch
        self._arguments: list[Any] = []
        self._pointers: list[_Pointer] = []
        self._tuples: list[tuple[int, tuple[int, ...]]] = []
        self._maps: list[tuple[_Pointer, Callable[[int], Any]]] = []
        given = {**call.constants, **call.arguments}
        for name in call.kernel.arg_names:
            value, source = given[name], sources.get(name)
            if source is None:
                self._arguments.append(value)
            elif isinstance(source, tuple):
                self._tuples.append((len(self._arguments), source))
                self._arguments.append(None)
            else:
                self._add(value, source, tensors[source].data_ptr(), compiled)

    def _add(
        self, value: Any, source: int, address: int, compiled: CompiledCall
    ) -> None:
        """Adds a tensor, or a descriptor of one, without keeping the tensor."""
        is_tensor = isinstance(value, Tensor)
        base = value if is_tensor else value.base
        offset = base.data_ptr() - address
        pointer = _Pointer(len(self._arguments), source, offset)
        if is_tensor:
            self._pointers.append(pointer)
            self._arguments.append(None)
            return
        number = len(self._maps)
        like = replace(value, base=_Address(base.data_ptr(), base.dtype))
        self._maps.append((pointer, _tensor_maps(compiled, number, like)))
        self._arguments += compiled.expand(number, like)

    def __call__(self, addresses: Sequence[int]) -> None:
        """Launches the kernel on tensors at these addresses."""
        arguments = self._arguments.copy()
        for position, source, offset in self._pointers:
            arguments[position] = addresses[source] + offset
        for position, sources in self._tuples:
            arguments[position] = tuple([addresses[source] for source in sources])
        for (position, source, offset), tensor_map in self._maps:
            arguments[position] = tensor_map(addresses[source] + offset)
        self._launch(arguments)


def _tensor_maps(
    compiled: CompiledCall, number: int, like: Any
) -> Callable[[int], Any]:
    """Returns a function that makes, and keeps, the tensor map at an address."""

    @lru_cache(MAX_TENSOR_MAPS)
    def tensor_map(address: int) -> Any:
        moved = replace(like, base=_Address(address, like.base.dtype))
        return compiled.expand(number, moved)[0]

    return tensor_map
